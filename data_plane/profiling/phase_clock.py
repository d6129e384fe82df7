"""A clock in a decode step: how long each phase of a layer took, beside the step itself.

Enters: the names of phases as they begin. Leaves: microseconds by phase; they add up to the step.
Does not know: what a step computes, what is done with the times.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import NamedTuple

from data_plane.model.config import ModelConfig
from data_plane.step.probe import Phase


class PhaseTimes(NamedTuple):
    """Microseconds of one step's phases (see step.probe.Phase), as the mean of its layers."""

    attention_us: float
    """Attention, mean of all layers."""
    exchange_us: float
    """Exchange, mean of all layers."""
    other_us: float
    """The rest, mean of all layers: norms, projections, appends, gate, shared expert, dense MLP."""
    dispatch_combine_us: float
    """Dispatch and combine, mean of the MoE layers."""
    expert_us: float
    """Experts, mean of the MoE layers."""
    step_us: float
    """Once a step: what comes before the first layer and after the last one, sampling included."""


class PhaseClock:
    """A step's probe: adds up how long each phase took."""

    def __init__(self) -> None:
        self._ns: dict[Phase, int] = defaultdict(int)
        self._phase: Phase = "step"
        self._begin_ns = 0

    def start(self) -> None:
        """Forget the step before; a step begins now."""
        self._ns.clear()
        self._phase, self._begin_ns = "step", time.perf_counter_ns()

    def __call__(self, phase: Phase) -> None:
        """The phase begins now, and the one before ends."""
        now_ns = time.perf_counter_ns()
        self._ns[self._phase] += now_ns - self._begin_ns
        self._phase, self._begin_ns = phase, now_ns

    def times(self, model: ModelConfig) -> PhaseTimes:
        """The times of the step that ends now; it must be in phase "step"."""
        assert self._phase == "step", f"the step is in its phase {self._phase}"
        self("step")
        num_layers = model.num_layers
        num_moe_layers = max(1, num_layers - model.num_dense_layers)
        return PhaseTimes(
            attention_us=self._ns["attention"] / num_layers / 1e3,
            exchange_us=self._ns["exchange"] / num_layers / 1e3,
            other_us=self._ns["other"] / num_layers / 1e3,
            dispatch_combine_us=self._ns["dispatch_combine"] / num_moe_layers / 1e3,
            expert_us=self._ns["expert"] / num_moe_layers / 1e3,
            step_us=self._ns["step"] / 1e3,
        )
