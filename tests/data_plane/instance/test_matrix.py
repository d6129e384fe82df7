"""The matrix of exactness: each token of a real cluster is the reference model's.

A case is a model, a story and settings. Instances, scheduler and exchange are real; the oracle is
one `transformers` forward over prompt and output. `make test` runs each story and each family in
what disturbs it most, `make test-system` the rest in several minutes. Models with states, which
have depths and kernels too, take 40: `python -m harness.exact.states_matrix`.
"""

from functools import partial
from itertools import combinations, product

import pytest
import torch

from data_plane.instance import decode, drafting
from data_plane.model.attention_kinds.gqa import GqaConfig
from data_plane.model.config import ModelConfig
from data_plane.startup import cpu
from harness.exact.exact_runs import assert_exact
from harness.exact.exact_stories import MORE_STORIES, STORIES
from harness.exact.states_matrix import FAMILIES as WITH_STATES
from harness.kernels.native_cases import native
from harness.transports.random_tables import table_of
from nanocp.config.scheduler import LANE_ORDERS
from nanocp.overlap.policies.registry import lane_policy

FAMILIES = (
    "tiny-qwen3-moe", "tiny-llama", "tiny-qwen2", "tiny-qwen3", "tiny-glm4-moe", "tiny-mixtral",
    *WITH_STATES, "tiny-qwen3-moe, in bf16",
)  # fmt: skip
"""Presets; one is stored in bf16, which the kernels keep, and computed in fp32 like the others."""
LENGTHS = (
    1, 2, 3, 17, 63, 64, 65, 66, 100, 127, 128, 129,
    191, 200, 256, 257, 320, 511, 700, 1023, 1500, 2048, 3001, 6000,
)  # fmt: skip
K4 = {"steps_per_window": 4}
TORCH = {"cpu_kernels": "torch"}
ABSORBED = {"wire_form": "absorbed"}
FUSED, EXCHANGE = ({"dispatch_backend": backend} for backend in ("fused", "exchange"))
AT_4, AT_CHAOS = {"policy": "fixed_degree:4"}, {"policy": "chaos"}
# Sixteen experts by a table that was drawn for each layer, some twice; on three instances they do
# not divide.
DRAWN = {"experts": partial(table_of, seed=1), "redundant_experts": 3}
THREE = {"num_instances": 3}
IN_STATES = [
    ("tiny-qwen3-next", "forced degree 4", 1, "torch", 1),
    ("tiny-qwen3-next", "chaos", 4, "native", 4),
    ("tiny-qwen3.5", "shared pages, chaos", 1, "native", 1),
    ("tiny-qwen3.5", "forced degree 2", 4, "torch", 4),
    ("tiny-kimi-linear", "forced degree 4", 4, "torch", 1),
    ("tiny-kimi-linear", "chaos, absorbed", 1, "native", 4),
    ("tiny-ling", "chaos", 4, "native", 1),
    ("tiny-ling", "forced degree 4", 1, "torch", 4),
]
"""Model, story, steps of a window, kernels, depth: with each pair of them but for stories."""
LIMITED = [
    ("forced degree 1", 4, "native", 1),
    ("forced degree 2", 1, "torch", 1),
    ("forced degree 4", 1, "native", 4),
]
DRAFTS = K4 | THREE | DRAWN | {"num_drafts": 2, "max_rows": 192, "max_attention_rows": 384}


def of_states(num_steps, kernels, depth):
    return {"steps_per_window": num_steps, "cpu_kernels": kernels, "depth": depth}


