"""Record the order in which a policy executes a program's operators, without running them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from torch.utils._pytree import tree_leaves

from nanocp.overlap.engine.batch import Cut
from nanocp.overlap.engine.partition import Operator, Program, Value
from nanocp.overlap.ops import Fused, Op, Ops, OverlapPolicy

_MAX_CALLS_EACH = 100
"""Most calls of a policy per operator."""


class RecordedStep(NamedTuple):
    """One call of `execute`."""

    ops: tuple[Op, ...]
    replace_func: Fused | None
    alone: Operator | None
    """The operator, if it runs unchanged on one micro-batch."""
    freed: tuple[tuple[int, int], ...]
    """(micro-batch, value) not read after this step."""
    freed_merged: tuple[int, ...]
    stream: str
    """GPU stream; empty: the caller's."""
    after: tuple[int, ...]
    """Steps on other streams to wait for."""

    @property
    def is_merged(self) -> bool:
        """Whether one operator runs on the rows of several micro-batches at once."""
        numbers = {op.number for op in self.ops}
        return len(self.ops) > 1 and len(numbers) == 1 and self.replace_func is None


class Recording(NamedTuple):
    """A policy's order for a batch size."""

    sizes: tuple[int, ...]
    steps: tuple[RecordedStep, ...]
    merged: frozenset[int]
    """Values whose parts are written into one tensor from the start."""
    has_streams: bool


def record(program: Program, policy: OverlapPolicy, batch_size: int) -> Recording | None:
    """Let a policy decide; None if it neither splits the batch, nor replaces, nor has streams.

    Raises ValueError for a wrong call, RuntimeError for a policy that leaves out an operator or
    never ends.
    """
    ops = RecordedOps(program, batch_size)
    policy.schedule(ops)
    return ops.recording()


