"""Passes of a pipeline on this machine's CPU, to which the predictor's constants are fitted.

Enters: a checkpoint, requests. Leaves: passes with the processor time of each part; how far both
forms of the predictor are off. Does not know: the command line, files.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import NamedTuple

from control_plane.scheduler.pipeline.pipeline_scheduler import PipelineEvent, PipelineScheduler
from data_plane.model.config import ModelConfig
from data_plane.profiling.stages import MoveTime, PassTime, TimedStages
from nanocp.config import (
    BoundsConfig,
    ClusterConfig,
    Config,
    DataPlaneConfig,
    PassesConfig,
    SchedulerConfig,
)
from nanocp.passes import PassDone, PipelineConfig
from nanocp.plan import PAGE_SIZE, Arrival
from nanocp.sampling import RowInput, SamplingParams
from nanocp.simulator.pipeline.fit import FORMS, FitError, MeasuredPass, fit_costs, fit_error
from nanocp.wire.convert import encode_row_input

GREEDY = SamplingParams(temperature=0.0)
_HELD_OUT_DRAWS = 10


class LoadPhase(NamedTuple):
    """Requests that run at a time, and how many passes that goes on."""

    num_rows: int
    prompt_len: int
    max_tokens: int
    num_passes: int


class Played(NamedTuple):
    """A run of a pipeline."""

    passes: list[PassTime]
    moves: list[MoveTime]
    num_changes: int


class PipelinePlay:
    """A pipeline in one thread, with as many requests as a phase asks for."""

    def __init__(
        self,
        checkpoint: Path,
        phases: Sequence[LoadPhase],
        pipeline: PassesConfig,
        num_stages: int = 2,
        params: SamplingParams = GREEDY,
        data_plane: DataPlaneConfig | None = None,
        slowness: Sequence[float] | None = None,
    ) -> None:
        """Load the stages. Raises ValueError for a checkpoint that does not fit.

        slowness: see TimedStages.
        """
        self._phases, self._params, self._random = phases, params, Random(0)
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
            PipelineConfig.of(config, model.num_layers),
        )
        self._stages = TimedStages(config, checkpoint, slowness)
        self._prompts: dict[int, Sequence[int]] = {}
        self._events: list[PipelineEvent] = []

    def run(self) -> Played:
        """Play the phases one after the other; requests that end are replaced."""
        scheduler, stages = self._scheduler, self._stages
        with closing(stages):
            for phase in self._phases:
                end = len(stages.passes) + phase.num_passes
                while len(stages.passes) < end:
                    num_open = scheduler.num_running + scheduler.num_waiting
                    for _ in range(phase.num_rows - num_open):
                        self._arrive(phase)
                    self._turn()
        return Played(stages.passes, stages.moves, scheduler.layouts.num_changes)

    def _arrive(self, phase: LoadPhase) -> None:
        random, number = self._random, len(self._prompts) + 1
        length = max(1, int(phase.prompt_len * random.uniform(0.75, 1.25)))
        ids = self._prompts[number] = random.choices(range(2, self._vocab_size), k=length)
        max_tokens = max(1, int(phase.max_tokens * random.uniform(0.5, 1.0)))
        row = RowInput(ids[-1], replace(self._params, max_tokens=max_tokens), "none:1")
        self._events.append(Arrival(number, length, max_tokens, encode_row_input(row)))

    def _turn(self) -> None:
        """Plan all that may be in flight, and run it to its end."""
        while True:
            plan = self._scheduler.plan_pass(self._events, time.monotonic_ns() // 1000)
            self._events = []
            if plan.layer_moves is not None:
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
    params: SamplingParams = GREEDY,
    *,
    is_quick: bool = False,
    data_plane: DataPlaneConfig | None = None,
) -> list[MeasuredPass]:
    """Passes of many kinds, through one stage: few rows and many, chunks of any length, both."""
    num_passes = 4 if is_quick else 10
    phases = [
        LoadPhase(rows, prompt_len, 40, num_passes)
        for rows, prompt_len in ((1, 900), (4, 300), (12, 60), (24, 200), (32, 30))
    ]
    return [
        MeasuredPass(each.spans, each.layer_us, each.sample_us)
        for max_tokens in (128, 700)
        for each in PipelinePlay(
            checkpoint,
            phases,
            PassesConfig(max_pass_tokens=max_tokens),
            num_stages=1,
            params=params,
            data_plane=data_plane,
        )
        .run()
        .passes
    ]


def errors(
    passes: Sequence[MeasuredPass], num_experts: int, experts_per_token: int
) -> dict[str, FitError]:
    """For each form of the predictor, its mean errors on a held-out third, over several draws."""
    found: dict[str, list[FitError]] = {form: [] for form in FORMS}
    for draw in range(_HELD_OUT_DRAWS):
        shuffled = Random(draw).sample(list(passes), len(passes))
        cut = len(shuffled) * 2 // 3
        for form, all_ in found.items():
            costs = fit_costs(form, shuffled[:cut], num_experts, experts_per_token)
            all_.append(fit_error(costs, shuffled[cut:]))
    return {
        form: FitError(fmean(each.layer for each in all_), fmean(each.sampling for each in all_))
        for form, all_ in found.items()
    }
