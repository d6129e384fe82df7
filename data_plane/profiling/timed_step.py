"""The decode step with a clock in it: how long each phase of a layer took, beside the step itself.

Enters: a step. Leaves: microseconds by phase; they add up to the step. Does not know: what is done with them.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch

from data_plane.graph.pool import StepContext
from data_plane.moe.all_to_all import Dispatched, ExpertExchange
from data_plane.step import DecodeStep


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


class _TimedExpertExchange(ExpertExchange):
    """Counts dispatch, experts and combine, and the experts by themselves."""

    total_ns = 0
    experts_ns = 0

    def dispatch(self, *arguments: Any) -> Dispatched:
        begin_ns = time.perf_counter_ns()
        dispatched = super().dispatch(*arguments)
        self.total_ns += time.perf_counter_ns() - begin_ns
        return dispatched

    def run_experts(self, *arguments: Any) -> torch.Tensor:
        begin_ns = time.perf_counter_ns()
        own_sum = super().run_experts(*arguments)
        self.total_ns += time.perf_counter_ns() - begin_ns
        return own_sum

    def combine(self, *arguments: Any) -> torch.Tensor:
        begin_ns = time.perf_counter_ns()
        x_BX = super().combine(*arguments)
        self.total_ns += time.perf_counter_ns() - begin_ns
        return x_BX

    def _visit(self, *arguments: Any) -> tuple[torch.Tensor, list[int]]:
        begin_ns = time.perf_counter_ns()
        own_sum_and_counts = super()._visit(*arguments)
        self.experts_ns += time.perf_counter_ns() - begin_ns
        return own_sum_and_counts


class TimedStep(DecodeStep):
    """Computes what DecodeStep computes, through the same calls."""

    _expert_exchange = _TimedExpertExchange
    _experts: _TimedExpertExchange

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._attention_ns = self._exchange_ns = 0
        self._layers_begin_ns: int | None = None
        self._layers_end_ns = 0

    def run(self, context: StepContext) -> None:
        """As DecodeStep.run; the clocks start anew."""
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
            dispatch_combine_us=(self._experts.total_ns - self._experts.experts_ns) / num_moe_layers / 1e3,
            expert_us=self._experts.experts_ns / num_moe_layers / 1e3,
            step_us=(step_ns - layers_ns) / 1e3,
        )

    def _attend(self, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        begin_ns = time.perf_counter_ns()
        partial_and_lse = super()._attend(*arguments)
        self._attention_ns += time.perf_counter_ns() - begin_ns
        return partial_and_lse

    def _send_q(self, *arguments: Any) -> None:
        begin_ns = time.perf_counter_ns()
        if self._layers_begin_ns is None:
            self._layers_begin_ns = begin_ns
        super()._send_q(*arguments)
        self._exchange_ns += time.perf_counter_ns() - begin_ns

    def _answer_received(self, *arguments: Any) -> None:
        begin_ns, attention_ns = time.perf_counter_ns(), self._attention_ns
        super()._answer_received(*arguments)
        self._exchange_ns += time.perf_counter_ns() - begin_ns - (self._attention_ns - attention_ns)

    def _merge(self, *arguments: Any) -> None:
        begin_ns = time.perf_counter_ns()
        super()._merge(*arguments)
        self._exchange_ns += time.perf_counter_ns() - begin_ns

    def _mlp(self, *arguments: Any) -> torch.Tensor:
        x_BX = super()._mlp(*arguments)
        self._layers_end_ns = time.perf_counter_ns()
        return x_BX
