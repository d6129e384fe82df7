"""Operations of one layer, and their nano-operations (NanoFlow, 3.7 and 4.1.2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple


@dataclass(frozen=True)
class Operation:
    """An operation of every layer, on the whole batch."""

    name: str
    resource: str
    """Bottleneck: compute, memory or network."""
    us: float
    """On the whole batch, alone on the GPU."""
    fixed_us: float
    """Time that every nano-operation repeats."""
    needs: tuple[str, ...] = ()
    """Inputs from the same layer."""
    needs_before: tuple[str, ...] = ()
    """Inputs from the layer before."""


def without_empty(operations: Sequence[Operation]) -> tuple[Operation, ...]:
    """Operations of nonzero time; dependencies pass through removed ones."""
    named = {operation.name: operation for operation in operations}

    def present(names: Sequence[str]) -> Iterator[str]:
        for name in names:
            yield from (name,) if named[name].us else present(named[name].needs)

    return tuple(
        replace(
            operation,
            needs=tuple(dict.fromkeys(present(operation.needs))),
            needs_before=tuple(dict.fromkeys(present(operation.needs_before))),
        )
        for operation in operations
        if operation.us
    )


class NanoOperation(NamedTuple):
    """An operation on a part of the batch."""

    operation: Operation
    begin: float
    """Start of its part of the batch, 0 to 1."""
    end: float

    @property
    def us(self) -> float:
        """Microseconds alone on the GPU."""
        whole = self.operation
        return whole.fixed_us + (whole.us - whole.fixed_us) * (self.end - self.begin)

    def shares_rows_with(self, other: NanoOperation) -> bool:
        """Whether the ranges of the batch intersect."""
        return self.begin < other.end and other.begin < self.end


def cut(
    operations: Sequence[Operation], cuts: Mapping[str, Sequence[float]], default: Sequence[float]
) -> tuple[NanoOperation, ...]:
    """Cut each operation at its `cuts`, or at the default ones."""
    return tuple(
        NanoOperation(operation, begin, end)
        for operation in operations
        for begin, end in pairwise((0.0, *cuts.get(operation.name, default), 1.0))
    )


class Wait(NamedTuple):
    """`later` starts after `earlier` has ended; both are indices."""

    earlier: int
    later: int
    is_of_layer_before: bool
    """`earlier` belongs to the layer before."""


def waits(nano: Sequence[NanoOperation]) -> list[Wait]:
    """Dependencies: operations depend, and rows intersect."""
    found = []
    for later, one in enumerate(nano):
        for earlier, other in enumerate(nano):
            if one.shares_rows_with(other):
                if other.operation.name in one.operation.needs:
                    found.append(Wait(earlier, later, False))
                if other.operation.name in one.operation.needs_before:
                    found.append(Wait(earlier, later, True))
    return found
