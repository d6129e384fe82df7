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

from data_plane.graph.lane_parts import COMBINE, EXPERTS, WAIT, LanePart
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
from data_plane.moe.mixture import MoeProbe, NormedMixture, SlotNames
from data_plane.transport.exchange import Channel
from data_plane.transport.gpu.cuda_ipc import GpuExchange
from nanocp.values.experts import ExpertTable


class GpuAllToAll(Protocol):
    """The MoE all-to-all of a captured step: its calls in the order of its methods."""

    def dispatch(self, x_BX: Tensor, number_BK: Tensor, weight_BK: Tensor) -> Any:
        """Send rows to the slots that they name (gpu.gate). weight_BK: fp32."""

    def receive(self, dispatched: Any) -> None:
        """Wait for the rows of all instances."""

    def run_experts(self, dispatched: Any, experts: GroupedExperts, load_E: Tensor) -> None:
        """Run the experts here on all arrived rows; send the sums back. load_E: SlotLoads.of."""

    def receive_sums(self, dispatched: Any) -> None:
        """Wait for the sums of all instances."""

    def combine(
        self, dispatched: Any, x_BX: Tensor, shared_BX: Tensor | None, norm_X: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return (x_BX plus each row's weighted experts and shared_BX, that normed by norm_X)."""


def gated_rows(x_BX: Tensor, mlp: MlpWeights) -> Tensor:
    """Run a gated MLP on rows, as layers.gated_mlp does, in three launches."""
    return mlp.down(gated(mlp.gate_up(x_BX)))


class GpuMixtures(NormedMixture):
    """The MoE layers of one instance over an all-to-all."""

    parts = (WAIT, EXPERTS, WAIT, COMBINE)

    def __init__(
        self,
        all_to_all: GpuAllToAll,
        model: ModelConfig,
        weights: GpuWeights,
        names: SlotNames,
        exchange: GpuExchange,
    ) -> None:
        """exchange: knows the seat once attached."""
        self.all_to_all, self._model = all_to_all, model
        self._names, self._exchange = names, exchange
        self._layers, self._experts = weights.weights.layers, weights.experts

    def meet(self, peers: Sequence[int]) -> None:
        """Do nothing: the exchange knows them."""

    def place_experts(self, table: ExpertTable) -> None:
        self._names.place(table)

    def loads(self) -> Tensor:
        return self._names.loads.take()

    def phases(
        self,
        x_BX: Tensor,
        normed_BX: Tensor,
        live_B: Tensor,
        layer: int,
        norm_X: Tensor,
        probe: MoeProbe,
    ) -> Generator[LanePart, None, tuple[Tensor, Tensor]]:
        moe, experts = self._layers[layer].moe, self._experts[layer]
        assert moe is not None and experts is not None, f"layer {layer} has no experts"
        probe("other")
        number_ER, seat = self._names.of(layer), self._exchange.memory.instance
        number_BK, weight_BK = gate(normed_BX, moe, self._model, live_B, number_ER, seat)
        probe("dispatch_combine")
        dispatched = self.all_to_all.dispatch(normed_BX, number_BK, weight_BK)
        probe("other")
        # While the rows travel.
        shared_BX = shared_experts(normed_BX, moe, gated_rows)
        yield WAIT
        probe("dispatch_combine")
        self.all_to_all.receive(dispatched)
        yield EXPERTS
        probe("expert")
        self.all_to_all.run_experts(dispatched, experts, self._names.loads.of(layer))
        yield WAIT
        probe("dispatch_combine")
        self.all_to_all.receive_sums(dispatched)
        yield COMBINE
        return self.all_to_all.combine(dispatched, x_BX, shared_BX, norm_X, self._model.norm_eps)


@dataclass(frozen=True, slots=True)
class GpuDispatched:
    """A dispatch, as run_experts and combine need it."""

    x_BX: Tensor
    number_BK: Tensor
    weight_BK: Tensor
    count_N: Tensor
    """[N] int32, by instance."""
    slot_NB: Tensor
    """[N, B] int32: -1: not sent there."""


class GpuExpertExchange(GpuAllToAll):
    """Rows go over the exchange of GPUs."""

    def __init__(
        self,
        exchange: GpuExchange,
        *,
        num_instances: int,
        num_here: int,
        max_rows: int,
        device: torch.device,
    ) -> None:
        """num_here: slots in a layer. max_rows: bound of a batch, which sizes receive buffers.

        Both are equal on every instance.
        """
        self._exchange = exchange
        self._num_instances = num_instances
        self._num_here = num_here
        self._max_rows = max_rows
        self._arrived_N = torch.zeros(num_instances, dtype=torch.int32, device=device)

    def dispatch(self, x_BX: Tensor, number_BK: Tensor, weight_BK: Tensor) -> GpuDispatched:
        count_N, row_NL, slot_NB = route_rows(
            number_BK, self._num_here, self._num_instances, self._max_rows
        )
        fields = {"number": number_BK, "weight": weight_BK, "hidden": x_BX}
        self._exchange.put(Channel.DISPATCH, fields, count_N, row_NL)
        return GpuDispatched(x_BX, number_BK, weight_BK, count_N, slot_NB)

    def receive(self, dispatched: GpuDispatched) -> None:
        self._exchange.wait(Channel.DISPATCH, self._arrived_N)

    def run_experts(
        self, dispatched: GpuDispatched, experts: GroupedExperts, load_E: Tensor
    ) -> None:
        sent, count_N = dispatched, self._arrived_N
        pairs = find_arrived_pairs(sent.x_BX, sent.number_BK, self._exchange, count_N, load_E)
        return_sums(experts.run_pairs(pairs), pairs, count_N, sent.weight_BK, self._exchange)

    def receive_sums(self, dispatched: GpuDispatched) -> None:
        self._exchange.wait(Channel.COMBINE, dispatched.count_N)

    def combine(
        self,
        dispatched: GpuDispatched,
        x_BX: Tensor,
        shared_BX: Tensor | None,
        norm_X: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        return sum_returned(x_BX, self._exchange, dispatched.slot_NB, shared_BX, norm_X, eps)


@dataclass(slots=True)
class AloneDispatched:
    """A batch with all its experts here."""

    x_BX: Tensor
    number_BK: Tensor
    weight_BK: Tensor
    pairs: Pairs | None = None
    y: Tensor | None = None


class GpuAlone(GpuAllToAll):
    """An instance with every expert: no row travels."""

    def dispatch(self, x_BX: Tensor, number_BK: Tensor, weight_BK: Tensor) -> AloneDispatched:
        return AloneDispatched(x_BX, number_BK, weight_BK)

    def receive(self, dispatched: AloneDispatched) -> None:
        """Do nothing: all rows are here."""

    def run_experts(
        self, dispatched: AloneDispatched, experts: GroupedExperts, load_E: Tensor
    ) -> None:
        pairs = dispatched.pairs = find_pairs(
            dispatched.x_BX, dispatched.number_BK, load_E, experts.num_shared
        )
        dispatched.y = experts.run_pairs(pairs)

    def receive_sums(self, dispatched: AloneDispatched) -> None:
        """Do nothing: all sums are here."""

    def combine(
        self,
        dispatched: AloneDispatched,
        x_BX: Tensor,
        shared_BX: Tensor | None,
        norm_X: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        pairs, y = dispatched.pairs, dispatched.y
        assert pairs is not None and y is not None, "run_experts comes before combine"
        return sum_pairs(x_BX, y, pairs, dispatched.weight_BK, shared_BX, norm_X, eps)
