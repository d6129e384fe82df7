"""NanoFlow's auto-search (4.1): a periodic schedule, and its lower bound.

Stage I finds an order by integer programs, stage II divides the GPU, then sizes move; the best of
several wins.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations, pairwise, product
from typing import Any, NamedTuple

import highspy

from nanocp.overlap.interference import COMPUTE, GRID, MEMORY, NETWORK, RESOURCES, Interference
from nanocp.overlap.operations import NanoOperation, Operation, cut, waits
from nanocp.overlap.schedule import Schedule, Slot, violations

_MAX_LAYERS_APART = 3
"""Most neighbouring layers in one period."""
_SOLVE_S = 8.0
_STRETCHES = tuple(product((2.0, 1.0, 1.2, 1.5), (1.0, 1.3)))
"""Slowdowns of (network-bound, memory-bound) operations in stage I."""
_SLACKS = (1.0, 1.05, 1.12, 1.2)
"""Periods that stage I tries, over the busiest resource's time."""
_NEAR = 1.02
"""Others than equal sizes are tried within this much of the best."""


@dataclass(frozen=True)
class BestSchedule:
    """The result of a search, of a layer."""

    fluid_us: float
    """Lower bound of schedules of halves."""
    schedule: Schedule
    structure_us: float
    """Stage I's period."""
    sequential_us: float

    @property
    def gain(self) -> float:
        """Speed-up over operations in sequence."""
        return self.sequential_us / self.schedule.period_us


def search(
    forms: Sequence[Sequence[Operation]],
    step: float,
    interference: Interference,
    limit_s: float = 60.0,
    report: Callable[[BestSchedule], None] = lambda found: None,
) -> BestSchedule:
    """Search for about `limit_s` seconds of processor time; `report` gets each better schedule.

    forms: a layer, by form of its collectives. step: share of the batch that sizes are multiples
    of. Falls back to the sequence of whole operations.
    """
    until_s = time.process_time() + limit_s
    sequential_us = sum(operation.us for operation in forms[0])
    halves = [totals(cut(form, {}, (0.5,))) for form in forms]
    fluid_us = min(sequential_us, *(fluid_bound(work_us, interference) for work_us in halves))
    best = BestSchedule(fluid_us, sequence(forms[0]), sequential_us, sequential_us)
    for parts, (network, memory) in _tries(forms, step):
        if time.process_time() >= until_s:
            break
        stretched = {COMPUTE: 1.0, MEMORY: memory, NETWORK: network}
        structure = _structure(parts.nano(), stretched, best.schedule.period_us)
        if structure is None:
            continue
        for schedule in _sized(parts, structure, interference, until_s):
            if schedule.period_us < best.schedule.period_us:
                best = BestSchedule(fluid_us, schedule, structure.period_us, sequential_us)
                report(best)
            elif schedule.period_us > _NEAR * best.schedule.period_us:
                break
    return best


