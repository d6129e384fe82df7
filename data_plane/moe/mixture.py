"""The interface of MoE layers for a step, on a CPU and on a GPU: one generator a layer.

Implementations: all_to_all_cpu.py, all_to_all_gpu.py. Legend: B rows, X hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from enum import IntEnum
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from data_plane.graph.lane_parts import LanePart
from data_plane.transport.exchange import Awaited
from nanocp.values.experts import MAX_REPLICAS, ExpertTable

MoePhase = Literal["dispatch_combine", "expert", "other"]
"""Moving rows, running experts, or the gate and the shared expert."""
MoeProbe = Callable[[MoePhase], None]
"""Called with the phase that begins."""


class MoeSchedule(IntEnum):
    """The order of a CPU's work in a MoE layer (Schedule of native/peers.h); outputs are equal."""

    BARRIER = 0
    """The shared expert first; all experts once the rows of all instances are here."""
    ORDERED = 1
    """Once all rows are here, first the peers' rows; own rows and the shared expert fill waits."""
    ARRIVAL = 2
    """ORDERED, but experts that will end in time run while rows are awaited."""


class SlotLoads:
    """A receiver's counts: pairs of a row and an expert, by MoE layer and slot here.

    Its memory stays, for captured steps.
    """

    def __init__(
        self, places: Sequence[int], num_slots: int, device: torch.device | str = "cpu"
    ) -> None:
        """places: numbers of the MoE layers."""
        # Each layer's are aligned to 16 bytes, so that Triton compiles a kernel once for all.
        shape = len(places), num_slots + num_slots % 2
        self._load_LS = torch.zeros(shape, dtype=torch.int64, device=device)[:, :num_slots]
        self._load_of_layer = dict[int, Tensor](zip(places, self._load_LS, strict=True))
        self._taken_LS = torch.zeros(len(places), num_slots, dtype=torch.int64)

    def of(self, layer: int) -> Tensor:
        """Return a layer's counts [S] int64, to which visits add in place."""
        return self._load_of_layer[layer]

    def take(self) -> Tensor:
        """Return what came since the call before; see Mixtures.loads."""
        load_LS = self._load_LS.to("cpu", copy=True)
        before_LS, self._taken_LS = self._taken_LS, load_LS
        return load_LS - before_LS


class SlotNames:
    """A sender's table: by layer and expert the numbers of slots (protocol.md, named slots).

    Its memory stays, for captured steps.
    """

    def __init__(
        self,
        table: ExpertTable,
        layers: Sequence[Any],
        num_experts: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """layers: LayerWeights, dense ones too."""
        self.num_slots = table.num_slots
        places = [index for index, layer in enumerate(layers) if layer.moe is not None]
        self.loads = SlotLoads(places, table.num_slots, device)
        shape = len(places), num_experts, 1 + MAX_REPLICAS
        self._number_LER = torch.zeros(shape, dtype=torch.int32, device=device)
        self._of_layer = dict[int, Tensor](zip(places, self._number_LER, strict=True))
        if places:
            self.place(table)

    def place(self, table: ExpertTable) -> None:
        """Name the slots of this table from now on."""
        assert table.num_slots == self.num_slots, "the slots of an instance are made once"
        num_layers = len(table.layers)
        held = torch.frombuffer(bytearray(b"".join(table.layers)), dtype=torch.int16)
        # The numbers of an expert follow each other, ascending.
        expert_LM, number_LM = held.view(num_layers, -1).long().sort(dim=1, stable=True)
        replica_LM = 1 + torch.arange(expert_LM.shape[1])
        replica_LM = replica_LM - torch.searchsorted(expert_LM, expert_LM)
        named = (expert_LM >= 0) & (replica_LM <= MAX_REPLICAS)
        where = named.nonzero(as_tuple=True)[0], expert_LM[named]
        numbers = torch.zeros(num_layers, *self._number_LER.shape[1:], dtype=torch.int32)
        numbers[*where, replica_LM[named]] = number_LM[named].int()
        numbers[..., 0].index_put_(where, torch.tensor(1, dtype=torch.int32), accumulate=True)
        assert numbers[..., 0].all(), "an expert is in no slot"
        self._number_LER.copy_(numbers)

    def of(self, layer: int) -> Tensor:
        """Return a layer's table [E, 64] int32: each expert's replicas, then their numbers."""
        return self._of_layer[layer]


class Mixtures(Protocol):
    """All MoE layers of an instance, in the terms of a cluster."""

    def meet(self, peers: Sequence[int]) -> None:
        """Set the other instances of the term, before its first step."""

    def place_experts(self, table: ExpertTable) -> None:
        """Let rows name the slots of this table; those here have been filled."""

    def loads(self) -> Tensor:
        """Return and clear the pairs of a row and an expert that visited each slot here.

        [MoE layers, S] int64 on the host. Call it between steps; a failed one may count in part.
        """


class MixtureOfExperts(Mixtures, Protocol):
    """The MoE layers of an instance on a CPU."""

    def phases(
        self, x_BX: Tensor, normed_BX: Tensor, live_B: Tensor, layer: int
    ) -> Generator[Awaited, None, Tensor]:
        """Return x_BX plus MoE layer number `layer` of normed_BX; x_BX is not changed.

        live_B: bool; only live rows visit experts. It yields each awaited put, so instances in one
        thread can take turns. A wait raises what the exchange raises.
        """


class NormedMixture(Mixtures, Protocol):
    """The MoE layers of an instance on a GPU, with the norm behind each."""

    parts: tuple[LanePart, ...]
    """What `phases` yields in a step of two lanes."""

    def phases(
        self,
        x_BX: Tensor,
        normed_BX: Tensor,
        live_B: Tensor,
        layer: int,
        norm_X: Tensor,
        probe: MoeProbe,
    ) -> Generator[LanePart, None, tuple[Tensor, Tensor]]:
        """Return (x_BX plus the MoE layer of normed_BX, the same normed by norm_X).

        As MixtureOfExperts.phases, but a failed wait is an error word.
        """
