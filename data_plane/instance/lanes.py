"""The lanes (micro-batches) of a window: rows, routes, and generators that take turns (overlap.md).

One lane computes while the other awaits its peers, in one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple, TypeVar

from data_plane.instance.rows import Row
from data_plane.transport.exchange import Awaited, Channel, Exchange
from nanocp.overlap.ops import Fused, Op, Ops, OverlapPolicy
from nanocp.overlap.policies.orders import ATTENTION, BEHIND_FIRST
from nanocp.values.table import InstanceTable

_TAGS = {
    channel.in_lane(lane): tag
    for lane in range(2)
    for channel, tag in (
        (Channel.Q, ATTENTION),
        (Channel.RES, "exchange"),
        (Channel.DISPATCH, "experts"),
        (Channel.COMBINE, "combine"),
    )
}
"""The tag of what follows the wait for a put of this channel; a step begins as after combine."""

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


class LaneOps(Ops):
    """The lanes' steps: an operator is what lies between two waits."""

    def __init__(
        self, lanes: Sequence[Iterator[Awaited]], arrived: Callable[[Awaited], bool]
    ) -> None:
        self._lanes, self._arrived = lanes, arrived
        self._awaited: dict[int, Awaited | None] = dict.fromkeys(range(len(lanes)))
        self._ready = {*self._awaited}
        self._heads = [(Op(0, "combine", lane),) for lane in self._awaited]
        self.num_executed = 0
        self.hidden_ns = 0
        """Time of a lane while the other awaited a missing put."""

    @property
    def batch_size(self) -> int:
        return len(self._lanes)

    @property
    def num_micro_batches(self) -> int:
        return len(self._lanes)

    @property
    def is_finished(self) -> bool:
        return not self._awaited

    def missing(self) -> tuple[Awaited, ...]:
        """Look which lanes can go on; return the awaited puts if none can."""
        for lane, put in self._awaited.items():
            if put is not None and lane not in self._ready and self._arrived(put):
                self._ready.add(lane)
        if self._ready:
            return ()
        return tuple(put for put in self._awaited.values() if put is not None)

    def split(self, sizes: Sequence[int]) -> None:
        if len(sizes) != len(self._lanes):
            raise ValueError(f"the scheduler has cut {len(self._lanes)} lanes, not {len(sizes)}")

    def get_ready_ops(self, micro_batch: int) -> tuple[Op, ...]:
        return self._heads[micro_batch] if micro_batch in self._ready else ()

    def execute(
        self, ops: Sequence[Op], replace_func: Fused | None = None, stream: str = ""
    ) -> None:
        for number, _, lane in ops:
            one_waits = len(self._ready) < len(self._awaited)
            begin_ns = time.perf_counter_ns() if one_waits else 0
            self._ready.remove(lane)
            before, put = self._awaited[lane], next(self._lanes[lane], None)
            if put is None:
                del self._awaited[lane]
            else:
                self._awaited[lane] = put
                # What awaits several peers is one operator.
                goes_on = before is not None and before[::2] == put[::2]
                tag = "" if goes_on else _TAGS[put.channel]
                self._heads[lane] = (Op(number + 1, tag, lane),)
            if one_waits:
                self.hidden_ns += time.perf_counter_ns() - begin_ns
            self.num_executed += 1


def run_in_turns(
    lanes: Sequence[Iterator[Awaited]], exchange: Exchange, policy: OverlapPolicy = BEHIND_FIRST
) -> int:
    """Run `in_turns` to its end; raises what a wait of the exchange raises."""
    return run_waiting(in_turns(lanes, lambda put: exchange.arrived(*put), policy), exchange)


def in_turns(
    lanes: Sequence[Iterator[Awaited]],
    arrived: Callable[[Awaited], bool],
    policy: OverlapPolicy = BEHIND_FIRST,
) -> Waiting[int]:
    """Run the lanes' steps in turns; yield their awaited puts when none can go on.

    The caller resumes once one put is here: a peer may await this instance in the other lane. Where
    the policy would let a ready lane wait, the one behind goes on. Returns `LaneOps.hidden_ns`.
    """
    ops = LaneOps(lanes, arrived)
    policy.begin(ops)
    while not ops.is_finished:
        if missing := ops.missing():
            yield missing
            continue
        num_executed = ops.num_executed
        policy.next_round(ops)
        if ops.num_executed == num_executed:
            BEHIND_FIRST.next_round(ops)
    return ops.hidden_ns
