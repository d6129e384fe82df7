"""The interface of MoE layers for a step, on a CPU and on a GPU: one generator a layer.

Implementations: all_to_all_cpu.py, all_to_all_gpu.py. Legend: B rows, X hidden size.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from enum import IntEnum
from typing import Protocol

from torch import Tensor

from data_plane.transport.exchange import Awaited
from nanocp.values.experts import ExpertTable


class MoeSchedule(IntEnum):
    """The order of a CPU's work in a MoE layer (Schedule of native/peers.h); outputs are equal."""

    BARRIER = 0
    """The shared expert first; all experts once the rows of all instances are here."""
    ORDERED = 1
    """Once all rows are here, first the peers' rows; own rows and the shared expert fill waits."""
    ARRIVAL = 2
    """ORDERED, but experts that will end in time run while rows are awaited."""


class Mixtures(Protocol):
    """All MoE layers of an instance, in the terms of a cluster."""

    def meet(self, peers: Sequence[int]) -> None:
        """Set the other instances of the term, before its first step."""

    def place_experts(self, table: ExpertTable) -> None:
        """Set the place of each expert; the experts here have been loaded or given away.

        Raises ValueError if experts cannot move.
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

    def phases(
        self, x_BX: Tensor, normed_BX: Tensor, live_B: Tensor, layer: int, norm_X: Tensor
    ) -> Generator[None, None, tuple[Tensor, Tensor]]:
        """Return (x_BX plus the MoE layer of normed_BX, the same normed by norm_X).

        As MixtureOfExperts.phases, but a failed wait is an error word.
        """
