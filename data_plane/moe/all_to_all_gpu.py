"""A mixture of experts on a GPU, for captured steps: no count ever reaches the host.

Enters: rows, weights. Leaves: the rows with the weighted sums over their experts. Does not know:
the gate's arithmetic, which GEMM runs. Every instance puts to every instance, itself included,
also for no rows. It runs where DeepEP cannot. The CPU's sibling is all_to_all_cpu.py.

Legend: B rows, K experts a row, X hidden size, T rows that may arrive here, N instances.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from data_plane.model.config import ModelConfig
from data_plane.model.layers import shared_experts
from data_plane.moe.gate import gate
from data_plane.moe.gpu_weights import GpuWeights
from data_plane.moe.grouped import GroupedExperts
from data_plane.moe.triton_rows import group_arrived, route_rows, sum_returned, ungroup_arrived
from data_plane.transport.cuda_ipc import GpuExchange
from data_plane.transport.exchange import Channel
from nanocp.values.experts import home_table


class GpuAllToAll(Protocol):
    """The MoE all-to-all of a captured step.

    A layer calls dispatch, run_experts and combine, in this order. Instances that take turns in one
    thread must all have made a call before one of them makes the next.
    """

    def place_experts(self, seats: Sequence[int]) -> None:
        """Set the instance of each expert. Raises ValueError if it cannot send rows there."""

    def dispatch(self, x_BX: Tensor, expert_BK: Tensor, weight_BK: Tensor, live_B: Tensor) -> Any:
        """Send the live rows to the instances that hold their experts.

        x_BX: hidden rows. expert_BK: int64 ids. weight_BK: fp32. live_B: bool.
        """

    def run_experts(self, dispatched: Any, experts: GroupedExperts) -> None:
        """Run the experts here on all rows that arrived, and send the sums back."""

    def combine(self, dispatched: Any) -> Tensor:
        """Return y_BX: the weighted sum of each row over its experts, in the dtype of x."""


class GpuMixtures:
    """The mixtures of one instance over an all-to-all: see mixture.MixtureOfExperts."""

    def __init__(self, all_to_all: GpuAllToAll, model: ModelConfig, weights: GpuWeights) -> None:
        self._all_to_all, self._model = all_to_all, model
        self._layers, self._experts = weights.weights.layers, weights.experts

    def meet(self, peers: Sequence[int]) -> None:
        """Do nothing: who is in the term, the exchange knows."""

    def place_experts(self, seats: Sequence[int]) -> None:
        """Set the instance of each expert; see GpuAllToAll.place_experts."""
        self._all_to_all.place_experts(seats)

    def phases(
        self, x_BX: Tensor, normed_BX: Tensor, live_B: Tensor, layer: int
    ) -> Generator[None, None, Tensor]:
        """Return x_BX plus the mixture of normed_BX; see mixture.MixtureOfExperts.phases."""
        moe, experts = self._layers[layer].moe, self._experts[layer]
        assert moe is not None and experts is not None, f"layer {layer} has no experts"
        expert_BK, weight_BK = gate(normed_BX, moe, self._model)
        dispatched = self._all_to_all.dispatch(normed_BX, expert_BK, weight_BK, live_B)
        # While the rows travel.
        shared_BX = shared_experts(normed_BX, moe)
        yield
        self._all_to_all.run_experts(dispatched, experts)
        yield
        routed_BX = self._all_to_all.combine(dispatched)
        return x_BX + (routed_BX if shared_BX is None else routed_BX + shared_BX)


@dataclass(frozen=True, slots=True)
class GpuDispatched:
    """What a combine must know of its dispatch."""

    x_BX: Tensor
    count_N: Tensor
    """[N] int32: rows that went to each instance."""
    slot_NB: Tensor
    """[N, B] int32: the slot of each row at each instance; -1 if it did not go there."""


class GpuExpertExchange:
    """A GpuAllToAll over the exchange of one node's GPUs."""

    def __init__(
        self,
        exchange: GpuExchange,
        *,
        num_instances: int,
        num_experts: int,
        per_row: int,
        hidden_size: int,
        max_rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate the memory that arriving rows and sums are taken into.

        per_row: experts that a row visits. max_rows: bound of a batch, the same on every instance,
        since it sizes what arrives from all of them.
        """
        self._exchange = exchange
        self._num_instances = num_instances
        home = home_table(num_experts, num_instances)
        self._seat_E = torch.tensor(home.seats, dtype=torch.int64, device=device)
        self._max_rows = max_rows
        most = num_instances * max_rows
        self._arrived = {
            "expert": torch.zeros(most, per_row, dtype=torch.int64, device=device),
            "weight": torch.zeros(most, per_row, device=device),
            "hidden": torch.zeros(most, hidden_size, dtype=dtype, device=device),
        }
        self._arrived_N = torch.zeros(num_instances, dtype=torch.int32, device=device)
        self._returned = torch.zeros(most, hidden_size, dtype=dtype, device=device)

    def place_experts(self, seats: Sequence[int]) -> None:
        """Set the instance of each expert, where captured steps read it."""
        self._seat_E.copy_(torch.tensor(seats, dtype=torch.int64))

    def dispatch(
        self, x_BX: Tensor, expert_BK: Tensor, weight_BK: Tensor, live_B: Tensor
    ) -> GpuDispatched:
        """Send the live rows away, as GpuAllToAll.dispatch says."""
        count_N, row_NL, slot_NB = route_rows(
            expert_BK,
            live_B,
            self._seat_E,
            num_instances=self._num_instances,
            num_slots=self._max_rows,
        )
        fields = {"expert": expert_BK, "weight": weight_BK, "hidden": x_BX}
        self._exchange.put(Channel.DISPATCH, fields, count_N, row_NL)
        return GpuDispatched(x_BX, count_N, slot_NB)

    def run_experts(self, dispatched: GpuDispatched, experts: GroupedExperts) -> None:
        """Run the experts here, as GpuAllToAll.run_experts says; the sums go back at once."""
        arrived, count_N = self._arrived, self._arrived_N
        self._exchange.wait(Channel.DISPATCH, count_N)
        self._exchange.take(Channel.DISPATCH, count_N, arrived)
        x_ETX, count_E, slot_TK = group_arrived(
            arrived["hidden"], arrived["expert"], count_N, experts.place_E, experts.num_here
        )
        y_ETX = experts.run_grouped(x_ETX, count_E)
        y_TX = ungroup_arrived(y_ETX, slot_TK, arrived["weight"], count_N)
        self._exchange.put(Channel.COMBINE, {"hidden": y_TX}, count_N)

    def combine(self, dispatched: GpuDispatched) -> Tensor:
        """Sum what came back, as GpuAllToAll.combine says."""
        self._exchange.wait(Channel.COMBINE, dispatched.count_N)
        self._exchange.take(Channel.COMBINE, dispatched.count_N, {"hidden": self._returned})
        return sum_returned(self._returned, dispatched.count_N, dispatched.slot_NB)
