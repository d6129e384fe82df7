"""NanoFlow's auto-search (4.1): a periodic schedule of nano-operations, and its lower bound.

Stage I finds an order by integer programs, stage II divides the GPU; the best stretch wins.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import highspy

from nanocp.overlap.interference import COMPUTE, MEMORY, NETWORK, RESOURCES, Interference
from nanocp.overlap.operations import NanoOperation, Operation, cut, waits
from nanocp.overlap.schedule import Schedule, Slot, violations

_GRID = 20
_MAX_LAYERS_APART = 3
"""Most neighbouring layers in one period."""
_SOLVE_S = 8.0
_HALVES = (0.5,)
_STRETCHES = tuple(product((1.0, 1.3, 1.6), (1.0, 2.0, 1.5, 2.5)))
"""Slowdowns of (memory-bound, network-bound) operations in stage I."""


@dataclass(frozen=True)
class BestSchedule:
    """The result of a search: microseconds of a layer, the best first."""

    fluid_us: float
    """Lower bound of any schedule of two nano-operations each."""
    schedule: Schedule
    structure_us: float
    """Stage I's period."""
    sequential_us: float

    @property
    def gain(self) -> float:
        """Speed-up over operations in sequence."""
        return self.sequential_us / self.schedule.period_us


def search(
    operations: Sequence[Operation],
    interference: Interference,
    limit_s: float = 60.0,
    report: Callable[[BestSchedule], None] = lambda found: None,
) -> BestSchedule:
    """Search for at most about `limit_s` seconds; `report` gets each schedule better than before.

    Falls back to the sequence of whole operations.
    """
    until_s = time.monotonic() + limit_s
    sequential_us = sum(operation.us for operation in operations)
    halves = cut(operations, {}, _HALVES)
    fluid_us = min(sequential_us, fluid_bound(totals(halves), interference))
    best = BestSchedule(fluid_us, sequence(operations), sequential_us, sequential_us)
    for nano, stretch in _tries(operations):
        if time.monotonic() >= until_s:
            break
        stretched = {COMPUTE: 1.0, MEMORY: stretch[0], NETWORK: stretch[1]}
        structure = _structure(nano, stretched, best.schedule.period_us)
        if structure is None:
            continue
        schedule = _divide_gpu(nano, structure, interference)
        if schedule is None or schedule.period_us >= best.schedule.period_us:
            continue
        if not any(violations(schedule, interference)):
            best = BestSchedule(fluid_us, schedule, structure.period_us, sequential_us)
            report(best)
    return best


def _tries(
    operations: Sequence[Operation],
) -> Iterator[tuple[tuple[NanoOperation, ...], tuple[float, float]]]:
    """Two nano-operations each first, at several cuts; then more of each resource."""
    for at in (0.5, 0.375):
        for stretch in _STRETCHES:
            yield cut(operations, {}, (at,)), stretch
    quarters = (0.25, 0.5, 0.75)
    for finer in (MEMORY, NETWORK):
        cuts = {each.name: quarters for each in operations if each.resource == finer}
        for stretch in _STRETCHES:
            yield cut(operations, cuts, _HALVES), stretch


def totals(nano: Sequence[NanoOperation]) -> dict[str, float]:
    """Microseconds of each resource's nano-operations, each alone on the GPU."""
    return {
        resource: sum(one.us for one in nano if one.operation.resource == resource)
        for resource in RESOURCES
    }


def sequence(operations: Sequence[Operation]) -> Schedule:
    """Whole operations one after the other, in the order given."""
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
    for parts in product(range(_GRID + 1), repeat=len(overlapping)):
        if sum(parts) != _GRID:
            continue
        spent.append(program.at_least_0())
        for resource, part in zip(overlapping, parts, strict=True):
            speed = interference.speed(resource, part / _GRID)
            if speed:
                done[resource] += spent[-1] * speed
    for resource in overlapping:
        if work_us[resource]:
            program.add(done[resource] >= work_us[resource])
    total = program.minimize(sum(spent))
    assert total is not None, "time enough does all the work"
    return alone_us + total


@dataclass(frozen=True)
class _Structure:
    """Result of stage I: starts of nano-operations without interference."""

    period_us: float
    starts_us: tuple[float, ...]
    lengths_us: tuple[float, ...]