QUICK = [
    ("tiny", "forced degree 1", TORCH),
    ("tiny", "forced degree 4", TORCH),
    ("tiny", "forced degree 2", FUSED | DRAWN | {"threads_per_instance": 2}),
    ("tiny", "forced degree 2", {"cpu_kernels": "avx2", "moe_schedule": "arrival"}),
    ("tiny", "forced degree 2", TORCH | DRAWN),
    ("tiny", "forced degree 2", THREE),
    ("tiny", "mixed degrees", {"lengths": LENGTHS[::2]}),
    ("tiny", "shared pages, chaos", {}),
    ("tiny", "chaos", FUSED | {"num_tokens": 40}),
    ("tiny", "chaos", EXCHANGE | K4 | DRAWN | {"num_tokens": 40}),
    ("tiny", "chaos, absorbed", FUSED | {"num_tokens": 40}),
    ("tiny", "experts move", FUSED | K4),
    ("tiny", "experts move", EXCHANGE | TORCH | THREE | {"lanes": "random"}),
    ("tiny-glm4-moe, with an MTP layer", "experts move", EXCHANGE | {"num_drafts": 2}),
    ("tiny", "resyncs", {}),
    ("tiny", "lanes, chaos", K4 | {"lanes": "random"}),
    ("tiny", "conversations", AT_4 | K4),
    ("tiny-qwen3-next", "conversations", AT_CHAOS | K4),
    ("tiny-qwen3-next", "preempted, offload", K4),
    *((f"tiny, {variant}", "chaos", {"num_tokens": 40}) for variant in (
        "plain rope, published spelling", "no groups, two dense layers",
        "as DeepSeek-V2-Lite, published spelling",
        "no dense layer, two shared experts", "in FP8",
    )),
    ("tiny-glm4-moe, with an MTP layer", "drafts", DRAFTS),
    ("tiny-qwen3-moe", "chaos", K4 | TORCH),
    ("tiny-llama", "chaos", K4 | TORCH),
    ("tiny-qwen2", "shared pages, chaos", {}),
    ("tiny-qwen3", "mixed degrees, absorbed", {}),
    ("tiny-glm4-moe", "chaos, absorbed", {}),
    ("tiny-mixtral", "preempted", K4),
    ("tiny-qwen3-moe, in bf16", "chaos", {}),
    *((model, story, of_states(*how)) for model, story, *how in IN_STATES),
    *(("tiny-ling, with limits", story, of_states(*how)) for story, *how in LIMITED),
]  # fmt: skip
IN_SYSTEM = [
    ("tiny", "forced degree 2", TORCH),
    ("tiny", "forced degree 2", EXCHANGE),
    ("tiny", "forced degree 2", TORCH | THREE),
    ("tiny", "chaos", FUSED | DRAWN),
    ("tiny", "mixed degrees", {"lengths": LENGTHS}),
    ("tiny", "shared pages", {}),
    ("tiny", "conversations", {"policy": "fixed_degree:1"}),
    *(("tiny", "conversations, file", how) for how in (AT_CHAOS, AT_CHAOS | K4, AT_4)),
    ("tiny-qwen3-moe", "conversations", AT_4),
    ("tiny-qwen3-moe", "conversations", AT_CHAOS | K4),
    *(("models/tale", "conversations", how | K4 | {"num_drafts": 2}) for how in (AT_4, AT_CHAOS)),
    ("tiny-qwen3-next", "conversations", AT_4),
    ("tiny-kimi-linear", "conversations", AT_CHAOS | K4),
    ("tiny-qwen3-next", "preempted, offload", {}),
    ("tiny-kimi-linear", "preempted, offload", K4),
    ("tiny", "preempted, offload", {}),
    ("tiny", "preempted, offload", K4),
    ("tiny, with an MTP layer", "drafts", DRAFTS),
    *((f"tiny, {variant}", "chaos", wire_form | {"num_tokens": 40}) for variant in (
        "no q LoRA", "plain rope", "published spelling"
    ) for wire_form in ({}, ABSORBED)),
    *((f"tiny, {variant}", "chaos, absorbed", {"num_tokens": 40}) for variant in (
        "plain rope, published spelling", "no groups, two dense layers",
        "as DeepSeek-V2-Lite, published spelling",
        "no dense layer, two shared experts",
    )),
    *(("tiny", f"lanes, degree {degree}", how | {"lanes": lanes}) for degree in range(1, 5)
      for lanes in ("off", "always", "random") for how in (K4 | TORCH, {})),
    *(("tiny", "lanes, chaos", how | {"lanes": lanes})
      for how in ({}, K4) for lanes in ("always", "random")),
    *((model, story, {}) for model in FAMILIES for story in STORIES),
    *((model, story, K4 | TORCH) for model in FAMILIES for story in ("chaos", "preempted")),
]  # fmt: skip


