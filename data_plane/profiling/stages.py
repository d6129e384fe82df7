"""All stages of a pipeline in one thread, with each pass's processor time at each.

So no stage waits for a core, and other load matters little; `makespan_us` computes the time of a
pipeline with a core for each stage.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from data_plane.instance.stage_edge import StageEdge, Waits
from data_plane.step.stage import CpuStageModel
from data_plane.transport.segments import Segments
from data_plane.transport.shared_memory import unlink_cluster
from nanocp.values.passes import LayerMoves, LayersMoved, PassDone, PassPlan, Span, StageWorked

_IDLE_S = 0.001

_Stage = StageEdge[CpuStageModel]


@dataclass(slots=True)
class PassTime:
    """The times of one pass, in microseconds of processor time."""

    number: int
    after: int
    """The first stage awaits the tokens of all passes up to this; -1: of none."""
    spans: tuple[Span, ...]
    stage_us: list[float]
    """With moves of layers since the stage's last pass."""
    layers_us: list[float] = field(default_factory=list)
    """Each layer but the model's last, which is cut short without sampling."""
    sample_us: float = 0.0
    """0 without sampling."""

    @property
    def layer_us(self) -> float:
        """The mean of a layer."""
        return fmean(self.layers_us)


@dataclass(slots=True)
class MoveTime:
    """The time of moved KV, in microseconds of both ends' processors."""

    number: int
    is_mark: bool
    num_frames: int
    """Frames, counted in each layer."""
    us: float = 0.0


@dataclass(slots=True, eq=False)
class _Timed:
    stage: _Stage
    items: deque[PassPlan | LayerMoves] = field(default_factory=deque)
    running: Waits | None = None
    spent_us: float = 0.0
    """Since its last pass ended."""


class TimedStages:
    """The stages of one pipeline. Close them at the end."""

    def __init__(
        self,
        build: Callable[[int, Segments], _Stage],
        num_stages: int,
        slowness: Sequence[float] | None = None,
    ) -> None:
        """Load all stages. Raises what build_stage does.

        slowness: for each stage, what its processor's time counts: 2 is a host of half the speed.
        """
        self._cluster_id = f"profile-{secrets.token_hex(4)}"
        segments = Segments(self._cluster_id)
        self._timed = [_Timed(build(stage, segments)) for stage in range(num_stages)]
        self._slowness = slowness or [1.0] * num_stages
        self._worked: list[StageWorked] = []
        self.num_layers = sum(len(each.stage.layers.own) for each in self._timed)
        self.passes: list[PassTime] = []
        self.moves: list[MoveTime] = []
        for number, timed in enumerate(self._timed):
            timed.stage.connect()
            self._time_parts(number, timed.stage)

    def close(self) -> None:
        """Release everything."""
        for timed in self._timed:
            timed.stage.close()
            for owner, part in _timed_parts(timed.stage):
                delattr(owner, part)  # It refers to the stage, whose memory is to go with it.
        unlink_cluster(self._cluster_id)

    def send(self, item: PassPlan | LayerMoves, prompts: dict[int, Sequence[int]]) -> None:
        """Let every stage take this next. prompts: of requests that start in it."""
        if isinstance(item, PassPlan):
            for start in item.table.starts:
                self._timed[0].stage.requests.take_prompt(
                    start.request_id, prompts[start.request_id]
                )
            times = [0.0] * len(self._timed)
            self.passes.append(PassTime(item.number, item.after, item.spans, times))
        else:
            num_frames = sum(count for move in item.moves for _, count in move.frames)
            self.moves.append(MoveTime(item.number, item.split is not None, num_frames))
        for timed in self._timed:
            timed.items.append(item)

    def run(self) -> Iterator[PassDone | LayersMoved | StageWorked]:
        """Run every stage until it must wait; yields their reports."""
        has_gone_on = True
        while has_gone_on:
            has_gone_on = False
            for number, timed in enumerate(self._timed):
                has_gone_on |= self._go_on(number, timed)
                yield from self._worked
                self._worked.clear()
                polled = timed.stage.poll()
                yield from polled.events
        if any(timed.running for timed in self._timed):
            time.sleep(_IDLE_S)  # for weights that another thread reads

    def _go_on(self, number: int, timed: _Timed) -> bool:
        """Run one stage until it waits; True if it has ended an item."""
        begin_ns = time.thread_time_ns()
        if timed.running is None and timed.items:
            timed.running = timed.stage.run(timed.items[0])
        if timed.running is None:
            timed.stage.progress()
            has_ended = False
        else:
            has_ended = next(timed.running, None) is None
        timed.spent_us += self._slowness[number] * (time.thread_time_ns() - begin_ns) / 1e3
        if has_ended:
            item = timed.items.popleft()
            timed.running = None
            if isinstance(item, PassPlan):
                self.passes[item.number].stage_us[number] = timed.spent_us
                self._worked.append(StageWorked(number, item.number, timed.spent_us))
                timed.spent_us = 0.0
        return has_ended

    def _time_parts(self, number: int, stage: _Stage) -> None:

        def timed(part: Callable[..., Any], add: Callable[..., None]) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                begin_ns = time.thread_time_ns()
                result = part(*arguments)
                add((time.thread_time_ns() - begin_ns) / 1e3, *arguments)
                return result

            return call

        def present() -> PassTime:
            item = self._timed[number].items[0]
            assert isinstance(item, PassPlan)
            return self.passes[item.number]

        def add_layer(us: float, layer: int, *_: Any) -> None:
            if layer < self.num_layers - 1:
                present().layers_us.append(us)

        def add_sampling(us: float, spans: Sequence[Span], *_: Any) -> None:
            if any(span.samples for span in spans):
                present().sample_us = us

        def add_moving(us: float) -> None:
            if moves := stage.layers.newest_moves:
                self.moves[moves - 1].us += us

        adds: tuple[Callable[..., None], ...] = add_layer, add_sampling, add_moving
        for (owner, part), add in zip(_timed_parts(stage), adds, strict=True):
            setattr(owner, part, timed(getattr(owner, part), add))


def _timed_parts(stage: _Stage) -> tuple[tuple[object, str], ...]:
    return (stage.model, "run_layer"), (stage.model, "sample"), (stage, "progress")


def makespan_us(passes: Sequence[PassTime]) -> float:
    """Return the time of these passes if each stage has a core and messages take no time."""
    free_us = [0.0] * len(passes[0].stage_us)
    done_us: list[float] = []
    for each in passes:
        came_us = done_us[each.after] if each.after >= 0 else 0.0
        for stage, us in enumerate(each.stage_us):
            came_us = free_us[stage] = max(came_us, free_us[stage]) + us
        done_us.append(came_us)
    return done_us[-1]
