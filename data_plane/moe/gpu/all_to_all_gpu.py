"""MoE layers on a GPU, for captured steps: no count ever reaches the host.

Every instance puts to every one, also no rows. The CPU's sibling, with the legend, is
all_to_all_cpu.py.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from data_plane.kernels.norm import gated
from data_plane.model.config import ModelConfig
from data_plane.model.layers import shared_experts
from data_plane.model.weights import MlpWeights
from data_plane.moe.gpu.gate import gate
from data_plane.moe.gpu.gpu_weights import GpuWeights
from data_plane.moe.gpu.grouped import GroupedExperts
from data_plane.moe.gpu.pairs import Pairs, find_arrived_pairs, find_pairs
from data_plane.moe.gpu.rows import route_rows
from data_plane.moe.gpu.sums import return_sums, sum_pairs, sum_returned
from data_plane.transport.exchange import Channel
from data_plane.transport.gpu.cuda_ipc import GpuExchange
from nanocp.values.experts import ExpertTable, home_table


class GpuAllToAll(Protocol):
    """The MoE all-to-all of a captured step: dispatch, run_experts, combine, in this order.

    Instances in one thread take turns, one call each.
    """

    def place_experts(self, table: ExpertTable) -> None:
        """Set the place of each expert. Raises ValueError if it cannot send rows there."""

    def dispatch(self, x_BX: Tensor, expert_BK: Tensor, weight_BK: Tensor, live_B: Tensor) -> Any:
        """Send the live rows to the instances of their experts.

        expert_BK: int64 ids. weight_BK: fp32. live_B: bool.
        """

    def run_experts(self, dispatched: Any, experts: GroupedExperts) -> None:
        """Run the experts here on all arrived rows, and send the sums back."""

    def combine(
        self, dispatched: Any, x_BX: Tensor, shared_BX: Tensor | None, norm_X: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return (x_BX plus each row's weighted experts and shared_BX, that normed by norm_X)."""


def gated_rows(x_BX: Tensor, mlp: MlpWeights) -> Tensor:
    """Run a gated MLP on rows, as layers.gated_mlp does, in three launches."""
    return mlp.down(gated(mlp.gate_up(x_BX)))


class GpuMixtures:
    """The MoE layers of one instance over an all-to-all: a mixture.NormedMixture."""

    def __init__(self, all_to_all: GpuAllToAll, model: ModelConfig, weights: GpuWeights) -> None:
        self._all_to_all, self._model = all_to_all, model
        self._layers, self._experts = weights.weights.layers, weights.experts

    def meet(self, peers: Sequence[int]) -> None:
        """Do nothing: the exchange knows the term's instances."""

    def place_experts(self, table: ExpertTable) -> None:
        """Set the place of each expert, or raise ValueError."""
        self._all_to_all.place_experts(table)

    def phases(
        self, x_BX: Tensor, normed_BX: Tensor, live_B: Tensor, layer: int, norm_X: Tensor
    ) -> Generator[None, None, tuple[Tensor, Tensor]]:
        """Return (x_BX plus the MoE layer of normed_BX, the same normed by norm_X)."""
        moe, experts = self._layers[layer].moe, self._experts[layer]
        assert moe is not None and experts is not None, f"layer {layer} has no experts"
        expert_BK, weight_BK = gate(normed_BX, moe, self._model)
        dispatched = self._all_to_all.dispatch(normed_BX, expert_BK, weight_BK, live_B)
        # While the rows travel.
        shared_BX = shared_experts(normed_BX, moe, gated_rows)
        yield
        self._all_to_all.run_experts(dispatched, experts)
        yield
        return self._all_to_all.combine(dispatched, x_BX, shared_BX, norm_X, self._model.norm_eps)


@dataclass(frozen=True, slots=True)
class GpuDispatched:
    """A dispatch, as run_experts and combine need it."""

    x_BX: Tensor
    expert_BK: Tensor
    weight_BK: Tensor
    count_N: Tensor
    """[N] int32, by instance."""
    slot_NB: Tensor
    """[N, B] int32: -1: not sent there."""


class GpuExpertExchange:
    """A GpuAllToAll over the exchange of GPUs."""

    def __init__(
        self,
        exchange: GpuExchange,
        *,
        num_instances: int,
        num_experts: int,
        max_rows: int,
        device: torch.device,
    ) -> None:
        """max_rows: bound of a batch, equal on every instance; it sizes the receive buffers."""
        self._exchange = exchange
        self._num_instances = num_instances
        home = home_table(num_experts, num_instances)
        self._seat_E = torch.tensor(home.seats, dtype=torch.int64, device=device)
        self._max_rows = max_rows
        self._arrived_N = torch.zeros(num_instances, dtype=torch.int32, device=device)

    def place_experts(self, table: ExpertTable) -> None:
        """Set the instance of each expert."""
        self._seat_E.copy_(torch.tensor(table.seats, dtype=torch.int64))

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
        return GpuDispatched(x_BX, expert_BK, weight_BK, count_N, slot_NB)

    def run_experts(self, dispatched: GpuDispatched, experts: GroupedExperts) -> None:
        """Run the experts on rows in place, and write sums where they are awaited."""
        sent, count_N = dispatched, self._arrived_N
        self._exchange.wait(Channel.DISPATCH, count_N)
        pairs = find_arrived_pairs(
            sent.x_BX, sent.expert_BK, self._exchange, count_N, experts.place_E, experts.num_here
        )
        return_sums(experts.run_pairs(pairs), pairs, count_N, sent.weight_BK, self._exchange)

    def combine(
        self,
        dispatched: GpuDispatched,
        x_BX: Tensor,
        shared_BX: Tensor | None,
        norm_X: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """Add the returned sums, as GpuAllToAll.combine says."""
        self._exchange.wait(Channel.COMBINE, dispatched.count_N)
        return sum_returned(x_BX, self._exchange, dispatched.slot_NB, shared_BX, norm_X, eps)


@dataclass(slots=True)
class AloneDispatched:
    """A batch with all its experts here."""

    x_BX: Tensor
    expert_BK: Tensor
    weight_BK: Tensor
    live_B: Tensor
    pairs: Pairs | None = None
    y: Tensor | None = None


class GpuAlone:
    """A GpuAllToAll of an instance with every expert: no row travels."""

    def place_experts(self, table: ExpertTable) -> None:
        """Raise ValueError unless all experts are here."""
        assert not any(table.seats), "one instance has every expert"

    def dispatch(
        self, x_BX: Tensor, expert_BK: Tensor, weight_BK: Tensor, live_B: Tensor
    ) -> AloneDispatched:
        """Keep the batch for run_experts."""
        return AloneDispatched(x_BX, expert_BK, weight_BK, live_B)

    def run_experts(self, dispatched: AloneDispatched, experts: GroupedExperts) -> None:
        """Run the experts, and the shared ones beside them."""
        pairs = dispatched.pairs = find_pairs(
            dispatched.x_BX,
            dispatched.expert_BK,
            dispatched.live_B,
            experts.place_E,
            experts.num_here,
            experts.num_shared,
        )
        dispatched.y = experts.run_pairs(pairs)

    def combine(
        self,
        dispatched: AloneDispatched,
        x_BX: Tensor,
        shared_BX: Tensor | None,
        norm_X: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """Add each row's pairs, as GpuAllToAll.combine says."""
        pairs, y = dispatched.pairs, dispatched.y
        assert pairs is not None and y is not None, "run_experts comes before combine"
        return sum_pairs(x_BX, y, pairs, dispatched.weight_BK, shared_BX, norm_X, eps)
