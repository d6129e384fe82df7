"""A MoE layer on the CPU: every row visits its experts' instances and comes back summed.

The GPU's sibling is all_to_all_gpu.py. Legend: B rows, N instances, K experts a row, E experts of a
layer, X hidden size.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from data_plane.model.config import ModelConfig
from data_plane.model.layers import shared_experts
from data_plane.model.weights import LayerWeights, MlpWeights, MoeWeights
from data_plane.moe.mixture import MixtureOfExperts, MoeProbe, SlotNames
from data_plane.moe.rows import Region
from data_plane.transport.exchange import Awaited, Channel
from data_plane.transport.regions import TensorExchange
from nanocp.values.experts import ExpertTable


@dataclass(frozen=True, slots=True)
class Dispatched:
    """A dispatch, as its combine needs it."""

    epoch: int
    x_BX: Tensor
    number_BK: Tensor
    weight_BK: Tensor
    rows_NB: Tensor
    """Ascending rows sent to each instance; for this one, the rows that stayed."""
    counts: list[int]


class ExpertKernels(Protocol):
    """Choose experts, move rows and run experts: by torch, or compiled."""

    def gate(self, x_BX: Tensor, moe: MoeWeights, config: ModelConfig) -> tuple[Tensor, Tensor]:
        """Choose each row's experts [B, K] and weights [B, K] (moe.gate.gate)."""

    def gated_mlp(self, x_BX: Tensor, mlp: MlpWeights) -> Tensor:
        """Run the MLP of the shared expert, as model.layers.gated_mlp does."""

    def name_slots(self, expert_BK: Tensor, live_B: Tensor, number_ER: Tensor, seat: int) -> Tensor:
        """Name the slots of experts (rows.name_slots)."""

    def pack_rows(
        self,
        x_BX: Tensor,
        number_BK: Tensor,
        weight_BK: Tensor,
        num_slots: int,
        regions: Sequence[Region | None],
    ) -> tuple[Tensor, list[int]]:
        """Choose and send each instance's rows (rows.pack_rows)."""

    def combine_sums(
        self,
        x_BX: Tensor,
        shared_BX: Tensor | None,
        own_sum: Tensor,
        rows_NB: Tensor,
        counts: Sequence[int],
        regions: Sequence[Region | None],
    ) -> Tensor:
        """Add the returned sums to their rows, as rows.combine_sums does."""

    def visit_experts(
        self,
        x_BX: Tensor,
        number_BK: Tensor,
        weight_BK: Tensor,
        own: Tensor,
        peers: Sequence[tuple[Region, Region]],
        moe: MoeWeights,
        first: int = 0,
        load_S: Tensor | None = None,
    ) -> tuple[Tensor, list[int]]:
        """Run the experts on own and arrived rows (experts.visit_experts)."""

    def experts_changed(self) -> None:
        """Forget the experts' addresses."""


