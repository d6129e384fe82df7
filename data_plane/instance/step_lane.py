"""The interface of steps for an instance: one step for each lane (micro-batch)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from data_plane.graph.engine import GraphEngine
from data_plane.transport.regions import TensorExchange
from nanocp.values.experts import ExpertTable


class Step(Protocol):
    """A step: CpuStep (step/cpu.py) or GpuStep (step/gpu.py)."""

    @property
    def awaited(self) -> int | None:
        """The instance that a step awaits without the host, or None. For any thread."""

    def check(self) -> None:
        """Raise the error of the last step, if any."""

    def meet(self, peers: Sequence[int]) -> None:
        """Set the other instances of the term."""

    def place_experts(self, table: ExpertTable) -> None:
        """Let rows follow this table from the next step on."""

    def loads(self) -> Tensor:
        """Return [L, S] int64: pairs of a row and an expert by slot, since the last call."""

    def logits_of(self, rows: list[int]) -> Tensor:
        """Return [rows, vocabulary] fp32, of the last step."""


class DraftingStep(Step, Protocol):
    """A step of a model whose MTP layer drafts."""

    def draft_logits_of(self, rows: list[int]) -> Tensor:
        """Return [rows, vocabulary] fp32, of the MTP layer."""

    def go_on_drafting(self, places: list[int], rows: list[int]) -> None:
        """Put these MTP rows at these places in the next turn."""


class DeviceDraftingStep(DraftingStep, Protocol):
    """A step that can draft before the host knows its tokens: GpuStep."""

    def highest_ids(self, num_turns: int, num_rows: int) -> list[list[int]]:
        """Return each step row's highest-logit token: of the step, then of each turn."""


class StepLane(NamedTuple):
    """The step of one lane, with its tables, regions and epochs."""

    engine: GraphEngine
    step: Step
    exchange: TensorExchange
