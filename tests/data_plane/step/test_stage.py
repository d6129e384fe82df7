"""Pipelines of real stages: every greedy token is `transformers`', whatever layers move meanwhile.

What a stage does not have is NaN in all of them (harness/hash_clusters/pipeline/model_pipeline.py),
so that a token which depends on it cannot be right by chance.
"""

from collections import Counter
from dataclasses import replace
from itertools import combinations
from random import Random

import pytest
import torch

from data_plane.model.config import ModelConfig
from data_plane.model.weights import load_weights
from data_plane.step import stage as model_stage
from harness.exact.prompt_logprobs import assert_logprobs
from harness.exact.reference_prefill import prefill_pages
from harness.hash_clusters.pipeline.model_pipeline import ModelPipeline, play_chaos, still_setup
from nanocp.values.plan import PAGE_SIZE
from nanocp.values.sampling import PromptLogprobs, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24)
LENGTHS = (1, 64, 150)


def splits(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    """Every way to cut so many layers into so many stages."""
    cuts = combinations(range(1, num_layers), num_stages - 1)
    return [
        tuple(b - a for a, b in zip((0, *cut), (*cut, num_layers), strict=True)) for cut in cuts
    ]


def prompts(lengths=LENGTHS, seed=0):
    random = Random(seed)
    return [[random.randrange(2, 512) for _ in range(length)] for length in lengths]


HEADS = "tiny-qwen3-moe, in bf16"
"""K/V heads, and weights that native kernels keep in bf16."""


def play_through_all_splits(model, num_stages, kernels):
    """Begin with the first split, and go through all others and back while requests run."""
    every = splits(ModelConfig.from_folder(model.path).num_layers, num_stages)
    setup = still_setup(every[0], copy_ahead=num_stages != 3)
    pipeline = ModelPipeline(model.path, 0, setup, kernels=kernels)
    pipeline.asks = [(8 + 9 * turn, split) for turn, split in enumerate([*every[1:], every[0]])]
    pipeline.run(prompts(), GREEDY)
    asked = len(every) if len(every) > 1 else 0
    assert pipeline.counts["changes"] == asked and not pipeline.asks, "layers must move meanwhile"
    pipeline.judge(model.oracle)


@pytest.mark.parametrize(("name", "num_stages", "kernels"), [
    ("tiny", 2, "auto"),
    (HEADS, 2, "auto"),
    *(pytest.param("tiny", *how, marks=pytest.mark.system) for how in (
        (1, "auto"), (1, "torch"), (2, "torch"), (3, "auto"), (3, "torch"), (4, "auto")
    )),
    *(pytest.param(HEADS, *how, marks=pytest.mark.system) for how in ((2, "torch"), (3, "auto"))),
])  # fmt: skip
def test_every_split_before_during_and_after_changes(models, name, num_stages, kernels):
    play_through_all_splits(models(name), num_stages, kernels)


def test_layers_that_move_by_chance(tiny_checkpoint, tiny_oracle):
    played = [play_chaos(tiny_checkpoint, tiny_oracle, seed, 8) for seed in (2, 4)]
    assert sum(one.counts["changes"] for one in played) > 10


@pytest.mark.system
@pytest.mark.parametrize("first", range(0, 20, 5))
def test_layers_that_move_by_chance_in_20_seeds(models, first):
    for seed in range(first, first + 5):
        for model, num_requests in ((models("tiny"), 10), (models(HEADS), 6)):
            play_chaos(model.path, model.oracle, seed, num_requests)


def test_sampled_tokens_are_those_of_one_stage(tiny_checkpoint):
    """With all controls, penalties of the prompt among them, and log probabilities."""
    plain = SamplingParams(max_tokens=24, temperature=1.1, top_p=0.95, seed=1, logprobs=3)
    controlled = replace(
        plain, top_k=400, min_p=0.01, repetition_penalty=1.4, presence_penalty=0.6,
        frequency_penalty=0.3, logit_bias=((7, 2.0), (11, -3.0)), bad_words=((5,), (6, 8)),
    )  # fmt: skip
    each = [plain, controlled, replace(controlled, temperature=0.0), GREEDY]
    outputs = []
    for split, asks in (((4,), []), ((1, 3), [(6, (2, 2)), (14, (3, 1))])):
        pipeline = ModelPipeline(tiny_checkpoint, 0, still_setup(split))
        pipeline.asks = asks
        outputs.append(pipeline.run(prompts((70, 90, 65, 20)), each))
        logprobs = [len(pipeline.logprobs[number]) for number in (1, 2, 3)]
        assert logprobs == [24, 24, 24] and 4 not in pipeline.logprobs
    assert outputs[0] == outputs[1]
    assert len({tuple(output) for output in outputs[0]}) == 4


@pytest.mark.system
def test_stop_tokens_end_a_row(tiny_checkpoint):
    pipeline = ModelPipeline(tiny_checkpoint, 0, still_setup((2, 2)))
    (free,) = pipeline.run(prompts((80,)), GREEDY)
    stop = replace(GREEDY, stop_token_ids=(free[6],))
    stopped = ModelPipeline(tiny_checkpoint, 0, still_setup((2, 2)))
    stopped._check_token = stopped._check_story = lambda *_: None
    assert stopped.run(prompts((80,)), stop) == [free[: free.index(free[6]) + 1]]


@pytest.mark.parametrize(
    ("max_pass_tokens", "least_plain_chunk"),
    [pytest.param(7, 1, marks=pytest.mark.system), (70, 50), (400, 1000)],
)
def test_kv_of_chunks_is_that_of_the_reference_prefill(
    tiny_checkpoint, max_pass_tokens, least_plain_chunk, monkeypatch
):
    """Chunks of any length, with queries absorbed or not, over pages in any frames."""
    setup = still_setup((1, 3), max_pass_tokens=max_pass_tokens)
    pipeline = ModelPipeline(tiny_checkpoint, 0, setup, kernels="torch")
    seen: dict[int, list[int]] = {}
    run_layer = model_stage.CpuStageModel.run_layer

    def note(self, layer, place, spans, rows):
        for span, frames in spans:
            seen[span.request_id] = list(frames)
        return run_layer(self, layer, place, spans, rows)

    monkeypatch.setattr(model_stage.CpuStageModel, "run_layer", note)
    for process in pipeline.processes:
        process.stage.model._least_plain_chunk = least_plain_chunk
    (ids,) = prompts((300,))
    pipeline.run([ids], SamplingParams(temperature=0, max_tokens=1))
    model = ModelConfig.from_folder(tiny_checkpoint)
    weights = load_weights(tiny_checkpoint, model, torch.float32, range(model.num_experts))
    for page, kv_LSW in prefill_pages(weights, model, ids, 300, 512):
        count = min(PAGE_SIZE, 300 - page * PAGE_SIZE)
        for layer in range(4):
            stage = pipeline.processes[int(layer > 0)].stage
            own = pipeline._kv_of(stage, layer)[seen[1][page], :count]
            torch.testing.assert_close(own, kv_LSW[layer, :count], atol=1e-4, rtol=0)


def test_logprobs_of_a_prompt_are_those_of_the_reference_prefill(tiny_checkpoint):
    """Chunks end anywhere; the last layer runs for them though nothing is sampled."""
    setup = still_setup((1, 3), max_pass_tokens=70)
    pipeline, reported = ModelPipeline(tiny_checkpoint, 0, setup), []
    (ids,) = prompts((150,))
    last = pipeline.processes[-1].stage
    last.requests.ask_logprobs(1, ids, PromptLogprobs(2, reported.extend))
    pipeline.run([ids], SamplingParams(temperature=0, max_tokens=3))
    assert_logprobs(tiny_checkpoint, ids, reported, 2)


@pytest.mark.system
def test_weights_of_a_layer_that_lost_its_place_are_given_up(tiny_checkpoint):
    setup = still_setup((2, 2), max_layers=3)
    pipeline = ModelPipeline(tiny_checkpoint, 0, setup)
    pipeline.asks = [(5, (1, 3)), (12, (2, 2)), (20, (3, 1)), (30, (2, 2))]
    pipeline.run(prompts((70, 20)), GREEDY)
    assert pipeline.counts["changes"] == 4
    for process in pipeline.processes:
        held = process.stage.model._weights._layers.keys()
        assert held == process.stage.layers.place_of.keys() and len(held) <= 3


@pytest.mark.system
def test_a_stage_waits_for_weights_that_are_still_read(tiny_checkpoint, tiny_oracle, monkeypatch):
    """A layer that it got runs once it is here, however long that takes."""
    has, asked = model_stage.StageWeights.has, Counter()

    def late(self, layer):
        asked[id(self), layer] += 1
        return asked[id(self), layer] % 40 > 20 and has(self, layer)

    monkeypatch.setattr(model_stage.StageWeights, "has", late)
    pipeline = ModelPipeline(tiny_checkpoint, 0, still_setup((1, 3)))
    pipeline.asks = [(6, (3, 1))]
    pipeline.run(prompts((70, 20)), GREEDY)
    pipeline.judge(tiny_oracle)


def test_nan_in_what_a_stage_does_not_have_shows(models, monkeypatch):
    """The harness would see KV that was left out: a wrong frame is written on arrival."""
    write = model_stage.CpuStageModel.write_frame
    monkeypatch.setattr(
        model_stage.CpuStageModel,
        "write_frame",
        lambda self, place, frame, payload: write(self, place, frame ^ 1, payload),
    )
    # Torch's kernels: a gate of the compiled ones that gets NaN ends the process.
    with pytest.raises(AssertionError):
        play_through_all_splits(models("tiny"), 2, "torch")
