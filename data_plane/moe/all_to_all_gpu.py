"""Dispatch and combine on the device's exchange, for captured steps: no count ever reaches the
host.

Enters: rows, their experts and weights. Leaves: per row, the weighted sum over its experts. Does
not know: the gate, which GEMM runs. Everybody puts to everybody, also for no rows, and this
instance to itself. Used where DeepEP is not there.

Legend: B rows, K experts a row, X hidden size, T rows that may arrive here, N instances.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from data_plane.moe.grouped import GroupedExperts
from data_plane.moe.triton_rows import group_arrived, route_rows, sum_returned, ungroup_arrived
from data_plane.transport.cuda_ipc import GpuExchange
from data_plane.transport.exchange import Channel


class GpuAllToAll(Protocol):
    """The MoE all-to-all of a captured step. Peers must be met between its calls, which follow each
    other."""

    def dispatch(self, x_BX: Tensor, expert_BK: Tensor, weight_BK: Tensor, live_B: Tensor) -> Any:
        """Send the live rows to their experts' instances."""

    def run_experts(self, dispatched: Any, experts: GroupedExperts) -> None:
        """Run the experts here on all rows that arrived."""

    def combine(self, dispatched: Any) -> Tensor:
        """The rows' sums, y_BX."""


@dataclass(frozen=True, slots=True)
class GpuDispatched:
    """Pairs a combine with its dispatch."""

    x_BX: Tensor
    count_N: Tensor
    """[N] int32: rows that went to each instance."""
    slot_NB: Tensor


class GpuExpertExchange:
    """See GpuAllToAll."""

    def __init__(
        self, exchange: GpuExchange, num_instances: int, num_experts: int, per_row: int, hidden_size: int,
        max_rows: int, dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        """max_rows: the same on every instance. It sizes what arrives, from all of them."""
        self._exchange = exchange
        self._num_instances, self._num_experts, self._max_rows = (
            num_instances,
            num_experts,
            max_rows,
        )
        most = num_instances * max_rows
        self._arrived = {
            "expert": torch.zeros(most, per_row, dtype=torch.int64, device=device),
            "weight": torch.zeros(most, per_row, device=device),
            "hidden": torch.zeros(most, hidden_size, dtype=dtype, device=device),
        }
        self._arrived_N = torch.zeros(num_instances, dtype=torch.int32, device=device)
        self._returned = torch.zeros(most, hidden_size, dtype=dtype, device=device)

    def dispatch(
        self, x_BX: Tensor, expert_BK: Tensor, weight_BK: Tensor, live_B: Tensor
    ) -> GpuDispatched:
        """See GpuAllToAll.dispatch."""
        count_N, row_NL, slot_NB = route_rows(
            expert_BK, live_B, self._num_instances, self._num_experts, self._max_rows
        )
        fields = {"expert": expert_BK, "weight": weight_BK, "hidden": x_BX}
        self._exchange.put(Channel.DISPATCH, fields, count_N, row_NL)
        return GpuDispatched(x_BX, count_N, slot_NB)

    def run_experts(self, dispatched: GpuDispatched, experts: GroupedExperts) -> None:
        """See GpuAllToAll.run_experts. The sums go back at once."""
        arrived, count_N = self._arrived, self._arrived_N
        self._exchange.wait(Channel.DISPATCH, count_N)
        self._exchange.take(Channel.DISPATCH, count_N, arrived)
        x_ETX, count_E, slot_TK = group_arrived(
            arrived["hidden"], arrived["expert"], count_N, experts.experts
        )
        y_ETX = experts.run_grouped(x_ETX, count_E)
        y_TX = ungroup_arrived(y_ETX, slot_TK, arrived["weight"], count_N)
        self._exchange.put(Channel.COMBINE, {"hidden": y_TX}, count_N)

    def combine(self, dispatched: GpuDispatched) -> Tensor:
        """See GpuAllToAll.combine."""
        self._exchange.wait(Channel.COMBINE, dispatched.count_N)
        self._exchange.take(Channel.COMBINE, dispatched.count_N, {"hidden": self._returned})
        return sum_returned(self._returned, dispatched.count_N, dispatched.slot_NB)
