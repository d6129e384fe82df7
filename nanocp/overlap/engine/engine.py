"""Run a program's operators in the order of a policy (DynaFlow, 3.3)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from nanocp.overlap.engine.batch import Cut, Size
from nanocp.overlap.engine.comparison import altered, difference
from nanocp.overlap.engine.merge import Writers, joined
from nanocp.overlap.engine.partition import Program, Value
from nanocp.overlap.engine.recording import RecordedStep, Recording, record
from nanocp.overlap.engine.streams import CudaStreams, launched, streams_of
from nanocp.overlap.ops import Op, OverlapPolicy, describe

logger = logging.getLogger(__name__)


class OverlapEngine:
    """Runs one program under one policy.

    The policy's calls are recorded once per batch size and key, then repeated.
    """

    def __init__(self, program: Program, policy: OverlapPolicy, whole: Callable[..., Any]) -> None:
        """whole: the model in program order."""
        self.recordings: dict[tuple[int, Hashable], Recording | None] = {}
        """By batch size and the policy's key; None: program order."""
        self.num_copied_bytes = 0
        self.program = program
        self._batch, *self._others = program.batch
        self._policy = policy
        self._whole = whole
        self._writers = Writers(program)
        self._streams_of = streams_of
        self._streams: CudaStreams | None = None
        self._has_warned = False

    def __call__(self, *inputs: Any) -> Any:
        number, cut = self._batch
        batch_size = inputs[number].shape[cut.dim] // cut.rows_each
        for number, cut in self._others:
            if inputs[number].shape[cut.dim] != batch_size * cut.rows_each:
                return self._run_whole(inputs)
        key = batch_size, self._policy.key([inputs[number] for number, _ in self.program.batch])
        if key not in self.recordings:
            self.recordings[key] = self._record(inputs, batch_size)
            return self._whole(*inputs)
        recording = self.recordings[key]
        if recording is None:
            return self._whole(*inputs)
        return self._run(inputs, recording)

    def _run_whole(self, inputs: Sequence[Any]) -> Any:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "a batch runs in program order: its inputs have different numbers of rows"
            )
        return self._whole(*inputs)

    def _record(self, inputs: Sequence[Any], batch_size: int) -> Recording | None:
        """Record the policy; None if its results differ from the whole batch's."""
        recording = record(self.program, self._policy, batch_size)
        if recording is None:
            return None
        if not (reason := self._reason(inputs, recording)):
            return recording
        logger.warning(
            "a batch of %d rows runs in program order: with the policy, %s", batch_size, reason
        )
        return None

    def _reason(self, inputs: Sequence[Any], recording: Recording) -> str:
        """A sentence about the recording's error; empty if right."""
        program = self.program

        def copied(number: int, value: Any) -> Any:
            kind = program.kinds[number]
            if isinstance(kind, Cut):
                return altered(value, kind, sum(recording.sizes))
            return value.clone() if number in program.written else value

        with torch.random.fork_rng(devices=()):
            mine = [copied(number, value) for number, value in enumerate(inputs)]
        whole = [each.clone() if n in program.written else each for n, each in enumerate(mine)]
        try:
            result = self._run(mine, recording)
        except Exception as error:
            if any(step.replace_func for step in recording.steps):
                raise
            return f"{' '.join(error.__notes__)}: {error}"
        expected = self._whole(*whole)
        written = sorted(program.written)
        return difference(
            (result, [mine[n] for n in written]), (expected, [whole[n] for n in written])
        )

    def _run(self, inputs: Sequence[Any], recording: Recording) -> Any:
        forward = Forward(self.program, inputs, recording, self._writers)
        if recording.has_streams and self._streams is None:
            self._streams = self._streams_of(inputs)
        if recording.has_streams and self._streams is not None:
            result = forward.run_on(self._streams)
        else:
            result = forward.run()
        self.num_copied_bytes += forward.num_copied_bytes
        return result


