"""A whole pipeline of a model in one thread, from one seed; what a stage does not have is NaN.

It is played as hash_pipeline.py plays hash stages. `transformers` judges every output.
`PYTHONPATH=tests python -m harness.hash_clusters.pipeline.model_pipeline CHECKPOINT --seeds 20`
plays layers that move by chance.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import torch

from data_plane.attention.backend import AttentionSite, attention_backend
from data_plane.instance.interface import PageMover
from data_plane.instance.stage_edge import StageEdge
from data_plane.kv.frame_pool import FramePool
from data_plane.model.config import ModelConfig
from data_plane.model.stage_weights import StageWeights
from data_plane.model.weights import stores_bf16
from data_plane.reference.oracle import Oracle
from data_plane.step.cpu_kernels import Arithmetic, cpu_kernels
from data_plane.step.stage import CpuStageModel
from data_plane.transport.stage_links import StageLinks
from harness.hash_clusters.hash_parts import Story
from harness.hash_clusters.pipeline.hash_pipeline import HashPipeline
from harness.hash_clusters.pipeline.pipeline_setups import PipelineSetup, chaos_setup, crowded
from nanocp.config.cluster import BoundsConfig, ClusterConfig
from nanocp.config.pipeline import PipelineConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.values.passes import LayoutWanted, even_split
from nanocp.values.plan import PAGE_SIZE
from nanocp.values.sampling import SamplingParams, Token, TokenLogprobs


class NanStageModel(CpuStageModel):
    """A stage's layers, whose frames are NaN wherever no token is filled in.

    A page is zero from its first token on, because attention may read the rest of it, masked.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._frames.layers.fill_(torch.nan)

    def ended(self, request_ids: Sequence[int]) -> None:
        super().ended(request_ids)  # a pass begins, and has emptied frames
        self._frames.layers[:, :-1][torch.from_numpy(self._layers.filled == 0)] = torch.nan

    def new_layer(self, layer: int, place: int) -> None:
        super().new_layer(layer, place)
        self._weights.layer(layer)  # turns of the play must not depend on the disk
        self._frames.layers[place] = torch.nan

    def run_layer(self, layer: int, place: int, spans: Any, rows: Any) -> Any:
        for span, frames in spans:
            new = frames[-(-span.first // PAGE_SIZE) :]
            self._frames.layers[place, new] = 0
        return super().run_layer(layer, place, spans, rows)


class ModelPipeline(HashPipeline):
    """Plays one seed, or what is submitted, with a checkpoint's weights."""

    def __init__(
        self,
        checkpoint: Path,
        seed: int,
        setup: PipelineSetup,
        num_requests: int = 0,
        kernels: str = "auto",
    ) -> None:
        self._checkpoint, self._kernels_name = checkpoint, kernels
        self.asks: list[tuple[int, tuple[int, ...]]] = []
        """(passes, layout): what an operator asks for once so many passes were planned."""
        self.logprobs: dict[int, list[TokenLogprobs]] = {}
        self._asked = setup.pipeline.first_split
        super().__init__(seed, num_requests, setup)

    def run(
        self, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
    ) -> list[list[int]]:
        """Play these requests to their end, undisturbed; returns their outputs."""
        self.abort_share = 0
        self.speeds = [1 for _ in self.speeds]
        each = params if isinstance(params, list) else [params] * len(prompts)
        stories = [self.ask(ids, own) for ids, own in zip(prompts, each, strict=True)]
        self.num_requests = len(self.stories)
        self.play()
        return [output_of(story) for story in stories]

    def _turn(self) -> None:
        layouts = self.scheduler.layouts
        is_idle = not layouts.is_moving and layouts.places.split == self._asked
        if self.asks and self.counts["passes"] >= self.asks[0][0] and is_idle:
            _, split = self.asks.pop(0)
            self._asked = split
            assert not layouts.obstacle(split)
            wanted = LayoutWanted(split)
            self.events.append(partial(self.coordinator.happened, wanted))
        super()._turn()

    def _make_stages(self, ends: list[tuple[StageLinks, PageMover]]) -> list[Any]:
        pipeline, cluster = self.setup.pipeline, self.setup.cluster
        model = self.model = ModelConfig.from_folder(self._checkpoint)
        keeps_bf16 = stores_bf16(self._checkpoint, model)
        kernels, _ = cpu_kernels(self._kernels_name, torch.float32, 1, keeps_bf16)
        site = AttentionSite.of(model, torch.device("cpu"), torch.float32, torch.float32)
        attention, _ = attention_backend("auto", site, kernels.own_attention(model))
        stages, first = [], 0
        for stage, (own, count) in enumerate(zip(ends, pipeline.first_split, strict=True)):
            weights = StageWeights(self._checkpoint, model, torch.float32, kernels,
                                   range(first, first + count), stage == 0,
                                   stage == pipeline.num_stages - 1)  # fmt: skip
            first += count
            frames = FramePool(
                pipeline.num_places, cluster.num_frames, model.attention.kv_width, torch.float32
            )
            arithmetic = Arithmetic(model, kernels, attention)
            nan = NanStageModel(arithmetic, weights, frames)
            stages.append(StageEdge(stage, pipeline, cluster.num_frames, nan, *own))
        return stages

    def _draw_params(self, max_tokens: int) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=min(10 + max_tokens, 49))

    def _expected(self, prompt_ids: list[int], params: SamplingParams) -> list[int]:
        return []  # `judge` says at the end

    def _check_token(self, story: Story, token: Token, name: str) -> None:
        is_last = token.index == story.params.max_tokens - 1
        assert is_last == (token.finish_reason is not None), name
        if token.logprobs is not None:
            self.logprobs.setdefault(story.request_id, []).append(token.logprobs)

    def _check_story(self, story: Story) -> None:
        assert sorted(story.output) == list(range(len(story.output))), story
        assert story.reason is not None or len(story.output) == story.params.max_tokens, story

    def _kv_of(self, stage: Any, layer: int) -> Any:
        return stage.model._frames.layers[stage.layers.place_of[layer]]

    def judge(self, oracle: Oracle) -> None:
        """Every greedy token is the reference model's; near-ties are at most one in a thousand."""
        near_ties = 0
        for story in self.stories.values():
            if story.output:
                verdict = oracle.judge(story.prompt_ids, output_of(story))
                assert verdict.exact, (story, verdict)
                near_ties += verdict.near_ties
        assert near_ties <= 1 + self.counts["tokens"] // 1000, near_ties


def output_of(story: Story) -> list[int]:
    """The tokens of a request, in order."""
    return [story.output[index] for index in range(len(story.output))]


def still_setup(split: tuple[int, ...], **pipeline: Any) -> PipelineSetup:
    """A pipeline of these layers, with frames for all, whose layers move only if asked to."""
    bounds = BoundsConfig(max_rows=8, max_attention_rows=8)
    return PipelineSetup(
        ClusterConfig(num_instances=1, num_frames=60, max_model_len=832, bounds=bounds),
        SchedulerConfig(),
        PipelineConfig(
            num_stages=len(split),
            num_layers=sum(split),
            layer_policy=f"static:{','.join(map(str, split))}",
            max_pass_tokens=pipeline.pop("max_pass_tokens", 100),
            **pipeline,
        ),
    )


def play_chaos(checkpoint: Path, oracle: Oracle, seed: int, num_requests: int) -> ModelPipeline:
    """Layers of the checkpoint move up to once a pass, in any way that is legal."""
    setup, num_layers = chaos_setup(seed), ModelConfig.from_folder(checkpoint).num_layers
    num_stages = min(setup.pipeline.num_stages, num_layers)
    most = max(even_split(num_layers, num_stages))
    pipeline = replace(
        setup.pipeline,
        num_stages=num_stages,
        num_layers=num_layers,
        max_layers=min(most + Random(seed).choice([1, 9]), num_layers),
        max_pass_tokens=max(setup.pipeline.max_pass_tokens, 40),
    )
    scheduler = replace(setup.scheduler, max_queued_requests=1024)
    setup = setup._replace(pipeline=pipeline, scheduler=scheduler)
    if is_crowd := seed % 4 == 3:
        setup = crowded(setup)
    played = ModelPipeline(checkpoint, seed, setup, num_requests)
    played.speeds = [Random(seed).choice([1, 0.3]) for _ in played.speeds]
    played.abort_share = min(played.abort_share, 0.05)
    if is_crowd:
        played.arrive_together()
    for _ in range(num_requests // 2 - len(played.stories)):
        played._arrive()
    try:
        played.play()
        played.judge(oracle)
    except Exception as error:
        error.add_note(f"seed {seed}: {played.setup}")
        raise
    return played


@cache
def oracle_of(checkpoint: Path) -> Oracle:
    """`transformers` on a checkpoint, loaded once."""
    return Oracle(checkpoint)


def main() -> None:
    """Play seeds from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        played = play_chaos(arguments.checkpoint, oracle_of(arguments.checkpoint), seed, 8)
        print(f"seed {seed}: {dict(played.counts)}", file=sys.stdout, flush=True)


if __name__ == "__main__":
    main()
