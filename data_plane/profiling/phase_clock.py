"""A clock in a decode step: microseconds of each phase of a layer, which add up to the step."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import NamedTuple

from data_plane.model.config import ModelConfig
from data_plane.step.probe import Phase


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


class PhaseClock:
    """A step's probe: adds up the time of each phase."""

    def __init__(self) -> None:
        self._ns: dict[Phase, int] = defaultdict(int)
        self._phase: Phase = "step"
        self._begin_ns = 0

    def start(self) -> None:
        """Begin a step, and forget the one before."""
        self._ns.clear()
        self._phase, self._begin_ns = "step", time.perf_counter_ns()

    def __call__(self, phase: Phase) -> None:
        now_ns = time.perf_counter_ns()
        self._ns[self._phase] += now_ns - self._begin_ns
        self._phase, self._begin_ns = phase, now_ns

    def times(self, model: ModelConfig) -> PhaseTimes:
        """Return the times of the step that ends now, in phase "step"."""
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
