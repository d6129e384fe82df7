"""The interface by which a policy orders operators (DynaFlow, 3.2.2), and what records an order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

_MAX_CALLS_EACH = 100


@dataclass(frozen=True)
class SplitModule:
    """Each call of a module of this class or a subclass is an operator."""

    module_class: type
    tag: str

    def __post_init__(self) -> None:
        if not isinstance(self.module_class, type):
            raise ValueError(f"module_class is {self.module_class!r}; it must be a class")


@dataclass(frozen=True)
class SplitFunc:
    """Each call of a function whose whole name matches is an operator."""

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
"""Runs several operators at once: a tuple of inputs for each gives a sequence of outputs each."""


class Ops(Protocol):
    """One forward of a model, whose operators a policy executes in its order."""

    @property
    def batch_size(self) -> int:
        """Rows of the whole batch."""

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches as they are cut now."""

    @property
    def is_finished(self) -> bool:
        """Whether every operator of every micro-batch has been executed."""

    def split(self, sizes: Sequence[int]) -> None:
        """Cut the batch into micro-batches, before anything is executed; by default it is one.

        Raises ValueError if sizes are not positive, or do not add up.
        """

    def get_ready_ops(self, micro_batch: int) -> tuple[Op, ...]:
        """The micro-batch's operators whose inputs are there, in program order.

        There may be none while it awaits its peers.
        """

    def execute(
        self, ops: Sequence[Op], replace_func: Fused | None = None, stream: str = ""
    ) -> None:
        """Run ready operators.

        The same operator of several micro-batches runs once, on all rows; different ones in order,
        or as one call of `replace_func`. stream: a GPU stream; empty: the caller's. Raises
        ValueError for an operator that is not ready, or was executed.
        """


class OverlapPolicy(Protocol):
    """An order of operators."""

    rules: Sequence[Rule]

    def key(self, inputs: Sequence[Any]) -> Hashable:
        """Key of the order, beside the batch size: `begin` follows a new one.

        inputs: tensors that have the batch, such as a cache.
        """
        return None

    def begin(self, ops: Ops) -> None:
        """Cut the batch, or leave it as it is: the default."""
        return

    def next_round(self, ops: Ops) -> None:
        """Execute some of the operators that are ready, until each was executed once.

        It may depend only on sizes, the key and what is ready: it is recorded once.
        """


@dataclass(frozen=True, slots=True)
class OrderedStep:
    """One call of `execute`."""

    ops: tuple[Op, ...]
    replace_func: Fused | None
    stream: str
    """GPU stream; empty: the caller's."""
    after: tuple[int, ...] = ()
    """Steps on other streams to wait for."""

    @property
    def is_merged(self) -> bool:
        """Whether one operator runs on the rows of several micro-batches at once."""
        numbers = {op.number for op in self.ops}
        return len(self.ops) > 1 and len(numbers) == 1 and self.replace_func is None


def order_of(
    tags: Sequence[str],
    before: Sequence[Collection[int]],
    sizes: tuple[int, ...],
    policy: OverlapPolicy,
) -> tuple[tuple[int, ...], list[OrderedStep]]:
    """Let a policy decide: the sizes of micro-batches, and the steps.

    tags, before: of each operator, and the operators that it comes after. sizes: of micro-batches
    as they are cut; a policy may cut anew. Raises ValueError for a wrong call, RuntimeError for a
    policy that never ends.
    """
    ops = RecordedOps(tags, before, sizes)
    policy.begin(ops)
    while not ops.is_finished:
        ops.count_call()
        policy.next_round(ops)
    return ops.sizes, list(ops.steps)


class RecordedOps(Ops):
    """Symbolic `ops.Ops` of one forward."""

    def __init__(
        self, tags: Sequence[str], before: Sequence[Collection[int]], sizes: tuple[int, ...]
    ) -> None:
        self._tags, self._before = tags, before
        self.sizes = sizes
        self.steps: list[OrderedStep] = []
        self._num_calls = 0
        self._followers: list[list[int]] = [[] for _ in tags]
        for number, earlier in enumerate(before):
            for each in earlier:
                self._followers[each].append(number)
        self._begin()

    @property
    def batch_size(self) -> int:
        return sum(self.sizes)

    @property
    def num_micro_batches(self) -> int:
        return len(self.sizes)

    @property
    def is_finished(self) -> bool:
        return not self._num_left

    def split(self, sizes: Sequence[int]) -> None:
        if self.steps:
            raise ValueError("split comes before the first execute")
        if sum(sizes) != self.batch_size or min(sizes, default=0) < 1:
            raise ValueError(
                f"micro-batches of {', '.join(map(str, sizes))} rows do not make a batch of "
                f"{self.batch_size}; each must have one row at least"
            )
        self.sizes = tuple(sizes)
        self._begin()

    def get_ready_ops(self, micro_batch: int) -> tuple[Op, ...]:
        self.count_call()
        return tuple(
            Op(number, self._tags[number], micro_batch)
            for number in sorted(self._ready[micro_batch])
        )

    def execute(
        self, ops: Sequence[Op], replace_func: Fused | None = None, stream: str = ""
    ) -> None:
        self.count_call()
        if not ops:
            return
        for place, op in enumerate(ops):
            if (op.micro_batch, op.number) in self._executed or op in ops[:place]:
                raise ValueError(f"{describe(self._tags, op)} was executed before")
            if op.number not in self._ready[op.micro_batch]:
                raise ValueError(f"{describe(self._tags, op)} is not ready")
        step = OrderedStep(tuple(ops), replace_func, stream)
        self.steps.append(replace(step, after=self._awaited(step)))
        for op in ops:
            self._ready[op.micro_batch].discard(op.number)
            self._executed[op.micro_batch, op.number] = len(self.steps) - 1
            missing = self._missing[op.micro_batch]
            for follower in self._followers[op.number]:
                missing[follower] -= 1
                if not missing[follower]:
                    self._ready[op.micro_batch].add(follower)
        self._num_left -= len(ops)

    def _awaited(self, step: OrderedStep) -> tuple[int, ...]:
        earlier = {
            self._executed[op.micro_batch, number]
            for op in step.ops
            for number in self._before[op.number]
        }
        last = {self.steps[each].stream: each for each in sorted(earlier)}
        last.pop(step.stream, None)
        return tuple(last.values())

    def _begin(self) -> None:
        missing = [len(earlier) for earlier in self._before]
        self._missing = [[*missing] for _ in self.sizes]
        """[micro-batch][operator] -> predecessors not executed yet."""
        ready = [number for number, count in enumerate(missing) if not count]
        self._ready = [{*ready} for _ in self.sizes]
        self._executed: dict[tuple[int, int], int] = {}
        """(micro-batch, operator) -> its step."""
        self._num_left = len(missing) * len(self.sizes)

    def count_call(self) -> None:
        """Count a call of the policy or by it. Raises RuntimeError if there are too many."""
        self._num_calls += 1
        most = _MAX_CALLS_EACH * (1 + len(self._tags)) * len(self.sizes)
        if self._num_calls > most:
            raise RuntimeError(
                f"the policy has made {most} calls and operators are left; it never ends"
            )


def describe(tags: Sequence[str], op: Op) -> str:
    """The operator's place, tag and micro-batch for error messages."""
    tag = tags[op.number]
    return f"operator {op.number}{f' ({tag})' if tag else ''} of micro-batch {op.micro_batch}"