def of_case(case, marks=()):
    """A parameter, named by what is in the case."""
    model, story, settings = case
    told = [
        f"{name}={value}" if isinstance(value, int | str) else name
        for name, value in settings.items()
    ]
    return pytest.param(*case, id=" ".join([model, story, *told]), marks=marks)


@pytest.mark.parametrize(("model", "story", "settings"), [
    *map(of_case, QUICK),
    *(of_case(case, pytest.mark.system) for case in IN_SYSTEM if case not in QUICK),
])  # fmt: skip
def test_every_token_is_the_references(models, model, story, settings):
    if settings.get("cpu_kernels") == "avx2":
        native((torch.float32, "avx2"))
    prompts = (STORIES | MORE_STORIES)[story](models(model).path, **settings)
    assert_exact(models(model).oracle, prompts)


PRIORITY = "combine 0/500, attention 120/610, exchange 300/800, experts 450/950"
TABLE = tuple((rows, 0, 90, order) for rows, order in enumerate((*LANE_ORDERS, PRIORITY), 1))
ORDERS = {"lanes": "random", "lane_table": TABLE}


@pytest.mark.parametrize(("model", "story", "settings"), [*map(of_case, [
    ("tiny", "lanes, degree 1", ORDERS),
    ("tiny", "lanes, degree 2", ORDERS),
    ("tiny", "lanes, chaos", ORDERS),
    ("tiny", "resyncs", ORDERS),
    ("tiny-glm4-moe, with an MTP layer", "drafts", ORDERS | DRAFTS),
])])  # fmt: skip
def test_every_order_of_a_lane_table_is_exact(models, monkeypatch, model, story, settings):
    name_of, run_in_turns, played = {}, decode.run_in_turns, {decode: set(), drafting: set()}

    def named(order):
        name_of[policy := lane_policy(order)] = order
        return policy

    def noted(module, steps, exchange, policy):
        played[module].add(name_of[policy])
        return run_in_turns(steps, exchange, policy)

    monkeypatch.setattr(cpu, "lane_policy", named)
    for module in played:
        monkeypatch.setattr(module, "run_in_turns", partial(noted, module))
    prompts = MORE_STORIES[story](models(model).path, **settings)
    assert_exact(models(model).oracle, prompts)
    assert played[decode] == {*LANE_ORDERS, PRIORITY}
    assert played[drafting] == (played[decode] if "num_drafts" in settings else set())


def test_every_family_and_each_pair_of_what_disturbs_states_is_quick():
    assert {model for model, _, _ in QUICK} >= set(FAMILIES)
    cells = [(model, *how) for model, _, *how in IN_STATES]
    for first, second in combinations(range(4), 2):
        pairs = {(cell[first], cell[second]) for cell in cells}
        values = [{cell[which] for cell in cells} for which in (first, second)]
        assert pairs == set(product(*values))


def test_the_numbers_are_unusual(models):
    """Numbers that fit together by accident would hide a width that stands in for another."""
    models = [ModelConfig.from_folder(models(name).path) for name in FAMILIES]
    kinds = [model.attention for model in models if isinstance(model.attention, GqaConfig)]
    assert {kind.num_kv_heads for kind in kinds} >= {1, 2, 4}
    assert any(kind.num_kv_heads == kind.num_heads for kind in kinds)
    assert any(kind.num_heads // kind.num_kv_heads % 2 and kind.num_kv_heads > 1 for kind in kinds)
    assert any(kind.head_dim * kind.num_heads != kind.hidden_size for kind in kinds)
    assert any(kind.has_bias for kind in kinds) and any(kind.has_norms for kind in kinds)
    assert any(kind.rope_dim < kind.head_dim for kind in kinds)
    deltas = [model.delta for model in models if model.delta is not None]
    assert any(delta.num_key_heads < delta.num_heads for delta in deltas)
    assert any(delta.key_dim != delta.value_dim for delta in deltas)
    last = [model.num_layers - 1 in model.linear_layers for model in models if model.delta]
    assert any(last) and not all(last)
