"""What an instance asks of the code that runs its steps: one step for each lane.

Enters: nothing. Leaves: protocols. Does not know: what a step computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from data_plane.graph.engine import GraphEngine
from data_plane.transport.regions import TensorExchange
from nanocp.values.experts import ExpertTable


class Step(Protocol):
    """What runs a step: CpuStep (step/cpu.py) or GpuStep (step/gpu.py)."""

    @property
    def awaited(self) -> int | None:
        """The instance that a step awaits without the host; None if none. For any thread."""

    def check(self) -> None:
        """Raise what ended the last step, if something did."""

    def meet(self, peers: Sequence[int]) -> None:
        """Set the other instances of the term."""

    def place_experts(self, table: ExpertTable) -> None:
        """Set the place of each expert, between two terms."""

    def logits_of(self, rows: list[int]) -> Tensor:
        """[rows, vocabulary] fp32: the last step's logits of these step rows."""


class DraftingStep(Step, Protocol):
    """A step of a model whose MTP layer drafts."""

    def draft_logits_of(self, rows: list[int]) -> Tensor:
        """[rows, vocabulary] fp32: the MTP layer's logits of these step rows."""

    def go_on_drafting(self, places: list[int], rows: list[int]) -> None:
        """The next turn takes the MTP layer's rows at these places."""


class DeviceDraftingStep(DraftingStep, Protocol):
    """A step that can draft before the host knows its tokens: GpuStep."""

    def highest_ids(self, num_turns: int, num_rows: int) -> list[list[int]]:
        """The highest logit's token of each step row: of the step, then of each turn behind it."""


class StepLane(NamedTuple):
    """What runs the steps of one lane: tables, regions and epochs of its own."""

    engine: GraphEngine
    step: Step
    exchange: TensorExchange