class ExpertExchange(MixtureOfExperts):
    """The MoE layers of one instance, a call for each part."""

    def __init__(
        self,
        exchange: TensorExchange,
        model: ModelConfig,
        layers: Sequence[LayerWeights],
        kernels: ExpertKernels,
        probe: MoeProbe,
        home: ExpertTable,
    ) -> None:
        """probe: called when a phase begins. home: until place_experts."""
        self._exchange = exchange
        self._model = model
        self._layers = layers
        self._kernels = kernels
        self._probe = probe
        self._instance = exchange.exchange.instance
        self._num_instances = exchange.exchange.num_instances
        self._names = SlotNames(home, layers, model.num_experts)
        self.peers = [peer for peer in range(self._num_instances) if peer != self._instance]

    def meet(self, peers: Sequence[int]) -> None:
        self.peers = list(peers)

    def place_experts(self, table: ExpertTable) -> None:
        self._names.place(table)
        self._kernels.experts_changed()

    def loads(self) -> Tensor:
        return self._names.loads.take()

    def phases(
        self, x_BX: Tensor, normed_BX: Tensor, live_B: Tensor, layer: int
    ) -> Generator[Awaited, None, Tensor]:
        moe, kernels = self._layers[layer].moe, self._kernels
        assert moe is not None, f"layer {layer} has no experts"
        self._exchange.moe_epoch += 1
        expert_BK, weight_BK = kernels.gate(normed_BX, moe, self._model)
        self._probe("dispatch_combine")
        number_ER = self._names.of(layer)
        number_BK = kernels.name_slots(expert_BK, live_B, number_ER, self._instance)
        dispatched = self.dispatch(normed_BX, number_BK, weight_BK, self._exchange.moe_epoch)
        self._probe("other")
        # While the rows travel.
        shared_BX = shared_experts(normed_BX, moe, kernels.gated_mlp)
        self._probe("dispatch_combine")
        yield from self.arrivals(dispatched)
        own_sum = self.run_experts(dispatched, moe, self._names.loads.of(layer))
        yield from self.answers(dispatched)
        return self.combine(dispatched, own_sum, x_BX, shared_BX)

    def dispatch(
        self, x_BX: Tensor, number_BK: Tensor, weight_BK: Tensor, epoch: int
    ) -> Dispatched:
        """Send rows to the instances of the slots that they name (rows.name_slots).

        weight_BK: fp32. Every peer gets a flag, also for zero rows (protocol.md, equal epochs).
        """
        regions: list[Region | None] = [
            self._exchange.outgoing(Channel.DISPATCH, peer, epoch) if peer in self.peers else None
            for peer in range(self._num_instances)
        ]
        rows_NB, counts = self._kernels.pack_rows(
            x_BX, number_BK, weight_BK, self._names.num_slots, regions
        )
        for peer in self.peers:
            self._exchange.put(Channel.DISPATCH, peer, epoch, counts[peer])
        return Dispatched(epoch, x_BX, number_BK, weight_BK, rows_NB, counts)

    def arrivals(self, dispatched: Dispatched) -> list[Awaited]:
        """Return what `run_experts` awaits: the rows of every peer."""
        return [
            self._exchange.awaited(Channel.DISPATCH, peer, dispatched.epoch) for peer in self.peers
        ]

    def answers(self, dispatched: Dispatched) -> list[Awaited]:
        """Return what `combine` awaits: the peers' sums."""
        return [
            self._exchange.awaited(Channel.COMBINE, peer, dispatched.epoch)
            for peer in self.peers
            if dispatched.counts[peer]
        ]

    def run_experts(self, dispatched: Dispatched, moe: MoeWeights, load_S: Tensor) -> Tensor:
        """Run the experts here on all rows, and send the peers' sums back.

        load_S: SlotLoads.of. Returns the sums of the rows that stayed, [rows, X]. Raises PeerLost
        or ExchangeTimeout.
        """
        epoch, exchange = dispatched.epoch, self._exchange
        arrived = [exchange.wait(Channel.DISPATCH, peer, epoch) for peer in self.peers]
        answers = [exchange.outgoing(Channel.COMBINE, peer, epoch) for peer in self.peers]
        own = dispatched.rows_NB[self._instance, : dispatched.counts[self._instance]]
        self._probe("expert")
        first = self._instance * self._names.num_slots
        rows = dispatched.x_BX, dispatched.number_BK, dispatched.weight_BK, own
        regions = [*zip(arrived, answers, strict=True)]
        own_sum, counts = self._kernels.visit_experts(*rows, regions, moe, first, load_S)
        self._probe("dispatch_combine")
        for peer, count in zip(self.peers, counts, strict=True):
            if count:
                exchange.put(Channel.COMBINE, peer, epoch, count)
        return own_sum

    def combine(
        self, dispatched: Dispatched, own_sum: Tensor, x_BX: Tensor, shared_BX: Tensor | None
    ) -> Tensor:
        """Return x_BX plus its rows' experts: own_sum of run_experts, and shared_BX, if any.

        Raises as run_experts does.
        """
        sums = [
            self._exchange.wait(Channel.COMBINE, peer, dispatched.epoch)
            if count and peer != self._instance
            else None
            for peer, count in enumerate(dispatched.counts)
        ]
        return self._kernels.combine_sums(
            x_BX, shared_BX, own_sum, dispatched.rows_NB, dispatched.counts, sums
        )
