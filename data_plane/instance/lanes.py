"""The lanes (micro-batches) of a window: rows, routes, and generators that take turns (overlap.md).

One lane computes while the other awaits its peers, in one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple, TypeVar

from data_plane.instance.rows import Row
from data_plane.transport.exchange import Awaited, Exchange
from nanocp.values.table import InstanceTable

Result = TypeVar("Result")
Waiting = Generator[tuple[Awaited, ...], None, Result]
"""Yields puts, of which one must arrive before it goes on."""


class WindowLane(NamedTuple):
    """The rows and links of one step of a window."""

    number: int
    rows: list[Row]
    q_route: list[list[int]]
    """[peer][slot] -> request id to send."""
    res_route: list[list[int]]
    """[peer][slot] -> request id to receive."""


def window_lanes(
    table: InstanceTable, rows: Sequence[Row], two_lanes: bool
) -> tuple[WindowLane, ...]:
    """Return each lane of a window. rows: of the table, in its order."""
    if not two_lanes:
        return (WindowLane(0, [*rows], table.q_route, table.res_route),)
    lanes, begin = [], 0
    for number, lane in enumerate(table.lanes):
        end = begin + len(lane.rows)
        lanes.append(WindowLane(number, [*rows[begin:end]], lane.q_route, lane.res_route))
        begin = end
    return tuple(lanes)


def run_waiting(steps: Waiting[Result], exchange: Exchange) -> Result:
    """Run a generator to its end; raises what a wait of the exchange raises."""
    while True:
        try:
            awaited = next(steps)
        except StopIteration as stop:
            result: Result = stop.value
            return result
        exchange.wait_any(awaited)


def run_in_turns(lanes: Sequence[Iterator[Awaited]], exchange: Exchange) -> int:
    """Run `in_turns` to its end; raises what a wait of the exchange raises."""
    return run_waiting(in_turns(lanes, lambda put: exchange.arrived(*put)), exchange)


def in_turns(
    lanes: Sequence[Iterator[Awaited]], arrived: Callable[[Awaited], bool]
) -> Waiting[int]:
    """Run the lanes' steps in turns; yield their awaited puts when none can go on.

    The caller resumes once one put is here: a peer may await this instance in the other lane.
    Returns nanoseconds in which a lane computed while the other awaited a missing put.
    """
    hidden_ns = 0
    awaited: dict[int, Awaited | None] = dict.fromkeys(range(len(lanes)))
    num_waits = [0] * len(lanes)
    while awaited:
        ready = [lane for lane, put in awaited.items() if put is None or arrived(put)]
        if not ready:
            yield tuple(put for put in awaited.values() if put is not None)
            continue
        lane = min(ready, key=num_waits.__getitem__)
        one_waits, begin_ns = len(ready) < len(awaited), time.perf_counter_ns()
        try:
            awaited[lane] = next(lanes[lane])
        except StopIteration:
            del awaited[lane]
        if one_waits:
            hidden_ns += time.perf_counter_ns() - begin_ns
        num_waits[lane] += 1
    return hidden_ns
