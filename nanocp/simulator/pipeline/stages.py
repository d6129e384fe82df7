"""Stages of a simulated pipeline, which run passes, sampling and layer moves in order."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from nanocp.values.passes import WAIT_CAUSES, LayerMoves

CAUSES = tuple(cause for cause in WAIT_CAUSES if cause != "work")
"""Causes of idle time while a pass is in flight. Planning takes no time here."""


class TimedPass(NamedTuple):
    """A pass with its times."""

    number: int
    after: int
    """The pass whose tokens it needs; -1: none."""
    layer_us: float
    tail_us: float
    shares_us: tuple[float, ...]
    """Sampling by each stage after the last layer; empty: the last stage samples."""
    hop_us: float


class EventHeap:
    """Events in order of time, then of entry."""

    def __init__(self) -> None:
        self.now_us = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_entered = 0

    def at(self, us: float, call: Callable[..., None], *values: Any) -> None:
        """Call it with the values at that time."""
        self._num_entered += 1
        heapq.heappush(self._heap, (us, self._num_entered, call, values))

    def next(self) -> Callable[[], None] | None:
        """The next call, to whose time the clock moves; None if there is none."""
        if not self._heap:
            return None
        self.now_us, _, call, values = heapq.heappop(self._heap)
        return lambda: call(*values)


class SimulatedStage:
    """One stage."""

    def __init__(self, index: int, first: int, num_layers: int, slowness: float) -> None:
        self.index, self.slowness = index, slowness
        self.first, self.num_layers = first, num_layers
        """The layers that it has."""
        self.items: deque[TimedPass | LayerMoves] = deque()
        self.to_sample: deque[tuple[int, float]] = deque()
        self.num_hidden = 0
        self.expected: dict[int, int] = {}
        """Layer -> KV transfers still to come; negative: early ones."""
        self.current: TimedPass | None = None
        self.next_layer = 0
        self.worked_us = 0.0
        self.is_busy = False
        self.out_free_us = self.in_free_us = 0.0
        self.num_parts = 0
        """Transfers left in the newest layer moves."""
        self.busy_us = 0.0
        self.idle_us = dict.fromkeys(CAUSES, 0.0)

    @property
    def waits_for_kv(self) -> bool:
        """Whether it stands before a layer whose KV has not come."""
        return not self.is_busy and self.current is not None


class Stages:
    """All stages, and the transfers between them."""

    def __init__(
        self,
        heap: EventHeap,
        split: tuple[int, ...],
        move_us: Callable[[int], float],
        passed: Callable[[int], None],
        moved: Callable[[int, int], None],
        worked: Callable[[int, int, float], None],
        *,
        slowness: Mapping[int, float] = MappingProxyType({}),
        is_fluid: bool = False,
    ) -> None:
        """split: layers of each stage. move_us: transfer time of so many frames' KV of a layer.

        passed: called with a completed pass. moved: called with a stage and its number of layer
        moves. worked: called with a stage, a pass and its time. slowness: factor by stage.
        is_fluid: equal shares for all stages.
        """
        self._heap, self._move_us, self._is_fluid = heap, move_us, is_fluid
        self._passed, self._moved, self._worked = passed, moved, worked
        self._split = split
        self.stages = []
        for index, count in enumerate(split):
            stage = SimulatedStage(index, sum(split[:index]), count, slowness.get(index, 1.0))
            self.stages.append(stage)
        self.num_done = 0
        self._shares_left: dict[int, int] = {}
        self._done: set[int] = set()
        self.stall_us = 0.0
        self._counted_us = 0.0

    def send(self, item: TimedPass | LayerMoves) -> None:
        """Send a pass or layer moves to every stage."""
        for stage in self.stages:
            stage.items.append(item)
            self._go_on(stage)

    def count_idle(self, is_in_flight: bool) -> None:
        """Account the time since the last call; call it before anything changes."""
        us = self._heap.now_us - self._counted_us
        self._counted_us = self._heap.now_us
        if not (us and is_in_flight):
            return
        cause = "tail"
        for stage in self.stages:
            if stage.is_busy:
                stage.busy_us += us
                cause = "fill"
            elif stage.waits_for_kv:
                stage.idle_us["kv"] += us
                self.stall_us += us
                cause = "kv"
            else:
                stage.idle_us[cause] += us

    # --- one stage

    def _go_on(self, stage: SimulatedStage) -> None:
        while not stage.is_busy:
            if stage.current is not None:
                if stage.expected.get(stage.next_layer, 0) > 0:
                    return
                self._run_layers(stage, stage.current)
            elif stage.to_sample:
                number, us = stage.to_sample.popleft()
                stage.is_busy = True
                self._heap.at(self._heap.now_us + us, self._sampled, stage, number)
            elif not stage.items:
                return
            elif isinstance(item := stage.items[0], LayerMoves):
                stage.items.popleft()
                self._take_moves(stage, item)
            elif self._is_ready(stage, item):
                stage.items.popleft()
                stage.current, stage.next_layer = item, stage.first
            else:
                return

    def _is_ready(self, stage: SimulatedStage, item: TimedPass) -> bool:
        if stage.index == 0:
            return item.after < self.num_done
        return item.number < stage.num_hidden

    def _run_layers(self, stage: SimulatedStage, item: TimedPass) -> None:
        end = stage.first + stage.num_layers
        coming = [layer for layer, count in stage.expected.items() if count > 0]
        stop = min((layer for layer in coming if stage.next_layer <= layer < end), default=end)
        us = (stop - stage.next_layer) * item.layer_us
        if self._is_fluid:
            us = (sum(self._split) * item.layer_us + item.tail_us) / len(self.stages)
        elif stop == end and stage is self.stages[-1]:
            us += item.tail_us
        us *= stage.slowness
        stage.worked_us += us
        stage.is_busy = True
        self._heap.at(self._heap.now_us + us, self._ran, stage, stop)

    def _ran(self, stage: SimulatedStage, stop: int) -> None:
        stage.is_busy = False
        stage.next_layer = stop
        item = stage.current
        assert item is not None
        if stop == stage.first + stage.num_layers:
            stage.current = None
            self._worked(stage.index, item.number, stage.worked_us)
            stage.worked_us = 0.0
            self._hand_on(stage, item)
        self._go_on(stage)

    def _hand_on(self, stage: SimulatedStage, item: TimedPass) -> None:
        now_us = self._heap.now_us
        if stage is not self.stages[-1]:
            self._heap.at(now_us + item.hop_us, self._hidden_came, self.stages[stage.index + 1])
        elif not any(item.shares_us):
            self._heap.at(now_us + item.hop_us, self._finish, item.number)
        else:
            self._shares_left[item.number] = sum(us > 0 for us in item.shares_us)
            for other, us in zip(self.stages, item.shares_us, strict=True):
                if us > 0:
                    hop_us = 0.0 if other is stage else item.hop_us
                    self._heap.at(now_us + hop_us, self._rows_came, other, item.number, us)

    def _hidden_came(self, stage: SimulatedStage) -> None:
        stage.num_hidden += 1
        self._go_on(stage)

    def _rows_came(self, stage: SimulatedStage, number: int, us: float) -> None:
        stage.to_sample.append((number, us))
        self._go_on(stage)

    def _sampled(self, stage: SimulatedStage, number: int) -> None:
        stage.is_busy = False
        self._shares_left[number] -= 1
        if not self._shares_left[number]:
            del self._shares_left[number]
            self._finish(number)
        self._go_on(stage)

    def _finish(self, number: int) -> None:
        self._done.add(number)
        while self.num_done in self._done:
            self._done.remove(self.num_done)
            self.num_done += 1
            self._passed(self.num_done - 1)
        self._go_on(self.stages[0])

    # --- layers

    def _take_moves(self, stage: SimulatedStage, item: LayerMoves) -> None:
        moves = [move for move in item.moves if move.frames]
        stage.num_parts += 1 + sum(stage.index in (move.source, move.target) for move in moves)
        for move in moves:
            if move.target == stage.index:
                self._expect(stage, move.layer, 1)
            elif move.source == stage.index:
                target = self.stages[move.target]
                begin_us = max(self._heap.now_us, stage.out_free_us, target.in_free_us)
                end_us = begin_us + self._move_us(sum(count for _, count in move.frames))
                stage.out_free_us = target.in_free_us = end_us
                self._heap.at(end_us, self._layer_moved, item.number, stage, target, move.layer)
        if item.split is not None:
            self._split = item.split
            stage.first = sum(item.split[: stage.index])
            stage.num_layers = item.split[stage.index]
        self._part_done(stage, item.number)

    def _expect(self, stage: SimulatedStage, layer: int, change: int) -> None:
        """Announce (1) or complete (-1) a transfer of a layer's KV."""
        stage.expected[layer] = stage.expected.get(layer, 0) + change
        if not stage.expected[layer]:
            del stage.expected[layer]

    def _layer_moved(
        self, number: int, source: SimulatedStage, target: SimulatedStage, layer: int
    ) -> None:
        self._expect(target, layer, -1)
        self._part_done(source, number)
        self._part_done(target, number)
        self._go_on(target)

    def _part_done(self, stage: SimulatedStage, number: int) -> None:
        stage.num_parts -= 1
        if not stage.num_parts:
            self._moved(stage.index, number)
