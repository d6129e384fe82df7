"""Dispatch and combine on the exchange: every row visits the instances that hold its experts and
comes back summed.

Enters: rows, their experts and weights. Leaves: the rows with the weighted sums over their experts.
Does not know: the gate, the expert arithmetic (moe/experts.py), attention. On the CPU; a GPU's is
all_to_all_gpu.py.

Legend: B rows, N instances, K experts a row, X hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from data_plane.model.weights import MoeWeights
from data_plane.moe.rows import Region, RowMoves
from data_plane.transport.exchange import Channel
from data_plane.transport.regions import TensorExchange

MoePhase = Literal["dispatch_combine", "expert"]
"""A phase of a MoE layer: moving rows, or running experts."""


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Pairs a combine with its dispatch."""

    epoch: int
    x_BX: Tensor
    expert_BK: Tensor
    weight_BK: Tensor
    rows_NB: Tensor
    """For each instance, the rows that went there, ascending (this instance: the rows that stayed).
    """
    counts: list[int]
    """How many they are."""


class ExpertKernels(RowMoves, Protocol):
    """Who moves rows and runs experts."""

    def visit_experts(
        self,
        x_BX: Tensor,
        expert_BK: Tensor,
        weight_BK: Tensor,
        own: Tensor,
        arrived: Sequence[Region],
        answers: Sequence[Region],
        moe: MoeWeights,
    ) -> tuple[Tensor, list[int]]:
        """See moe.experts."""


class ExpertExchange:
    """The MoE all-to-all of one instance."""

    def __init__(
        self,
        exchange: TensorExchange,
        num_experts: int,
        kernels: ExpertKernels,
        probe: Callable[[MoePhase], None],
    ) -> None:
        """probe: called when a phase begins within `run_experts`."""
        self._exchange = exchange
        self._kernels = kernels
        self._probe = probe
        self._instance = exchange.exchange.instance
        self._num_instances = exchange.exchange.num_instances
        self._experts_each = num_experts // self._num_instances
        self._peers = [peer for peer in range(self._num_instances) if peer != self._instance]

    def dispatch(
        self, x_BX: Tensor, expert_BK: Tensor, weight_BK: Tensor, live_B: Tensor, epoch: int
    ) -> Dispatched:
        """Send the live rows to their experts' instances. Every peer gets a flag, also for zero
        rows (docs/protocol.md, equal epochs)."""
        regions: list[Region | None] = [
            None
            if peer == self._instance
            else self._exchange.outgoing(Channel.DISPATCH, peer, epoch)
            for peer in range(self._num_instances)
        ]
        rows_NB, counts = self._kernels.pack_rows(
            x_BX, expert_BK, weight_BK, live_B, self._experts_each, regions
        )
        for peer in self._peers:
            self._exchange.put(Channel.DISPATCH, peer, epoch, counts[peer])
        return Dispatched(epoch, x_BX, expert_BK, weight_BK, rows_NB, counts)

    def run_experts(self, dispatched: Dispatched, moe: MoeWeights) -> Tensor:
        """Run the experts here on all rows that arrived, and return the peers' sums to them: the
        sums of own rows."""
        epoch, exchange = dispatched.epoch, self._exchange
        arrived = [exchange.wait(Channel.DISPATCH, peer, epoch) for peer in self._peers]
        answers = [exchange.outgoing(Channel.COMBINE, peer, epoch) for peer in self._peers]
        own = dispatched.rows_NB[self._instance, : dispatched.counts[self._instance]]
        self._probe("expert")
        own_sum, counts = self._kernels.visit_experts(
            dispatched.x_BX, dispatched.expert_BK, dispatched.weight_BK, own, arrived, answers, moe
        )
        self._probe("dispatch_combine")
        for peer, count in zip(self._peers, counts, strict=True):
            if count:
                exchange.put(Channel.COMBINE, peer, epoch, count)
        return own_sum

    def combine(
        self, dispatched: Dispatched, own_sum: Tensor, x_BX: Tensor, shared_BX: Tensor | None
    ) -> Tensor:
        """x_BX plus what experts made of its rows, the shared one too."""
        sums = [
            self._exchange.wait(Channel.COMBINE, peer, dispatched.epoch)
            if count and peer != self._instance
            else None
            for peer, count in enumerate(dispatched.counts)
        ]
        return self._kernels.combine_sums(
            x_BX, shared_BX, own_sum, dispatched.rows_NB, dispatched.counts, sums
        )
