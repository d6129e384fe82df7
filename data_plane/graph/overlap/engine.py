"""Run a program's operators in the order of a policy (DynaFlow, 3.3).

Enters: a program, a policy, what the model is called with. Leaves: what the model returns. Does not
know: how a model was traced or cut.

A policy's calls are recorded at the first forward of a batch size and repeated at later ones. What
no operator needs any more is freed at once. `num_copied_bytes` counts what merging has copied.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from data_plane.graph.overlap.merge import Writers, joined
from data_plane.graph.overlap.partition import Cut, Program, Size, Value
from nanocp.overlap.ops import Fused, Op, OverlapPolicy

logger = logging.getLogger(__name__)

_TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 3e-2,
}
"""Largest difference that is rounding, as a share of the largest value; others must be equal."""
_MAX_CALLS_EACH = 100
"""Calls of a policy for each operator, at most: one that waits for what never comes ends."""


class Issue(NamedTuple):
    """One call of `execute`."""

    ops: tuple[Op, ...]
    replace_func: Fused | None


class Recording(NamedTuple):
    """What a policy did with a batch size."""

    sizes: tuple[int, ...]
    issues: tuple[Issue, ...]
    merged: frozenset[int]
    """Values whose parts are needed as one tensor: they are written into one from the start."""


class OverlapEngine:
    """Runs one program under one policy."""

    def __init__(self, program: Program, policy: OverlapPolicy, whole: Callable[..., Any]) -> None:
        """whole: the model in program order, for batches that the policy does not split."""
        self.recordings: dict[int, Recording | None] = {}
        """By batch size; None: program order on the whole batch, nothing is fused."""
        self.num_copied_bytes = 0
        self.program = program
        self._policy = policy
        self._whole = whole
        self._writers = Writers(program)

    def __call__(self, *inputs: Any) -> Any:
        """One forward."""
        batch_size = self._batch_size(inputs)
        if batch_size not in self.recordings:
            return self._record(inputs, batch_size)
        recording = self.recordings[batch_size]
        if recording is None:
            return self._whole(*inputs)
        forward = Forward(self.program, inputs, batch_size, recording.merged, self._writers)
        return self._run(forward, recording)

    def _record(self, inputs: Sequence[Any], batch_size: int) -> Any:
        """The first forward of a batch size: let the policy decide, and check its result.

        Rows of a batch may depend on each other where no shape shows it. So what is split or fused
        also runs whole; if the results differ, this batch size always does.
        """
        planned = Forward(self.program, inputs, batch_size, runs=False)
        self._policy.schedule(planned)
        recording = planned.recording()
        result, copies, written = None, list(inputs), self.program.written
        if recording is not None:
            copies = [each.clone() if n in written else each for n, each in enumerate(inputs)]
            result = self._run(Forward(self.program, copies, batch_size), recording)
        expected = self._whole(*inputs)
        if recording is not None:
            mine = (result, [copies[number] for number in sorted(written)])
            whole = (expected, [inputs[number] for number in sorted(written)])
            if reason := difference(mine, whole):
                logger.warning(
                    "a batch of %d rows runs in program order: with the policy, %s",
                    batch_size,
                    reason,
                )
                recording = None
        self.recordings[batch_size] = recording
        return expected

    def _run(self, forward: Forward, recording: Recording) -> Any:
        if len(recording.sizes) > 1:
            forward.split(recording.sizes)
        for issue in recording.issues:
            forward.run(issue)
        result = forward.result()
        self.num_copied_bytes += forward.num_copied_bytes
        return result

    def _batch_size(self, inputs: Sequence[Any]) -> int:
        number, cut = self.program.batch
        return int(inputs[number].shape[cut.dim]) // cut.rows_each


class Forward:
    """One forward: values of each micro-batch, and which operators have run. See `ops.Ops`."""

    def __init__(
        self,
        program: Program,
        inputs: Sequence[Any],
        batch_size: int,
        merged: Set[int] = frozenset(),
        writers: Writers | None = None,
        runs: bool = True,
    ) -> None:
        """runs: False to learn only what a policy does; then no operator is called."""
        self._runs = runs
        self.num_copied_bytes = 0
        self._merged = merged
        self._writers = writers
        self._buffers: dict[int, torch.Tensor] = {}
        """Merged value -> its tensor for the whole batch."""
        self._program = program
        self._inputs = inputs
        self._batch_size = batch_size
        self._sizes: tuple[int, ...] = (batch_size,)
        self._issues: list[Issue] = []
        self._num_calls = 0
        self._begin()

    @property
    def batch_size(self) -> int:
        """Rows of the whole batch."""
        return self._batch_size

    @property
    def is_finished(self) -> bool:
        """Whether every operator of every micro-batch has been executed."""
        return not any(self._left)

    def split(self, sizes: Sequence[int]) -> None:
        """See ops.Ops.split."""
        if self._issues:
            raise ValueError("split comes before the first execute")
        if sum(sizes) != self._batch_size or min(sizes, default=0) < 1:
            raise ValueError(
                f"micro-batches of {', '.join(map(str, sizes))} rows do not make a batch of "
                f"{self._batch_size}; each must have one row at least"
            )
        self._sizes = tuple(sizes)
        self._begin()

    def get_ready_ops(self, micro_batch: int) -> tuple[Op, ...]:
        """See ops.Ops.get_ready_ops."""
        self._count_call()
        return tuple(
            Op(number, self._program.operators[number].tag, micro_batch)
            for number in sorted(self._left[micro_batch])
            if self._is_ready(number, micro_batch)
        )

    def execute(self, ops: Sequence[Op], replace_func: Fused | None = None) -> None:
        """See ops.Ops.execute."""
        self._count_call()
        if not ops:
            return
        seen = set()
        for op in ops:
            if op.number not in self._left[op.micro_batch] or op in seen:
                raise ValueError(f"{self._describe(op)} was executed before")
            if not self._is_ready(op.number, op.micro_batch):
                raise ValueError(f"{self._describe(op)} is not ready")
            seen.add(op)
        issue = Issue(tuple(ops), replace_func)
        self._issues.append(issue)
        if self._runs:
            self.run(issue)
            return
        for op in ops:
            for number in self._program.operators[op.number].outputs:
                self._is_made[op.micro_batch][number] = True
            self._left[op.micro_batch].discard(op.number)

    def run(self, issue: Issue) -> None:
        """Execute what is known to be ready."""
        ops, fused = issue
        try:
            if fused is not None:
                made = fused(*(self._read(op) for op in ops))
                for op, outputs in zip(ops, made, strict=True):
                    self._keep(op, outputs)
            elif _is_merged(issue):
                self._run_merged(ops)
            else:
                for op in ops:
                    self._keep(op, self._call_part(op))
        except Exception as error:
            error.add_note("in " + ", ".join(map(self._describe, ops)))
            raise

    def recording(self) -> Recording | None:
        """What the policy did. Raises RuntimeError if it has left out an operator."""
        for micro_batch, left in enumerate(self._left):
            for number in sorted(left):
                op = Op(number, self._program.operators[number].tag, micro_batch)
                raise RuntimeError(f"the policy has not executed {self._describe(op)}")
        if len(self._sizes) == 1 and all(issue.replace_func is None for issue in self._issues):
            return None
        return Recording(self._sizes, tuple(self._issues), frozenset(self._merge_points()))

    def _merge_points(self) -> Iterator[int]:
        """Values that an operator made for each micro-batch, and that are read as one."""
        program = self._program
        read = [
            program.operators[issue.ops[0].number].inputs
            for issue in self._issues
            if _is_merged(issue)
        ]
        leaves = tree_leaves(program.outputs)
        returned = [each.number for each in leaves if isinstance(each, Value)]
        for number in {*chain.from_iterable(read), *returned}:
            kind = program.kinds[number]
            if isinstance(kind, Cut) and kind.dim == 0 and number >= program.num_inputs:
                yield number

    def result(self) -> Any:
        """What the model returns, of the whole batch."""
        for number in self._program.mutated:
            self._inputs[number].copy_(self._values[0][number])

        def whole(each: Any) -> Any:
            if not isinstance(each, Value):
                return each
            parts = [values[each.number] for values in self._values]
            return self._together(each.number, parts, self._batch_size)

        return torch.fx.node.map_aggregate(self._program.outputs, whole)

    # --- values

    def _begin(self) -> None:
        """Give every micro-batch its part of the inputs, and count the uses of every value."""
        program = self._program
        self._left = [set(range(len(program.operators))) for _ in self._sizes]
        uses = [0] * len(program.kinds)
        for each in program.operators:
            for number in each.inputs:
                uses[number] += 1
        for each in tree_leaves(program.outputs):
            if isinstance(each, Value):
                uses[each.number] += 1
        for number in program.mutated:
            uses[number] += 1
        self._uses = [list(uses) for _ in self._sizes]
        self._values: list[list[Any]] = []
        begin = 0
        for size in self._sizes:
            values: list[Any] = [None] * len(program.kinds)
            for number in range(program.num_inputs):
                values[number] = self._part(number, self._inputs[number], begin, size)
            self._values.append(values)
            begin += size
        self._is_made = [
            [n < program.num_inputs for n in range(len(program.kinds))] for _ in self._sizes
        ]

    def _part(self, number: int, value: Any, begin: int, size: int) -> Any:
        """A micro-batch's part of a value of more rows: a view, but for what it writes to."""
        kind = self._program.kinds[number]
        if isinstance(kind, Size):
            return kind.of(size)
        if isinstance(kind, Cut):
            rows = kind.rows_each
            return value.narrow(kind.dim, begin * rows, size * rows)
        if number in self._program.mutated:
            return value.clone()
        return value

    def _together(self, number: int, parts: Sequence[Any], size: int) -> Any:
        """A value of `size` rows, from its parts: a tensor is copied unless they are neighbours."""
        kind = self._program.kinds[number]
        if isinstance(kind, Size):
            return kind.of(size)
        if not isinstance(kind, Cut) or len(parts) == 1:
            return parts[0]
        if (whole := joined(parts, kind.dim)) is not None:
            return whole
        whole = torch.cat(list(parts), kind.dim)
        self.num_copied_bytes += whole.nbytes
        return whole

    def _read(self, op: Op) -> tuple[Any, ...]:
        values = self._values[op.micro_batch]
        return tuple(values[number] for number in self._program.operators[op.number].inputs)

    def _call(self, number: int, inputs: Sequence[Any]) -> Sequence[Any]:
        operator = self._program.operators[number]
        made = operator.module(*inputs)
        return made if operator.is_tuple else (made,)

    def _call_part(self, op: Op) -> Sequence[Any]:
        """Run an operator on one micro-batch; merged outputs go into their tensor."""
        operator, inputs = self._program.operators[op.number], self._read(op)
        if self._writers is None or self._merged.isdisjoint(operator.outputs):
            return self._call(op.number, inputs)
        found = self._writers.of(op.number, self._merged)
        if found is not None:
            made = found[1](*inputs, partial(self._place, operator.outputs[found[0]], op))
            return made if operator.is_tuple else (made,)
        outputs = list(self._call(op.number, inputs))
        for place, number in enumerate(operator.outputs):
            if number in self._merged:
                self._place(number, op, outputs[place].shape, outputs[place]).copy_(outputs[place])
                self.num_copied_bytes += outputs[place].nbytes
                outputs[place] = self._place(number, op, outputs[place].shape, outputs[place])
        return outputs

    def _place(self, number: int, op: Op, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """The micro-batch's part of the tensor that holds a merged value of the whole batch."""
        kind = self._program.kinds[number]
        assert isinstance(kind, Cut)
        if number not in self._buffers:
            self._buffers[number] = like.new_empty((self._batch_size * kind.rows_each, *shape[1:]))
        begin = sum(self._sizes[: op.micro_batch]) * kind.rows_each
        return self._buffers[number].narrow(0, begin, shape[0])

    def _keep(self, op: Op, outputs: Sequence[Any]) -> None:
        """Take an operator's outputs, and free what nothing needs any more."""
        operator = self._program.operators[op.number]
        values, uses = self._values[op.micro_batch], self._uses[op.micro_batch]
        for number, output in zip(operator.outputs, outputs, strict=False):
            values[number] = output if uses[number] else None
            self._is_made[op.micro_batch][number] = True
        for number in operator.inputs:
            uses[number] -= 1
            if not uses[number]:
                values[number] = None
        self._left[op.micro_batch].discard(op.number)

    def _run_merged(self, ops: Sequence[Op]) -> None:
        """Run the same operator of neighbouring micro-batches once, on all of their rows."""
        ops = sorted(ops, key=lambda op: op.micro_batch)
        number, sizes = ops[0].number, [self._sizes[op.micro_batch] for op in ops]
        operator = self._program.operators[number]
        columns = zip(*(self._read(op) for op in ops), strict=True)
        made = self._call(
            number,
            [
                self._together(value, column, sum(sizes))
                for value, column in zip(operator.inputs, columns, strict=True)
            ],
        )
        begin = 0
        for op, size in zip(ops, sizes, strict=True):
            outputs = zip(operator.outputs, made, strict=False)
            self._keep(op, [self._part(value, whole, begin, size) for value, whole in outputs])
            begin += size

    # --- checks

    def _is_ready(self, number: int, micro_batch: int) -> bool:
        made = self._is_made[micro_batch]
        return all(made[value] for value in self._program.operators[number].inputs)

    def _count_call(self) -> None:
        self._num_calls += 1
        most = _MAX_CALLS_EACH * (1 + len(self._program.operators)) * len(self._sizes)
        if self._num_calls > most:
            raise RuntimeError(
                f"the policy has made {most} calls and operators are left; it never ends"
            )

    def _describe(self, op: Op) -> str:
        tag = f" ({op.tag})" if op.tag else ""
        return f"operator {op.number}{tag} of micro-batch {op.micro_batch}"


def difference(result: Any, expected: Any) -> str:
    """A sentence about the first tensor that differs by more than rounding; empty if none does."""
    pairs = zip(tree_leaves(result), tree_leaves(expected), strict=True)
    for place, (one, other) in enumerate(pairs):
        if not isinstance(other, torch.Tensor):
            if one != other:
                return f"output {place} is {one}, not {other}"
            continue
        if one.shape != other.shape:
            return f"output {place} has shape {tuple(one.shape)}, not {tuple(other.shape)}"
        scale = float(other.abs().max()) if other.numel() else 0.0
        apart = float((one.double() - other.double()).abs().max()) if other.numel() else 0.0
        if not apart <= _TOLERANCES.get(other.dtype, 0.0) * scale:
            return f"output {place} differs by {apart:.2g}, where the largest value is {scale:.2g}"
    return ""


def _is_merged(issue: Issue) -> bool:
    """Whether it runs one operator on the rows of several micro-batches at once."""
    numbers = {op.number for op in issue.ops}
    return len(issue.ops) > 1 and len(numbers) == 1 and issue.replace_func is None
