"""Clocks in a decode step: microseconds of each phase of a layer."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch

from data_plane.model.config import ModelConfig
from data_plane.step.probe import Phase
from nanocp.overlap.ops import Ops
from nanocp.overlap.policies.orders import BehindFirst


class PhaseTimes(NamedTuple):
    """Microseconds of one step's phases (step.probe.Phase)."""

    attention_us: float
    """Mean of all layers."""
    exchange_us: float
    """Mean of all layers."""
    other_us: float
    """Norms, projections, appends, gate, shared expert, dense MLP; mean of all layers."""
    dispatch_combine_us: float
    """Mean of the MoE layers."""
    expert_us: float
    """Mean of the MoE layers."""
    step_us: float
    """All before the first layer and after the last one, sampling included."""

    @classmethod
    def of(cls, ns: Mapping[Phase, float], model: ModelConfig) -> PhaseTimes:
        """Divide a step's nanoseconds among its layers."""
        num_layers = model.num_layers
        num_moe_layers = max(1, num_layers - model.num_dense_layers)
        return cls(
            attention_us=ns["attention"] / num_layers / 1e3,
            exchange_us=ns["exchange"] / num_layers / 1e3,
            other_us=ns["other"] / num_layers / 1e3,
            dispatch_combine_us=ns["dispatch_combine"] / num_moe_layers / 1e3,
            expert_us=ns["expert"] / num_moe_layers / 1e3,
            step_us=ns["step"] / 1e3,
        )


class Clock(Protocol):
    """A step's probe that knows the time of each phase."""

    def start(self) -> None:
        """Begin a step, and forget the one before."""

    def __call__(self, phase: Phase) -> None:
        """Begin a phase of the step."""

    def times(self, model: ModelConfig) -> PhaseTimes:
        """Return the times of the step that ends now, in phase "step"."""


class PhaseClock(Clock):
    """A clock of this thread."""

    def __init__(self) -> None:
        self._ns: dict[Phase, int] = defaultdict(int)
        self._phase: Phase = "step"
        self._begin_ns = 0

    def start(self) -> None:
        self._ns.clear()
        self._phase, self._begin_ns = "step", time.perf_counter_ns()

    def __call__(self, phase: Phase) -> None:
        now_ns = time.perf_counter_ns()
        self._ns[self._phase] += now_ns - self._begin_ns
        self._phase, self._begin_ns = phase, now_ns

    def times(self, model: ModelConfig) -> PhaseTimes:
        assert self._phase == "step", f"the step is in its phase {self._phase}"
        self("step")
        return PhaseTimes.of(self._ns, model)


Parts = Mapping[str, tuple[float, float]]
"""By tag: microseconds of a lane's operators, and of waits before them."""


class PartClock(BehindFirst):
    """A clock of one lane's operators."""

    def begin(self, ops: Ops) -> None:
        self.parts: dict[str, tuple[float, float]] = {}
        self._tag, self._end_ns = "", time.perf_counter_ns()

    def next_round(self, ops: Ops) -> None:
        (op,) = ops.get_ready_ops(0)
        self._tag = op.tag or self._tag
        begin_ns, before_ns = time.perf_counter_ns(), self._end_ns
        super().next_round(ops)
        self._end_ns = time.perf_counter_ns()
        us, waited_us = self.parts.get(self._tag, (0.0, 0.0))
        us += (self._end_ns - begin_ns) / 1e3
        self.parts[self._tag] = us, waited_us + (begin_ns - before_ns) / 1e3


class EventClock(Clock):
    """A clock of a GPU, by events between a step's launches."""

    def __init__(self) -> None:
        self._begin: Any = None
        self._marks: list[tuple[Phase, Any]] = []
        self._is_captured = False

    def capture(self) -> None:
        """Keep the captured step's events: each replay records them anew."""
        self._marks.clear()
        self._is_captured = True

    def start(self) -> None:
        if not self._is_captured:
            self._marks.clear()
        self._begin = _event()

    def __call__(self, phase: Phase) -> None:
        self._marks.append((phase, _event()))

    def times(self, model: ModelConfig) -> PhaseTimes:
        end = _event()
        end.synchronize()
        assert self._marks[-1][0] == "step", f"the step is in its phase {self._marks[-1][0]}"
        ns: dict[Phase, float] = defaultdict(float)
        marks: list[tuple[Phase, Any]] = [("step", self._begin), *self._marks, ("step", end)]
        for (phase, begin), (_, after) in pairwise(marks):
            ns[phase] += begin.elapsed_time(after) * 1e6
        return PhaseTimes.of(ns, model)


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True, external=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
