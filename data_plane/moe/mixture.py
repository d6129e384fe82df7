"""What a step asks of its mixtures of experts: one generator a layer, on a CPU and on a GPU.

Enters: a layer's rows. Leaves: the rows with the mixture added. Does not know: what carries rows,
what computes. all_to_all_cpu.py and all_to_all_gpu.py have the implementations.

Legend: B rows, X hidden size.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from enum import IntEnum
from typing import Protocol

from torch import Tensor

from data_plane.transport.exchange import Awaited
from nanocp.values.experts import ExpertTable


class MoeSchedule(IntEnum):
    """What an instance on a CPU runs when: Schedule of native/peers.h. Outputs are the same."""

    BARRIER = 0
    """The shared expert, then, once the rows of all instances are here, all experts."""
    ORDERED = 1
    """Once all rows are here, first what other instances wait for; own rows and the shared expert
    fill waits."""
    ARRIVAL = 2
    """ORDERED, and while rows are awaited, experts begin that will have ended by then."""


class Mixtures(Protocol):
    """The mixtures of every MoE layer of an instance, in the terms of a cluster."""

    def meet(self, peers: Sequence[int]) -> None:
        """Set the other instances of the term, before its first step."""

    def place_experts(self, table: ExpertTable) -> None:
        """Set the place of each expert; the experts here have been loaded or given away.

        Raises ValueError if experts cannot move.
        """


class MixtureOfExperts(Mixtures, Protocol):
    """The mixtures of an instance on a CPU."""

    def phases(
        self, x_BX: Tensor, normed_BX: Tensor, live_B: Tensor, layer: int
    ) -> Generator[Awaited, None, Tensor]:
        """Return x_BX plus the mixture of layer number `layer` of normed_BX; x_BX is not changed.

        live_B: bool; no expert gets a row that is not live. It yields before each wait for peers
        the put that it awaits. Instances that take turns in one thread change turns there. A wait
        raises what the exchange raises.
        """


class NormedMixture(Mixtures, Protocol):
    """The mixtures of an instance on a GPU, with the norm behind each."""

    def phases(
        self, x_BX: Tensor, normed_BX: Tensor, live_B: Tensor, layer: int, norm_X: Tensor
    ) -> Generator[None, None, tuple[Tensor, Tensor]]:
        """Return (x_BX plus the mixture of normed_BX, the same normed by norm_X).

        The rest is as MixtureOfExperts.phases says, but that a failed wait is an error word.
        """
