"""Dispatch and combine on the exchange: every row visits the instances that hold its experts and comes back summed.

Enters: rows, their experts and weights. Leaves: per row, the weighted sum over its experts. Does not know: the gate,
the expert arithmetic (a callable), attention. Used where DeepEP is not there.

Legend: B rows, K experts a row, X hidden size, T rows that arrived here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from data_plane.transport.exchange import Channel
from data_plane.transport.regions import TensorExchange

Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(x_TX, expert_TK, weight_TK) -> y_TX: the weighted sum over those of the row's experts that are held here."""


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Pairs a combine with its dispatch."""

    epoch: int
    x_BX: torch.Tensor
    expert_BK: torch.Tensor
    weight_BK: torch.Tensor
    rows: tuple[torch.Tensor, ...]
    """For each instance, the rows that went there, ascending (this instance: the rows that stayed)."""


class ExpertExchange:
    """The MoE all-to-all of one instance."""

    def __init__(self, exchange: TensorExchange, num_experts: int) -> None:
        self._exchange = exchange
        self._instance = exchange.exchange.instance
        self._num_instances = exchange.exchange.num_instances
        self._experts_per_instance = num_experts // self._num_instances
        self._peers = [peer for peer in range(self._num_instances) if peer != self._instance]

    def dispatch(
        self, x_BX: torch.Tensor, expert_BK: torch.Tensor, weight_BK: torch.Tensor, live_B: torch.Tensor, epoch: int
    ) -> Dispatched:
        """Send the live rows to their experts' instances. Every peer gets a flag, also for zero rows (rule 8)."""
        rows = self._rows_by_owner(expert_BK, live_B)
        for peer in self._peers:
            chosen, region = rows[peer], self._exchange.outgoing(Channel.DISPATCH, peer, epoch)
            count = len(chosen)
            region["count"][0] = count
            if count:
                torch.index_select(x_BX, 0, chosen, out=region["hidden"][:count])
                torch.index_select(expert_BK, 0, chosen, out=region["expert"][:count])
                torch.index_select(weight_BK, 0, chosen, out=region["weight"][:count])
            self._exchange.put(Channel.DISPATCH, peer, epoch, count)
        return Dispatched(epoch, x_BX, expert_BK, weight_BK, tuple(rows))

    def run_experts(self, dispatched: Dispatched, experts: Experts) -> torch.Tensor:
        """Run the experts here on all rows that arrived, return the peers' sums to them, and combine: y_BX."""
        own = dispatched.rows[self._instance]
        parts = [(dispatched.x_BX[own], dispatched.expert_BK[own], dispatched.weight_BK[own])]
        for peer in self._peers:
            region = self._exchange.wait(Channel.DISPATCH, peer, dispatched.epoch)
            count = int(region["count"][0])
            parts.append((region["hidden"][:count], region["expert"][:count], region["weight"][:count]))
        x_TX, expert_TK, weight_TK = (torch.cat(column) for column in zip(*parts, strict=True))
        y_TX = experts(x_TX, expert_TK, weight_TK) if len(x_TX) else x_TX
        sums = torch.split(y_TX, [len(x) for x, _, _ in parts])
        for peer, peer_sum in zip(self._peers, sums[1:], strict=True):
            if len(peer_sum):
                self._exchange.outgoing(Channel.COMBINE, peer, dispatched.epoch)["hidden"][: len(peer_sum)] = peer_sum
                self._exchange.put(Channel.COMBINE, peer, dispatched.epoch, len(peer_sum))
        return self._combine(dispatched, sums[0])

    def _combine(self, dispatched: Dispatched, own_sum: torch.Tensor) -> torch.Tensor:
        y_BX = torch.zeros_like(dispatched.x_BX)
        for instance, rows in enumerate(dispatched.rows):
            # Ascending instances, so that a row's sum does not depend on who was fast.
            if instance == self._instance:
                y_BX.index_add_(0, rows, own_sum)
            elif len(rows):
                region = self._exchange.wait(Channel.COMBINE, instance, dispatched.epoch)
                y_BX.index_add_(0, rows, region["hidden"][: len(rows)])
        return y_BX

    def _rows_by_owner(self, expert_BK: torch.Tensor, live_B: torch.Tensor) -> list[torch.Tensor]:
        if self._num_instances == 1:
            return [live_B.nonzero().squeeze(1)]
        owner_BK = expert_BK // self._experts_per_instance
        return [
            ((owner_BK == instance).any(dim=1) & live_B).nonzero().squeeze(1) for instance in range(self._num_instances)
        ]