class RecordedOps(Ops):
    """Symbolic `ops.Ops` of one forward."""

    def __init__(self, program: Program, batch_size: int) -> None:
        self._program = program
        self._batch_size = batch_size
        self._sizes: tuple[int, ...] = (batch_size,)
        self._steps: list[RecordedStep] = []
        self._num_calls = 0
        made_by = {v: n for n, each in enumerate(program.operators) for v in each.outputs}
        self._before = [
            {*each.after, *(made_by[value] for value in each.inputs if value in made_by)}
            for each in program.operators
        ]
        self._followers: list[list[int]] = [[] for _ in program.operators]
        for number, earlier in enumerate(self._before):
            for each in earlier:
                self._followers[each].append(number)
        self._begin()

    @property
    def batch_size(self) -> int:
        return self._batch_size

    @property
    def is_finished(self) -> bool:
        return not self._num_left

    def split(self, sizes: Sequence[int]) -> None:
        if self._steps:
            raise ValueError("split comes before the first execute")
        if sum(sizes) != self._batch_size or min(sizes, default=0) < 1:
            raise ValueError(
                f"micro-batches of {', '.join(map(str, sizes))} rows do not make a batch of "
                f"{self._batch_size}; each must have one row at least"
            )
        self._sizes = tuple(sizes)
        self._begin()

    def get_ready_ops(self, micro_batch: int) -> tuple[Op, ...]:
        self._count_call()
        operators = self._program.operators
        return tuple(
            Op(number, operators[number].tag, micro_batch)
            for number in sorted(self._ready[micro_batch])
        )

    def execute(
        self, ops: Sequence[Op], replace_func: Fused | None = None, stream: str = ""
    ) -> None:
        self._count_call()
        if not ops:
            return
        for place, op in enumerate(ops):
            if op.number in self._executed[op.micro_batch] or op in ops[:place]:
                raise ValueError(f"{describe(self._program, op)} was executed before")
            if op.number not in self._ready[op.micro_batch]:
                raise ValueError(f"{describe(self._program, op)} is not ready")
        self._steps.append(RecordedStep(tuple(ops), replace_func, None, (), (), stream, ()))
        for op in ops:
            self._ready[op.micro_batch].discard(op.number)
            self._executed[op.micro_batch].add(op.number)
            missing = self._missing[op.micro_batch]
            for follower in self._followers[op.number]:
                missing[follower] -= 1
                if not missing[follower]:
                    self._ready[op.micro_batch].add(follower)
        self._num_left -= len(ops)

    def recording(self) -> Recording | None:
        """The finished recording."""
        operators = self._program.operators
        for micro_batch, executed in enumerate(self._executed):
            for number in range(len(operators)):
                if number not in executed:
                    op = Op(number, operators[number].tag, micro_batch)
                    raise RuntimeError(f"the policy has not executed {describe(self._program, op)}")
        has_streams = any(step.stream for step in self._steps)
        is_plain = not has_streams and all(step.replace_func is None for step in self._steps)
        if len(self._sizes) == 1 and is_plain:
            return None
        merged = frozenset(self._merge_points())
        return Recording(self._sizes, tuple(self._complete(merged)), merged, has_streams)

    def _complete(self, merged: frozenset[int]) -> Iterator[RecordedStep]:
        """The steps, with the values that each of them frees."""
        program = self._program
        last: dict[tuple[int, int], int] = {}
        for place, step in enumerate(self._steps):
            for op in step.ops:
                operator = program.operators[op.number]
                for value in (*operator.inputs, *operator.outputs):
                    last[op.micro_batch, value] = place
        leaves = tree_leaves(program.outputs)
        kept = {each.number for each in leaves if isinstance(each, Value)} | program.mutated
        freed: list[list[tuple[int, int]]] = [[] for _ in self._steps]
        last_part: dict[int, int] = {}
        for (micro_batch, value), place in last.items():
            if value not in kept:
                freed[place].append((micro_batch, value))
                if value in merged:
                    last_part[value] = max(place, last_part.get(value, 0))
        after = self._after()
        for place, step in enumerate(self._steps):
            alone = program.operators[step.ops[0].number]
            is_plain = len(step.ops) == 1 and step.replace_func is None
            yield step._replace(
                alone=alone if is_plain and merged.isdisjoint(alone.outputs) else None,
                freed=tuple(freed[place]),
                freed_merged=tuple(value for value, end in last_part.items() if end == place),
                after=after[place],
            )

    def _after(self) -> list[tuple[int, ...]]:
        """For each step, the last one of each other stream to wait for."""
        executed: dict[tuple[int, int], int] = {}
        after = []
        for place, step in enumerate(self._steps):
            earlier = {
                executed[op.micro_batch, n] for op in step.ops for n in self._before[op.number]
            }
            last = {self._steps[each].stream: each for each in sorted(earlier)}
            last.pop(step.stream, None)
            after.append(tuple(last.values()))
            executed.update({(op.micro_batch, op.number): place for op in step.ops})
        return after

    def _merge_points(self) -> Iterator[int]:
        program = self._program
        read = [
            program.operators[step.ops[0].number].inputs for step in self._steps if step.is_merged
        ]
        leaves = tree_leaves(program.outputs)
        returned = [each.number for each in leaves if isinstance(each, Value)]
        for number in {*chain.from_iterable(read), *returned}:
            kind = program.kinds[number]
            if isinstance(kind, Cut) and kind.dim == 0 and number >= program.num_inputs:
                yield number

    def _begin(self) -> None:
        """Reset: operators without predecessors are ready."""
        missing = [len(earlier) for earlier in self._before]
        self._missing = [[*missing] for _ in self._sizes]
        """[micro-batch][operator] -> predecessors not executed yet."""
        ready = [number for number, count in enumerate(missing) if not count]
        self._ready = [{*ready} for _ in self._sizes]
        self._executed: list[set[int]] = [set() for _ in self._sizes]
        self._num_left = len(missing) * len(self._sizes)

    def _count_call(self) -> None:
        self._num_calls += 1
        most = _MAX_CALLS_EACH * (1 + len(self._program.operators)) * len(self._sizes)
        if self._num_calls > most:
            raise RuntimeError(
                f"the policy has made {most} calls and operators are left; it never ends"
            )


def describe(program: Program, op: Op) -> str:
    """The operator's place, tag and micro-batch for error messages."""
    tag = program.operators[op.number].tag
    return f"operator {op.number}{f' ({tag})' if tag else ''} of micro-batch {op.micro_batch}"
