"""The interface by which a policy orders a model's operators (DynaFlow, 3.2.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


@dataclass(frozen=True)
class SplitModule:
    """Each call of a module of this class is an operator of its own."""

    class_name: str
    tag: str


@dataclass(frozen=True)
class SplitFunc:
    """Each call of a function whose name matches the whole pattern is an operator of its own."""

    pattern: str
    """A regular expression, such as `all_reduce.*`."""
    tag: str


Rule = SplitModule | SplitFunc
"""A cut of the model. Code between cuts is an operator with an empty tag."""


class Op(NamedTuple):
    """One operator on one micro-batch."""

    number: int
    """Place in the program, from 0; equal in every micro-batch."""
    tag: str
    """The tag of its rule; empty between cuts."""
    micro_batch: int


Fused = Callable[..., Sequence[Sequence[Any]]]
"""Runs several operators at once: takes a tuple of inputs for each, returns a sequence of outputs
each."""


class Ops(Protocol):
    """One forward of a model, whose operators a policy executes in an order of its choice."""

    @property
    def batch_size(self) -> int:
        """Rows of the whole batch."""

    @property
    def is_finished(self) -> bool:
        """Whether every operator of every micro-batch has been executed."""

    def split(self, sizes: Sequence[int]) -> None:
        """Cut the batch into micro-batches of these sizes; before anything is executed.

        Without it there is one micro-batch. Raises ValueError if the sizes are not positive, or do
        not add up to the batch.
        """

    def get_ready_ops(self, micro_batch: int) -> tuple[Op, ...]:
        """The micro-batch's operators whose inputs are there, in program order."""

    def execute(
        self, ops: Sequence[Op], replace_func: Fused | None = None, stream: str = ""
    ) -> None:
        """Run ready operators.

        The same operator of several micro-batches runs once, on all of their rows. Different ones
        run in order, or all as one call of `replace_func`. stream: a GPU stream, concurrent with
        others; empty: the caller's. Raises ValueError for an operator that is not ready, and for
        one that was executed.
        """


class OverlapPolicy(Protocol):
    """An order of operators."""

    rules: Sequence[Rule]

    def schedule(self, ops: Ops) -> None:
        """Execute every operator once in every micro-batch.

        It may depend only on the batch size and on ready operators: the order is recorded once per
        batch size, and repeated.
        """
