"""Measures passes of a pipeline on this machine's CPU, to fit the predictor's constants."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import NamedTuple

from control_plane.scheduler.pipeline.pipeline_scheduler import PipelineEvent, PipelineScheduler
from data_plane.model.config import ModelConfig
from data_plane.profiling.stages import MoveTime, PassTime, TimedStages
from data_plane.startup.stage import build_stage
from nanocp.config.cluster import BoundsConfig, ClusterConfig
from nanocp.config.data_plane import DataPlaneConfig
from nanocp.config.passes import PassesConfig
from nanocp.config.pipeline import PipelineConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.config.whole import Config
from nanocp.simulator.pipeline.fit import FORMS, FitError, MeasuredPass, fit_costs, fit_error
from nanocp.values.passes import PassDone
from nanocp.values.plan import PAGE_SIZE, Arrival
from nanocp.values.sampling import RowInput, SamplingParams, penalized_prompt_ids
from nanocp.wire.rows import encode_row_input

GREEDY = SamplingParams(temperature=0.0)
_DRAWN = SamplingParams(temperature=1.0, seed=1)
KINDS: dict[str, tuple[SamplingParams, ...]] = {
    "greedy": (GREEDY,),
    "drawn": (_DRAWN,),
    "nucleus": (replace(_DRAWN, top_p=0.9),),
    "controls": (replace(GREEDY, repetition_penalty=1.2, frequency_penalty=0.2),),
    "logprobs": (replace(GREEDY, logprobs=5),),
}
KINDS["mixed"] = (
    *(params for (params,) in KINDS.values()),
    replace(_DRAWN, top_p=0.9, repetition_penalty=1.2, logprobs=5),
)
_HELD_OUT_DRAWS = 10


class LoadPhase(NamedTuple):
    """Concurrent requests, and the number of passes."""

    num_rows: int
    prompt_len: int
    max_tokens: int
    num_passes: int


_MIXES = (
    LoadPhase(1, 60, 8, 10),
    LoadPhase(2, 60, 8, 12),
    LoadPhase(1, 900, 20, 14),
    LoadPhase(4, 300, 40, 10),
    LoadPhase(8, 30, 40, 10),
    LoadPhase(12, 60, 40, 10),
    LoadPhase(24, 200, 40, 10),
    LoadPhase(32, 30, 40, 10),
)
"""Few and many rows, short and long, so that the fit separates rows and tokens."""
_NUM_PLAYS = 3
_WARM_UP = LoadPhase(32, 2, 4, 4)
"""First passes are slow: memory is mapped."""


class Played(NamedTuple):
    """A run of a pipeline."""

    passes: list[PassTime]
    moves: list[MoveTime]
    layouts: list[tuple[int, tuple[int, ...]]]
    """For each change: its first pass, and the layers of each stage."""
    works: dict[int, int]
    plan_us: float

    @property
    def num_changes(self) -> int:
        """Number of layout changes."""
        return len(self.layouts)


class PipelinePlay:
    """A pipeline in one thread, with as many requests as a phase asks for."""

    def __init__(
        self,
        checkpoint: Path,
        phases: Sequence[LoadPhase],
        pipeline: PassesConfig,
        num_stages: int = 2,
        params: Sequence[SamplingParams] = (GREEDY,),
        data_plane: DataPlaneConfig | None = None,
        slowness: Sequence[float] | None = None,
        warm_up: LoadPhase | None = None,
    ) -> None:
        """Load the stages. Raises ValueError for a checkpoint that does not fit.

        params: each request draws one of these. slowness: see TimedStages. warm_up: runs first, and
        is not measured.
        """
        self._warm_up = warm_up
        self._phases, self._params, self._random = phases, params, Random(0)
        phases = [*phases, warm_up] if warm_up else phases
        max_len = 64 + max(2 * phase.prompt_len + phase.max_tokens for phase in phases)
        max_rows = max(phase.num_rows for phase in phases)
        cluster = ClusterConfig(
            num_instances=num_stages,
            num_frames=2 * max_rows * -(-max_len // PAGE_SIZE),
            max_model_len=max_len,
            bounds=BoundsConfig(max_rows, max_attention_rows=max_rows, max_grammar_bytes=0),
            layout="pipeline",
        )
        config = Config(
            cluster=cluster,
            scheduler=SchedulerConfig(prefix_sharing=False),
            data_plane=data_plane or DataPlaneConfig(),
            pipeline=pipeline,
        )
        model = ModelConfig.from_folder(checkpoint)
        self._vocab_size = model.vocab_size
        self._scheduler = PipelineScheduler(
            replace(cluster, num_instances=1),
            config.scheduler,
            PipelineConfig.of(pipeline, num_stages, model.num_layers),
        )
        build = partial(build_stage, config, checkpoint=checkpoint)
        self._stages = TimedStages(build, num_stages, slowness)
        self._prompts: dict[int, Sequence[int]] = {}
        self._works: dict[int, int] = {}
        self._events: list[PipelineEvent] = []
        self._layouts: list[tuple[int, tuple[int, ...]]] = []
        self._plan_ns = 0

    def run(self) -> Played:
        """Play the phases one after the other; requests that end are replaced."""
        stages = self._stages
        with closing(stages):
            if self._warm_up:
                self._play(self._warm_up)
                while self._num_open:
                    self._turn()
            num_warm = len(stages.passes)
            for phase in self._phases:
                self._play(phase)
        plan_us = self._plan_ns / 1e3 / len(stages.passes)
        layouts = [(number - num_warm, split) for number, split in self._layouts]
        return Played(stages.passes[num_warm:], stages.moves, layouts, self._works, plan_us)

    @property
    def _num_open(self) -> int:
        return self._scheduler.requests.num_running + self._scheduler.requests.num_waiting

    def _play(self, phase: LoadPhase) -> None:
        end = len(self._stages.passes) + phase.num_passes
        while len(self._stages.passes) < end:
            for _ in range(phase.num_rows - self._num_open):
                self._arrive(phase)
            self._turn()

    def _arrive(self, phase: LoadPhase) -> None:
        random, number = self._random, len(self._prompts) + 1
        length = max(1, int(phase.prompt_len * random.uniform(0.75, 1.25)))
        ids = self._prompts[number] = random.choices(range(2, self._vocab_size), k=length)
        max_tokens = max(1, int(phase.max_tokens * random.uniform(0.5, 1.0)))
        params = replace(random.choice(self._params), max_tokens=max_tokens)
        penalized = penalized_prompt_ids(ids, params)
        row = encode_row_input(RowInput(ids[-1], params, "none:1", (), penalized))
        work = self._works[number] = int(params.work)
        self._events.append(Arrival(number, length, max_tokens, row, sampler_work=work))

    def _turn(self) -> None:
        while True:
            begin_ns = time.thread_time_ns()
            plan = self._scheduler.plan_pass(self._events, time.monotonic_ns() // 1000)
            self._plan_ns += time.thread_time_ns() - begin_ns
            self._events = []
            if plan.layer_moves is not None:
                if plan.layer_moves.split is not None:
                    self._layouts.append((len(self._stages.passes), plan.layer_moves.split))
                self._stages.send(plan.layer_moves, self._prompts)
            if plan.pass_plan is None:
                break
            self._stages.send(plan.pass_plan, self._prompts)
        num_left = self._scheduler.num_in_flight
        assert num_left, "no request can run"
        while num_left:
            reports = list(self._stages.run())
            num_left -= sum(isinstance(report, PassDone) for report in reports)
            self._events += reports


def mixes(
    checkpoint: Path,
    kind: str = "greedy",
    *,
    is_quick: bool = False,
    data_plane: DataPlaneConfig | None = None,
) -> list[MeasuredPass]:
    """Passes of many sizes, through one stage: few rows and many, chunks of any length, both.

    kind: of sampling, a name of KINDS.
    """
    dense = num_first_dense(ModelConfig.from_folder(checkpoint))
    phases = [each._replace(num_passes=4) for each in _MIXES] if is_quick else _MIXES
    measured = []
    for max_tokens in (128, 700):
        config = PassesConfig(max_pass_tokens=max_tokens)
        params = KINDS[kind]
        play = PipelinePlay(
            checkpoint, phases, config, 1, params, data_plane=data_plane, warm_up=_WARM_UP
        )
        played = play.run()
        for each in played.passes:
            works = tuple(played.works[span.request_id] for span in each.spans)
            first, others = each.layers_us[:dense], each.layers_us[dense:]
            dense_us, layer_us = fmean(first or [0.0]), fmean(others or first)
            besides_us = None
            if each.sample_us:  # else the last layer, which is not timed, is cut short
                timed_us = sum(each.layers_us) + layer_us + each.sample_us
                besides_us = each.stage_us[0] - timed_us
            times = MeasuredPass(each.spans, layer_us, each.sample_us, works, dense_us, besides_us)
            measured.append(times)
    return measured


class Measured(NamedTuple):
    """Passes by their kind, each with the median of its times over several plays."""

    passes: dict[str, list[MeasuredPass]]
    apart: dict[str, FitError]
    """Relative difference of two plays of the same pass, by kind."""


def measure(
    checkpoint: Path,
    kinds: Sequence[str],
    *,
    is_quick: bool = False,
    data_plane: DataPlaneConfig | None = None,
) -> Measured:
    """Play the mixes of all kinds several times, in turn and back, so that drift hits all alike."""
    plays: dict[str, list[list[MeasuredPass]]] = {kind: [] for kind in kinds}
    for number in range(_NUM_PLAYS):
        for kind in kinds[:: -1 if number % 2 else 1]:
            plays[kind].append(mixes(checkpoint, kind, is_quick=is_quick, data_plane=data_plane))
    return Measured(
        {kind: medians(each) for kind, each in plays.items()},
        {kind: apart(each) for kind, each in plays.items()},
    )


def medians(plays: Sequence[Sequence[MeasuredPass]]) -> list[MeasuredPass]:
    """The passes of equal plays, with the median of their times."""
    return [
        each[0]._replace(
            layer_us=median(one.layer_us for one in each),
            sample_us=median(one.sample_us for one in each),
            dense_us=median(one.dense_us for one in each),
            stage_us=_median_of_known([one.stage_us for one in each]),
        )
        for each in _same_passes(plays)
    ]


def _median_of_known(us: Sequence[float | None]) -> float | None:
    known = [each for each in us if each is not None]
    return median(known) if known else None


def apart(plays: Sequence[Sequence[MeasuredPass]]) -> FitError:
    """Mean relative difference of the times of a pass in two plays."""
    pairs = [pair for each in _same_passes(plays) for pair in combinations(each, 2)]

    def differ(time: Callable[[MeasuredPass], float]) -> float:
        times = [(time(one), time(other)) for one, other in pairs]
        return fmean([2 * abs(a - b) / (a + b) for a, b in times if a + b] or [0.0])

    return FitError(
        differ(lambda one: one.layer_us),
        differ(lambda one: one.sample_us),
        differ(lambda one: one.dense_us),
    )


def _same_passes(
    plays: Sequence[Sequence[MeasuredPass]],
) -> list[tuple[MeasuredPass, ...]]:
    passes = list(zip(*plays, strict=True))
    assert all(one.spans == each[0].spans for each in passes for one in each), "plays differ"
    return passes


def num_first_dense(model: ModelConfig) -> int:
    """The number of leading dense layers of an MoE model."""
    return model.num_dense_layers if model.num_experts else 0


def errors(
    passes: Mapping[str, Sequence[MeasuredPass]],
    num_experts: int,
    experts_per_token: int,
    dense_layers: int = 0,
) -> dict[str, dict[str, FitError]]:
    """Mean errors on held-out thirds, by form of the predictor and kind."""
    found: dict[str, dict[str, list[FitError]]] = {
        form: {kind: [] for kind in passes} for form in FORMS
    }
    for draw in range(_HELD_OUT_DRAWS):
        random = Random(draw)
        shuffled = {kind: random.sample(all_, len(all_)) for kind, all_ in passes.items()}
        seen = [one for all_ in shuffled.values() for one in all_[: len(all_) * 2 // 3]]
        for form, by_kind in found.items():
            costs = fit_costs(form, seen, num_experts, experts_per_token, dense_layers)
            for kind, all_ in shuffled.items():
                by_kind[kind].append(fit_error(costs, all_[len(all_) * 2 // 3 :]))
    return {
        form: {
            kind: FitError(*(fmean(error) for error in zip(*each, strict=True)))
            for kind, each in by_kind.items()
        }
        for form, by_kind in found.items()
    }
