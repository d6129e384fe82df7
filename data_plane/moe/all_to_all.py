"""Dispatch and combine on the exchange: every row visits the instances that hold its experts and comes back summed.

Enters: rows, their experts and weights. Leaves: per row, the weighted sum over its experts. Does not know: the gate,
the expert arithmetic (a callable), attention. Used where DeepEP is not there.

Legend: B rows, N instances, K experts a row, X hidden size, T rows that arrived here, this instance's own first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from data_plane.moe.rows import Region, RowMoves
from data_plane.transport.exchange import Channel
from data_plane.transport.regions import TensorExchange

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x_TX, expert_TK, weight_TK) -> y_TX: the weighted sum over those of the row's experts that are held here."""


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Pairs a combine with its dispatch."""

    epoch: int
    x_BX: Tensor
    expert_BK: Tensor
    weight_BK: Tensor
    rows_NB: Tensor
    """For each instance, the rows that went there, ascending (this instance: the rows that stayed)."""
    counts: list[int]
    """How many they are."""


class ExpertExchange:
    """The MoE all-to-all of one instance."""

    def __init__(self, exchange: TensorExchange, num_experts: int, max_rows: int, moves: RowMoves) -> None:
        """max_rows: of every instance."""
        self._exchange = exchange
        self._moves = moves
        self._instance = exchange.exchange.instance
        self._num_instances = exchange.exchange.num_instances
        self._experts_each = num_experts // self._num_instances
        self._max_arrived = max_rows * self._num_instances
        self._peers = [peer for peer in range(self._num_instances) if peer != self._instance]
        self._room: Region = {}
        """Where rows that arrived lie side by side: [N * max_rows, ...], made in the first step."""

    def dispatch(self, x_BX: Tensor, expert_BK: Tensor, weight_BK: Tensor, live_B: Tensor, epoch: int) -> Dispatched:
        """Send the live rows to their experts' instances. Every peer gets a flag, also for zero rows (rule 8)."""
        regions: list[Region | None] = [
            None if peer == self._instance else self._exchange.outgoing(Channel.DISPATCH, peer, epoch)
            for peer in range(self._num_instances)
        ]
        rows_NB, counts = self._moves.pack_rows(x_BX, expert_BK, weight_BK, live_B, self._experts_each, regions)
        for peer in self._peers:
            self._exchange.put(Channel.DISPATCH, peer, epoch, counts[peer])
        return Dispatched(epoch, x_BX, expert_BK, weight_BK, rows_NB, counts)

    def run_experts(self, dispatched: Dispatched, experts: Experts) -> Tensor:
        """Run the experts here on all rows that arrived, return the peers' sums to them, and combine: y_BX."""
        epoch, num_own = dispatched.epoch, dispatched.counts[self._instance]
        room = self._room = self._room or self._make_room(dispatched)
        arrived = [self._exchange.wait(Channel.DISPATCH, peer, epoch) for peer in self._peers]
        own = dispatched.rows_NB[self._instance, :num_own]
        counts = self._moves.join_rows(dispatched.x_BX, dispatched.expert_BK, dispatched.weight_BK, own, arrived, room)
        end = num_own + sum(counts)
        x_TX, expert_TK, weight_TK = room["hidden"][:end], room["expert"][:end], room["weight"][:end]
        y_TX = experts(x_TX, expert_TK, weight_TK) if end else x_TX
        outgoing = Channel.COMBINE
        answers = [
            self._exchange.outgoing(outgoing, peer, epoch) if count else None
            for peer, count in zip(self._peers, counts, strict=True)
        ]
        self._moves.return_sums(y_TX, counts, answers)
        for peer, count in zip(self._peers, counts, strict=True):
            if count:
                self._exchange.put(Channel.COMBINE, peer, epoch, count)
        sums = [
            self._exchange.wait(Channel.COMBINE, peer, epoch) if count and peer != self._instance else None
            for peer, count in enumerate(dispatched.counts)
        ]
        return self._moves.combine_sums(y_TX[:num_own], dispatched.rows_NB, dispatched.counts, sums)

    def _make_room(self, dispatched: Dispatched) -> Region:
        like = {"hidden": dispatched.x_BX, "expert": dispatched.expert_BK, "weight": dispatched.weight_BK}
        return {name: rows.new_empty(self._max_arrived, rows.shape[1]) for name, rows in like.items()}
