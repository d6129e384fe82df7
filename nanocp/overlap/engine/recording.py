"""A policy's order of a traced program's operators, with what each step frees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from torch.utils._pytree import tree_leaves

from nanocp.overlap.engine.batch import Cut
from nanocp.overlap.engine.partition import Operator, Program, Value
from nanocp.overlap.ops import OrderedStep, OverlapPolicy, order_of


@dataclass(frozen=True, slots=True)
class RecordedStep(OrderedStep):
    """A step, and what the engine looks up once."""

    alone: Operator | None = None
    """The operator, if it runs unchanged on one micro-batch."""
    freed: tuple[tuple[int, int], ...] = ()
    """(micro-batch, value) not read after this step."""
    freed_merged: tuple[int, ...] = ()


class Recording(NamedTuple):
    """A policy's order for a batch size."""

    sizes: tuple[int, ...]
    steps: tuple[RecordedStep, ...]
    merged: frozenset[int]
    """Values whose parts are written into one tensor from the start."""
    has_streams: bool


def record(program: Program, policy: OverlapPolicy, batch_size: int) -> Recording | None:
    """Let a policy decide; None if it neither splits the batch, nor replaces, nor has streams.

    Raises as order_of.
    """
    made_by = {v: n for n, each in enumerate(program.operators) for v in each.outputs}
    before = [
        {*each.after, *(made_by[value] for value in each.inputs if value in made_by)}
        for each in program.operators
    ]
    sizes, steps = order_of(program.tags, before, (batch_size,), policy)
    has_streams = any(step.stream for step in steps)
    is_plain = not has_streams and all(step.replace_func is None for step in steps)
    if len(sizes) == 1 and is_plain:
        return None
    merged = frozenset(_merge_points(program, steps))
    return Recording(sizes, tuple(_complete(program, steps, merged)), merged, has_streams)


def _complete(
    program: Program, steps: Sequence[OrderedStep], merged: frozenset[int]
) -> Iterator[RecordedStep]:
    last: dict[tuple[int, int], int] = {}
    for place, step in enumerate(steps):
        for op in step.ops:
            operator = program.operators[op.number]
            for value in (*operator.inputs, *operator.outputs):
                last[op.micro_batch, value] = place
    leaves = tree_leaves(program.outputs)
    kept = {each.number for each in leaves if isinstance(each, Value)} | program.mutated
    freed: list[list[tuple[int, int]]] = [[] for _ in steps]
    last_part: dict[int, int] = {}
    for (micro_batch, value), place in last.items():
        if value not in kept:
            freed[place].append((micro_batch, value))
            if value in merged:
                last_part[value] = max(place, last_part.get(value, 0))
    for place, step in enumerate(steps):
        alone = program.operators[step.ops[0].number]
        is_plain = len(step.ops) == 1 and step.replace_func is None
        yield RecordedStep(
            step.ops,
            step.replace_func,
            step.stream,
            step.after,
            alone=alone if is_plain and merged.isdisjoint(alone.outputs) else None,
            freed=tuple(freed[place]),
            freed_merged=tuple(value for value, end in last_part.items() if end == place),
        )


def _merge_points(program: Program, steps: Sequence[OrderedStep]) -> Iterator[int]:
    read = [program.operators[step.ops[0].number].inputs for step in steps if step.is_merged]
    leaves = tree_leaves(program.outputs)
    returned = [each.number for each in leaves if isinstance(each, Value)]
    for number in {*chain.from_iterable(read), *returned}:
        kind = program.kinds[number]
        if isinstance(kind, Cut) and kind.dim == 0 and number >= program.num_inputs:
            yield number