def _structure(
    nano: Sequence[NanoOperation], stretch: Mapping[str, float], most_us: float
) -> _Structure | None:
    """Stage I: an order with nearly the shortest period; None if there is none below `most_us`."""
    lengths = tuple(one.us * stretch[one.operation.resource] for one in nano)
    by_resource = dict.fromkeys(RESOURCES, 0.0)
    for one, length in zip(nano, lengths, strict=True):
        by_resource[one.operation.resource] += length
    shortest = max(by_resource.values())
    for slack in (1.0, 1.05, 1.12, 1.2):
        period = shortest * slack
        if period >= most_us:
            return None
        if (starts := _starts(nano, lengths, period)) is not None:
            return _Structure(period, starts, lengths)
    return None


def _starts(
    nano: Sequence[NanoOperation], lengths: Sequence[float], period: float
) -> tuple[float, ...] | None:
    """Starts that keep dependencies and never run two of one resource, or None.

    Consecutive nano-operations of one resource are `apart` layers from each other.
    """
    program = _Program()
    starts = [program.at_least_0(_MAX_LAYERS_APART * period) for _ in nano]
    program.add(starts[0] <= 0)
    for wait in waits(nano):
        layer_before = period if wait.is_of_layer_before else 0.0
        program.add(
            starts[wait.later] - starts[wait.earlier] >= lengths[wait.earlier] - layer_before
        )
    for (i, one), (j, other) in combinations(enumerate(nano), 2):
        if one.operation.resource == other.operation.resource:
            apart = program.integer(-_MAX_LAYERS_APART, _MAX_LAYERS_APART)
            program.add(period * apart - starts[i] + starts[j] >= lengths[i])
            program.add(period * apart - starts[i] + starts[j] <= period - lengths[j])
    if program.minimize(sum(starts)) is None:
        return None
    return tuple(program.value(start) for start in starts)


def _divide_gpu(
    nano: Sequence[NanoOperation], structure: _Structure, interference: Interference
) -> Schedule | None:
    """Stage II: in the same order each nano-operation gets a constant share of the GPU.

    In a phase, between two neighbouring starts or ends, shares add up to 1 at most.
    """
    phases = _phases(structure)
    program = _Program()
    spent = [program.at_least_0() for _ in phases]
    shares = [part / _GRID for part in range(1, _GRID + 1)]
    chosen = [[program.binary() for _ in shares] for _ in nano]
    for index, one in enumerate(nano):
        program.add(sum(chosen[index]) == 1)
        lengths = [one.us / interference.speed(one.operation.resource, share) for share in shares]
        length = sum(flag * us for flag, us in zip(chosen[index], lengths, strict=True))
        total = sum(us for us, running in zip(spent, phases, strict=True) if index in running)
        program.add(total == length)
    for running in phases:
        if len(running) > 1:
            used = sum(
                flag * share
                for index in running
                for flag, share in zip(chosen[index], shares, strict=True)
            )
            program.add(used <= 1)
    period = program.minimize(sum(spent))
    if period is None:
        return None
    ends = [0.0]
    for us in spent:
        ends.append(ends[-1] + program.value(us))
    slots = []
    for index, one in enumerate(nano):
        in_phases = [k for k, running in enumerate(phases) if index in running]
        # What runs the whole period begins where it began in stage I: at some edge, the first.
        first = next((k for k in in_phases if index not in phases[k - 1]), 0)
        share = next(
            share
            for flag, share in zip(chosen[index], shares, strict=True)
            if program.value(flag) > 0.5
        )
        num_layers = int(structure.starts_us[index] // structure.period_us)
        slots.append(Slot(one, ends[first] + num_layers * ends[-1], share))
    return Schedule(ends[-1], tuple(slots))


def _phases(structure: _Structure) -> list[set[int]]:
    """Nano-operations between two neighbouring starts or ends, around one period."""
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


class _Program:
    """A mixed integer linear program for HiGHS, single-threaded, with a time limit."""

    def __init__(self) -> None:
        with _without_banner():
            self._solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
        self._solver.silent()
        self._solver.setOptionValue("threads", 1)
        self._solver.setOptionValue("time_limit", _SOLVE_S)

    def at_least_0(self, most: float = highspy.kHighsInf) -> Any:
        return self._solver.addVariable(lb=0, ub=most)

    def integer(self, least: int, most: int) -> Any:
        return self._solver.addIntegral(lb=least, ub=most)

    def binary(self) -> Any:
        return self._solver.addBinary()

    def add(self, constraint: Any) -> None:
        self._solver.addConstr(constraint)

    def minimize(self, objective: Any) -> float | None:
        """The objective's value; None if nothing feasible was found in time."""
        self._solver.minimize(objective)
        info = self._solver.getInfo()
        is_feasible = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        return float(info.objective_function_value) if is_feasible else None

    def value(self, variable: Any) -> float:
        return float(self._solver.val(variable))
