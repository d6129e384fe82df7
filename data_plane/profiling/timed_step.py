"""The decode step with a clock in it: how long each phase of a layer took, beside the step itself.

Enters: a step. Leaves: microseconds by phase; they add up to the step. Does not know: what is done
with them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from data_plane.graph.pool_cpu import StepContext
from data_plane.moe.all_to_all_cpu import Dispatched, ExpertExchange, ExpertKernels
from data_plane.step.cpu import CpuStep
from data_plane.transport.regions import TensorExchange


class PhaseTimes(NamedTuple):
    """Microseconds, mean of the layers: of all of them, or of the MoE layers."""

    attention_us: float
    """Over own frames, for own rows and received ones."""
    exchange_us: float
    """Both routes, what is computed for the rows of others but attention itself, and the merge."""
    other_us: float
    """Norms, projections, appends, gate, shared expert, dense MLP."""
    dispatch_combine_us: float
    """Of a MoE layer."""
    expert_us: float
    """Of a MoE layer."""
    step_us: float
    """Once a step: what comes before the first layer's exchange and after the last layer."""


T = TypeVar("T")


class _TimedExpertExchange(ExpertExchange):
    """Counts dispatch, experts and combine, and the experts by themselves."""

    total_ns = 0
    experts_ns = 0

    def __init__(self, exchange: TensorExchange, num_experts: int, kernels: ExpertKernels) -> None:
        super().__init__(exchange, num_experts, kernels)
        visit = self._visit

        def timed_visit(*arguments: Any) -> tuple[torch.Tensor, list[int]]:
            begin_ns = time.perf_counter_ns()
            own_sum_and_counts = visit(*arguments)
            self.experts_ns += time.perf_counter_ns() - begin_ns
            return own_sum_and_counts

        self._visit = timed_visit

    def dispatch(self, *arguments: Any) -> Dispatched:
        return self._timed(super().dispatch, *arguments)

    def run_experts(self, *arguments: Any) -> torch.Tensor:
        return self._timed(super().run_experts, *arguments)

    def combine(self, *arguments: Any) -> torch.Tensor:
        return self._timed(super().combine, *arguments)

    def _timed(self, call: Callable[..., T], *arguments: Any) -> T:
        begin_ns = time.perf_counter_ns()
        result = call(*arguments)
        self.total_ns += time.perf_counter_ns() - begin_ns
        return result


class TimedStep(CpuStep):
    """Computes what CpuStep computes, through the same calls."""

    _expert_exchange = _TimedExpertExchange
    _experts: _TimedExpertExchange

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._attention_ns = self._exchange_ns = 0
        self._layers_begin_ns: int | None = None
        self._layers_end_ns = 0

    def run(self, context: StepContext) -> None:
        """As CpuStep.run; the clocks start anew."""
        self._attention_ns = self._exchange_ns = 0
        self._layers_begin_ns = None
        self._experts.total_ns = self._experts.experts_ns = 0
        super().run(context)

    def times(self, step_ns: int) -> PhaseTimes:
        """Of the last step, which took step_ns from outside."""
        assert self._layers_begin_ns is not None, "no step has run"
        num_layers = self._model.num_layers
        num_moe_layers = num_layers - self._model.num_dense_layers
        layers_ns = self._layers_end_ns - self._layers_begin_ns
        other_ns = layers_ns - self._attention_ns - self._exchange_ns - self._experts.total_ns
        return PhaseTimes(
            attention_us=self._attention_ns / num_layers / 1e3,
            exchange_us=self._exchange_ns / num_layers / 1e3,
            other_us=other_ns / num_layers / 1e3,
            dispatch_combine_us=(self._experts.total_ns - self._experts.experts_ns)
            / num_moe_layers
            / 1e3,
            expert_us=self._experts.experts_ns / num_moe_layers / 1e3,
            step_us=(step_ns - layers_ns) / 1e3,
        )

    def _attend(self, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        begin_ns = time.perf_counter_ns()
        partial_and_lse = super()._attend(*arguments)
        self._attention_ns += time.perf_counter_ns() - begin_ns
        return partial_and_lse

    def _send_q(self, *arguments: Any) -> None:
        begin_ns = self._now_in_layers()
        super()._send_q(*arguments)
        self._exchange_ns += time.perf_counter_ns() - begin_ns

    def _answer_received(self, *arguments: Any) -> None:
        begin_ns, attention_ns = self._now_in_layers(), self._attention_ns
        super()._answer_received(*arguments)
        self._exchange_ns += time.perf_counter_ns() - begin_ns - (self._attention_ns - attention_ns)

    def _merge(self, *arguments: Any) -> None:
        begin_ns = time.perf_counter_ns()
        super()._merge(*arguments)
        self._exchange_ns += time.perf_counter_ns() - begin_ns

    def _mlp(self, *arguments: Any) -> torch.Tensor:
        self._now_in_layers()
        x_BX = super()._mlp(*arguments)
        self._layers_end_ns = time.perf_counter_ns()
        return x_BX

    def _now_in_layers(self) -> int:
        """The layers begin with the first of these calls: without rows of its own an instance sends
        no Q."""
        now_ns = time.perf_counter_ns()
        if self._layers_begin_ns is None:
            self._layers_begin_ns = now_ns
        return now_ns