class Forward:
    """One forward by a recording: the values of each micro-batch."""

    def __init__(
        self, program: Program, inputs: Sequence[Any], recording: Recording, writers: Writers
    ) -> None:
        """Give every micro-batch its part of the inputs."""
        self.num_copied_bytes = 0
        self._program = program
        self._inputs = inputs
        self._recording = recording
        self._writers = writers
        self._merged_tensors: dict[int, torch.Tensor] = {}
        self._values: list[list[Any]] = []
        begin = 0
        for size in recording.sizes:
            values: list[Any] = [None] * len(program.kinds)
            for number in range(program.num_inputs):
                values[number] = self._part(number, inputs[number], begin, size)
            self._values.append(values)
            begin += size

    def run(self) -> Any:
        """Run every step; returns the model's output of the whole batch."""
        values_of = self._values
        for step in self._recording.steps:
            try:
                operator = step.alone
                if operator is None:
                    self._run_step(step)
                else:
                    # The engine's own time is spent here: nothing is looked up twice.
                    values = values_of[step.ops[0].micro_batch]
                    made = operator.module.forward(*[values[n] for n in operator.inputs])
                    if operator.is_tuple:
                        for number, output in zip(operator.outputs, made, strict=True):
                            values[number] = output
                    else:
                        values[operator.outputs[0]] = made
            except Exception as error:
                self._name(error, step)
                raise
            self._free(step)
        return self._result()

    def run_on(self, streams: CudaStreams) -> Any:
        """Launch every step on its stream, see `run`."""

        def run(step: RecordedStep) -> None:
            if step.after or step.stream:
                streams.use([each for op in step.ops for each in self._read(op)])
            try:
                self._run_step(step)
            except Exception as error:
                self._name(error, step)
                raise
            self._free(step)

        for _ in launched(self._recording.steps, streams, run):
            pass
        streams.use(tree_leaves([*self._values, *self._merged_tensors.values()]))
        return self._result()

    def _name(self, error: Exception, step: RecordedStep) -> None:
        error.add_note("in " + ", ".join(describe(self._program.tags, op) for op in step.ops))

    def _free(self, step: RecordedStep) -> None:
        for micro_batch, number in step.freed:
            self._values[micro_batch][number] = None
        for number in step.freed_merged:
            self._merged_tensors.pop(number, None)

    def _run_step(self, step: RecordedStep) -> None:
        """Run operators that are merged, replaced, or write to a place."""
        if step.replace_func is not None:
            made = step.replace_func(*(self._read(op) for op in step.ops))
            for op, outputs in zip(step.ops, made, strict=True):
                self._keep(op, outputs)
        elif step.is_merged:
            self._run_merged(step.ops)
        else:
            for op in step.ops:
                self._keep(op, self._call_part(op))

    def _result(self) -> Any:
        for number in self._program.mutated:
            self._inputs[number].copy_(self._values[0][number])

        def whole(each: Any) -> Any:
            if not isinstance(each, Value):
                return each
            parts = [values[each.number] for values in self._values]
            return self._together(each.number, parts, sum(self._recording.sizes))

        return torch.fx.node.map_aggregate(self._program.outputs, whole)

    def _part(self, number: int, value: Any, begin: int, size: int) -> Any:
        """A micro-batch's part: a view, or a copy if it is written."""
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
        """A value of `size` rows, copied unless its parts are neighbours."""
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
        operator, inputs = self._program.operators[op.number], self._read(op)
        merged = self._recording.merged
        found, written = self._writers.of(op.number, merged), None
        # Operators with `out=` know no autocast.
        if found is None or torch._C._is_any_autocast_enabled():
            outputs = list(self._call(op.number, inputs))
        else:
            written, module = found
            made = module(*inputs, partial(self._place, operator.outputs[written], op))
            outputs = list(made) if operator.is_tuple else [made]
        for place, number in enumerate(operator.outputs):
            if number in merged and place != written:
                made = outputs[place]
                outputs[place] = self._place(number, op, made.shape, made).copy_(made)
                self.num_copied_bytes += made.nbytes
        return outputs

    def _place(self, number: int, op: Op, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        kind = self._program.kinds[number]
        assert isinstance(kind, Cut)
        sizes = self._recording.sizes
        if number not in self._merged_tensors:
            num_rows = sum(sizes) * kind.rows_each
            self._merged_tensors[number] = like.new_empty((num_rows, *shape[1:]))
        begin = sum(sizes[: op.micro_batch]) * kind.rows_each
        return self._merged_tensors[number].narrow(0, begin, shape[0])

    def _keep(self, op: Op, outputs: Sequence[Any]) -> None:
        values = self._values[op.micro_batch]
        for number, output in zip(
            self._program.operators[op.number].outputs, outputs, strict=False
        ):
            values[number] = output

    def _run_merged(self, ops: Sequence[Op]) -> None:
        ops = sorted(ops, key=lambda op: op.micro_batch)
        number, sizes = ops[0].number, [self._recording.sizes[op.micro_batch] for op in ops]
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
