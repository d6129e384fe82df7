"""Bytecode instructions of `plan_window`, here and in another checkout of this repository.

    git worktree add /tmp/before COMMIT
    python benchmarks/scheduler_instructions.py --against /tmp/before [--quick] [--json PATH]

Enters: two checkouts. Leaves: the instructions of a call in each, and their ratio; exit status 1 if
it is over 1.01. Does not know: what differs between the two.

The count is the same in every run, on any machine, so a change of a thousandth shows. What C code
does inside of an instruction is not counted.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from machine import describe, write_results
from other_checkout import commit_of, count_in

from control_plane.scheduler.scheduler import Scheduler
from nanocp.config.cluster import BoundsConfig, ClusterConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.values.plan import Arrival, Plan, WindowDone

MAX_RATIO = 1.01
NUM_INSTANCES, ROWS_EACH = 16, 32
_NUM_WINDOWS, _QUICK_WINDOWS = 400, 50
_BOUNDS = BoundsConfig(max_rows=64, max_links=64, max_attention_rows=512, max_partials=512)


class Counter:
    """Calls of a scheduler, and the instructions that they took."""

    def __init__(self) -> None:
        self.num_instructions = 0
        cluster = ClusterConfig(num_instances=NUM_INSTANCES, num_frames=4096, bounds=_BOUNDS)
        buckets = ((512, 1), (1024, 2))
        config = SchedulerConfig(policy="dual_balanced", cp_degree_buckets=buckets, cp_degree_max=4)
        self._scheduler = Scheduler(cluster, config)

    def plan(self, events: list[Any], now_us: int) -> Plan:
        """One call, every instruction of which is counted."""
        sys.settrace(self._trace)
        try:
            return self._scheduler.plan_window(events, now_us)
        finally:
            sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.num_instructions += event == "opcode"
        return self._trace


def count(num_windows: int) -> float:
    """Instructions of a mean call; rows come and go while two windows are in flight."""
    counter, now_us, in_flight = Counter(), 0, []
    num_placed = 0

    def arrivals(number: int) -> list[Any]:
        nonlocal num_placed
        first, num_placed = num_placed + 1, num_placed + number
        return [
            Arrival(i, 200 + 37 * i % 1500, 120 + i % 200, needs_prefill=False)
            for i in range(first, first + number)
        ]

    events = arrivals(NUM_INSTANCES * ROWS_EACH)
    for _ in range(num_windows):
        now_us += 20_000
        while len(in_flight) < 2:
            plan, events = counter.plan(events, now_us), []
            assert plan.window is not None
            in_flight.append(plan.window)
        window = in_flight.pop(0)
        events = [WindowDone(each, window) for each in range(NUM_INSTANCES)] + arrivals(2)
    return counter.num_instructions / num_windows


def main(
    against: Annotated[
        Path | None, typer.Option(help="A checkout of another commit; none: count only.")
    ] = None,
    quick: Annotated[bool, typer.Option(help="Fewer windows.")] = False,
    json: Annotated[
        Path | None, typer.Option(help="Write the result here, the machine beside it.")
    ] = None,
) -> None:
    """Count the instructions of a call, here and in another checkout."""
    load_before = os.getloadavg()[0]
    num_windows = _QUICK_WINDOWS if quick else _NUM_WINDOWS
    here = count(num_windows)
    result: dict[str, Any] = {"instructions": here}
    print(f"{here:.0f} instructions a call of plan_window")
    if against is not None:
        before = count_in(against, __file__, quick)
        result |= {"against": commit_of(against), "before": before, "ratio": here / before}
        print(f"{before:.0f} in {against} at {result['against']}: {here / before:.4f}x")
    if json is not None:
        write_results(json, [result], describe(load_before))
    raise typer.Exit(result.get("ratio", 0.0) > MAX_RATIO)


if __name__ == "__main__":
    typer.run(main)