class _Parts(NamedTuple):
    """Nano-operations: two of each operation, four of the resource `finer`."""

    operations: Sequence[Operation]
    finer: str
    step: float
    edges: tuple[int, ...]
    """In steps, without the ends of the batch."""

    def nano(self) -> tuple[NanoOperation, ...]:
        shares = [edge * self.step for edge in self.edges]
        finer = [each.name for each in self.operations if each.resource == self.finer]
        return cut(self.operations, dict.fromkeys(finer, shares), (shares[len(shares) // 2],))

    def are_cut(self) -> bool:
        return all(a < b - 1e-9 for a, b in pairwise((0, *self.edges, 1 / self.step)))

    def moved(self, number: int, steps: int) -> _Parts:
        edges = (edge + steps * (index == number) for index, edge in enumerate(self.edges))
        return self._replace(edges=tuple(edges))


def _tries(
    forms: Sequence[Sequence[Operation]], step: float
) -> Iterator[tuple[_Parts, tuple[float, float]]]:
    quarters = tuple(round(part / (4 * step)) for part in (1, 2, 3))
    for finer, stretch, operations in product(("", NETWORK, MEMORY), _STRETCHES, forms):
        parts = _Parts(operations, finer, step, quarters if finer else quarters[1:2])
        if parts.are_cut() and finer in ("", *(each.resource for each in operations)):
            yield parts, stretch


def _sized(
    parts: _Parts, structure: _Structure, interference: Interference, until_s: float
) -> Iterator[Schedule]:
    best = _divide_gpu(parts.nano(), structure, interference)
    stride = max(1, round(1 / (8 * parts.step))) if best else 0
    while best and stride:
        yield best
        is_better = False
        for number, sign in product(range(len(parts.edges)), (-1, 1)):
            while time.process_time() < until_s:
                moved = parts.moved(number, sign * stride)
                found = moved.are_cut() and _divide_gpu(moved.nano(), structure, interference)
                if not found or found.period_us >= best.period_us * (1 - 1e-6):
                    break
                parts, best, is_better = moved, found, True
        stride = stride if is_better else stride // 2


def totals(nano: Sequence[NanoOperation]) -> dict[str, float]:
    """Microseconds of each resource's nano-operations, alone."""
    return {
        resource: sum(one.us for one in nano if one.operation.resource == resource)
        for resource in RESOURCES
    }


def sequence(operations: Sequence[Operation]) -> Schedule:
    """Whole operations in the order given."""
    slots, now_us = [], 0.0
    for nano in cut(operations, {}, ()):
        slots.append(Slot(nano, now_us, 1.0))
        now_us += nano.us
    return Schedule(now_us, tuple(slots))


def fluid_bound(
    work_us: Mapping[str, float],
    interference: Interference,
    overlapping: Sequence[str] = RESOURCES,
) -> float:
    """The shortest time for that much work of each resource, mixed at will.

    A linear program over divisions of the GPU. Resources that are not `overlapping` run alone.
    """
    alone_us = sum(us for resource, us in work_us.items() if resource not in overlapping)
    program = _Program()
    spent = []
    done: dict[str, Any] = dict.fromkeys(overlapping, 0)
    for parts in product(range(GRID + 1), repeat=len(overlapping)):
        if sum(parts) != GRID:
            continue
        spent.append(program.addVariable(lb=0))
        for resource, part in zip(overlapping, parts, strict=True):
            speed = interference.speed(resource, part / GRID)
            if speed:
                done[resource] += spent[-1] * speed
    for resource in overlapping:
        if work_us[resource]:
            program.addConstr(done[resource] >= work_us[resource])
    total = program.least(sum(spent))
    assert total is not None, "time enough does all the work"
    return alone_us + total


class _Structure(NamedTuple):
    period_us: float
    starts_us: tuple[float, ...]
    lengths_us: tuple[float, ...]


def _structure(
    nano: Sequence[NanoOperation], stretch: Mapping[str, float], most_us: float
) -> _Structure | None:
    """Stage I: an order of the first period that has one, below `most_us`."""
    lengths = tuple(one.us * stretch[one.operation.resource] for one in nano)
    shortest = max(us * stretch[resource] for resource, us in totals(nano).items())
    for period in (shortest * slack for slack in _SLACKS):
        if period < most_us and (starts := _starts(nano, lengths, period)):
            return _Structure(period, starts, lengths)
    return None


def _starts(
    nano: Sequence[NanoOperation], lengths: Sequence[float], period: float
) -> tuple[float, ...] | None:
    """Starts that keep dependencies and never run two of one resource, or None.

    Those of the least sum are taken. Consecutive nano-operations of one resource are
    `apart` layers from each other.
    """
    program = _Program()
    starts = [program.addVariable(lb=0, ub=_MAX_LAYERS_APART * period) for _ in nano]
    program.addConstr(starts[0] <= 0)
    for wait in waits(nano):
        layer_before = period if wait.is_of_layer_before else 0.0
        program.addConstr(
            starts[wait.later] - starts[wait.earlier] >= lengths[wait.earlier] - layer_before
        )
    for (i, one), (j, other) in combinations(enumerate(nano), 2):
        if one.operation.resource == other.operation.resource:
            apart = program.addIntegral(lb=-_MAX_LAYERS_APART, ub=_MAX_LAYERS_APART)
            program.addConstr(period * apart - starts[i] + starts[j] >= lengths[i])
            program.addConstr(period * apart - starts[i] + starts[j] <= period - lengths[j])
    is_found = program.least(sum(starts)) is not None
    return tuple(program.val(start) for start in starts) if is_found else None


def _divide_gpu(
    nano: Sequence[NanoOperation], structure: _Structure, interference: Interference
) -> Schedule | None:
    """Stage II: in the same order each nano-operation gets a constant share of the GPU, or None.

    In a phase, between two neighbouring starts or ends, shares add up to 1 at most.
    """
    phases = _phases(structure)
    program = _Program()
    spent = [program.addVariable(lb=0) for _ in phases]
    shares = [part / GRID for part in range(1, GRID + 1)]
    chosen = [[program.addBinary() for _ in shares] for _ in nano]
    for index, one in enumerate(nano):
        program.addConstr(sum(chosen[index]) == 1)
        lengths = [one.us / interference.speed(one.operation.resource, share) for share in shares]
        length = sum(flag * us for flag, us in zip(chosen[index], lengths, strict=True))
        total = sum(us for us, running in zip(spent, phases, strict=True) if index in running)
        program.addConstr(total == length)
    for running in phases:
        if len(running) > 1:
            flags = zip(*(chosen[index] for index in running), strict=True)
            used = sum(share * sum(each) for share, each in zip(shares, flags, strict=True))
            program.addConstr(used <= 1)
    period = program.least(sum(spent))
    if period is None:
        return None
    ends = [0.0]
    for us in spent:
        ends.append(ends[-1] + program.val(us))
    slots = []
    for index, one in enumerate(nano):
        in_phases = [k for k, running in enumerate(phases) if index in running]
        # What runs the whole period begins where it began in stage I: at some edge, the first.
        first = next((k for k in in_phases if index not in phases[k - 1]), 0)
        share = max(zip(map(program.val, chosen[index]), shares, strict=True))[1]
        num_layers = int(structure.starts_us[index] // structure.period_us)
        slots.append(Slot(one, ends[first] + num_layers * ends[-1], share))
    schedule = Schedule(ends[-1], tuple(slots))
    return None if any(violations(schedule, interference)) else schedule


def _phases(structure: _Structure) -> list[set[int]]:
    period = structure.period_us
    spans = list(zip(structure.starts_us, structure.lengths_us, strict=True))
    edges = sorted({round(at % period, 3) for start, us in spans for at in (start, start + us)})
    edges = [at for at, before in zip(edges, [-1.0, *edges], strict=False) if at - before > 0.01]
    phases = []
    for begin, end in zip(edges, [*edges[1:], edges[0] + period], strict=True):
        middle = (begin + end) / 2
        phases.append(
            {k for k, (start, us) in enumerate(spans) if (middle - start) % period < us - 1e-3}
        )
    return phases


@contextmanager
def _without_banner() -> Iterator[None]:
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
        ctypes.CDLL(None).fflush(None)
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


class _Program(highspy.Highs):
    """A mixed integer linear program, single-threaded, with a time limit."""

    def __init__(self) -> None:
        with _without_banner():
            super().__init__()  # type: ignore[no-untyped-call]
        self.silent()
        self.setOptionValue("threads", 1)
        self.setOptionValue("time_limit", _SOLVE_S)

    def least(self, objective: Any) -> float | None:
        """The objective's least value; None if nothing feasible was found in time."""
        self.minimize(objective)
        info = self.getInfo()
        is_feasible = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        return float(info.objective_function_value) if is_feasible else None
