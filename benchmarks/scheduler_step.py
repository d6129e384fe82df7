"""What the scheduler costs: `Scheduler.plan_window` (k = 1) under the load of a simulated service.

    python benchmarks/scheduler_step.py [--quick] [--policy POLICY] [--json PATH]

Enters: the paper's mix at 1% long on the simulated H200 cluster. Leaves: a table, a fit, and a list
of {instances, rows, policy, load, mean_ms, p50_ms, p99_ms, plan_bytes}; exit status 1 if a claim
does not hold. Does not know: sockets, members; nothing but the scheduler runs while the clock does.

Claims are about the simulated load (`scheduler_churn`): changes come as often as they do in a
service. The other lines are stress, from 1,024 to 262,144 active requests, and claim nothing: a
step brings as many requests admitted, ended, re-bound and outgrown (the promise is used up, so they
get more pages) each as the churn says, the active requests / 600 unless the fit varies it. That
re-binds up to 80 times as often as a service does.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Annotated, Any, NamedTuple

import scheduler_churn
import typer
from machine import describe, write_results
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from control_plane.scheduler.cluster_state import ClusterState
from control_plane.scheduler.policies.policy import Policy
from control_plane.scheduler.policies.registry import make_policy
from control_plane.scheduler.proposal import Proposal
from control_plane.scheduler.request import Request
from control_plane.scheduler.row_windows import MAX_WINDOWS_IN_FLIGHT
from control_plane.scheduler.scheduler import Scheduler
from nanocp.config import SchedulerConfig
from nanocp.plan import Arrival, Event, Finished, FinishReason, Plan, TransferDone, WindowDone
from nanocp.serve.garbage import freeze_long_lived
from nanocp.simulator.cluster_file import ClusterFile, load_cluster_file
from nanocp.simulator.cost import CostModel, Loads, profile_cp_degrees
from nanocp.simulator.workload import Workload
from nanocp.wire.convert import instance_plan_to_wire

CLAIMS_MS = {
    ("dual_balanced", 45): 0.2,
    ("cost_aware", 45): 0.4,
    ("dual_balanced", 256): 1.0,
    ("cost_aware", 256): 1.25,
}
"""Claim: with that many rows an instance, simulated, the mean of a call is at most this."""
MAX_SHARE_OF_STEP = 0.01
"""Claim: with 256 rows an instance, simulated, a call takes at most this share of a step."""
STEPS_PER_LIFE = 600
"""Churn: of each kind one in this many active requests a step."""
STEPS_PER_PROMISE = 512
"""Tokens promised at admission, and windows over which the rows are admitted, so that each step
some outgrow theirs: as many as the churn while the clock runs, since those that end do not."""
MAX_TOKENS = 8192
"""Enough that no row comes to its end by itself: the rows that end are drawn."""
NUM_FRAMES = 65_536
"""Frames of each instance, more than an H200 has: 256 rows of the mix hold that much KV."""
NUM_WARM_STEPS = 20
ROW_START = b"p" * 48
"""About as long as an encoded row start."""


class Point(NamedTuple):
    """One line of the table."""

    instances: int
    rows: int
    """Rows of each instance."""
    policy: str
    churn_per_step: float
    """Changes of each of the four kinds."""


RESULT_FIELDS = (
    "instances",
    "rows",
    "policy",
    "load",
    "mean_ms",
    "p50_ms",
    "p99_ms",
    "share_of_step",
    "plan_bytes",
    "changes_per_step",
)
"""Keys of a line in the results' file."""


def at_rest(instances: int, rows: int, policy: str) -> Point:
    """The point at the churn that the claims are about."""
    return Point(instances, rows, policy, round(instances * rows / STEPS_PER_LIFE, 3))


@dataclass(frozen=True, slots=True)
class Shape:
    """What is measured."""

    sizes: tuple[tuple[int, int], ...]
    """(instances, rows)."""
    fit_churns: tuple[float, ...]
    """At FIT_INSTANCES x FIT_ROWS, in multiples of the churn there."""
    fit_rows: tuple[int, ...]
    """At FIT_INSTANCES and the churn of the first of them."""
    num_steps: int


FIT_INSTANCES, FIT_ROWS = 32, 256
STRESSED = ((32, 256), (256, 256))
FULL = Shape(
    (*((32, rows) for rows in (32, 64, 128, 256)), (256, 256), (1024, 256)),
    (0.25, 0.5, 2.0),
    (32, 64, 128, 256),
    200,
)
QUICK = Shape(STRESSED, (0.25,), (32, 256), 100)


def main(
    quick: Annotated[
        bool, typer.Option(help="Under a minute: the claimed points and a short fit.")
    ] = False,
    policy: Annotated[
        list[str] | None, typer.Option(help="Again for more; default: both claimed ones.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write the results here, the machine beside it.")
    ] = None,
) -> None:
    """Measure every point in turn."""
    policies = policy or ["dual_balanced", "cost_aware"]
    for name in policies:
        try:
            make_policy(SchedulerConfig(policy=name))
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--policy") from None
    console = Console() if sys.stdout.isatty() else Console(width=110)
    load_before = os.getloadavg()[0]
    shape = QUICK if quick else FULL
    warm_up_s, seconds = (1.0, 2.0) if quick else (5.0, 20.0)
    results = [
        scheduler_churn.measure(rows, name, warm_up_s, seconds)
        for name in policies
        for rows in scheduler_churn.TPOT_US
    ]
    results += [result for name in policies for result in measure(shape, name, console)]
    show(results, console)
    fits = {name: fit(shape, name, results) for name in policies}
    if json is not None:
        kept = [{name: result[name] for name in RESULT_FIELDS} for result in results]
        write_results(
            json,
            kept,
            describe(load_before) | {"fit": {name: f._asdict() for name, f in fits.items()}},
        )
    if not show_claims(results, fits, console):
        raise typer.Exit(1)


# --- measuring


def measure(shape: Shape, policy: str, console: Console) -> list[dict[str, Any]]:
    """Every point of one policy."""
    sizes = [at_rest(*size, policy) for size in shape.sizes]
    rest = at_rest(FIT_INSTANCES, FIT_ROWS, policy)
    points = dict.fromkeys(
        [
            *sizes,
            *(
                rest._replace(churn_per_step=round(rest.churn_per_step * factor, 3))
                for factor in shape.fit_churns
            ),
            *_at_equal_churn(shape, policy),
        ]
    )
    results = []
    with Progress(console=console, transient=True) as progress:
        for point in progress.track(points, description=policy):
            results.append(measure_point(point, shape.num_steps))
    return results


def _at_equal_churn(shape: Shape, policy: str) -> list[Point]:
    churn = at_rest(FIT_INSTANCES, shape.fit_rows[0], policy).churn_per_step
    return [Point(FIT_INSTANCES, rows, policy, churn) for rows in shape.fit_rows]


def measure_point(point: Point, num_steps: int) -> dict[str, Any]:
    """Fill a cluster, let it run, and time num_steps calls."""
    cluster = SimulatedInstances(point)
    cluster.fill()
    for _ in range(NUM_WARM_STEPS):
        cluster.step()
    cluster.num_changes = dict.fromkeys(cluster.num_changes, 0)
    freeze_long_lived()  # as `nanocp serve` does
    times_ns, num_bytes = [], []
    for _ in range(num_steps):
        elapsed_ns, plan = cluster.step()
        times_ns.append(elapsed_ns)
        num_bytes.append(
            sum(len(instance_plan_to_wire(own).SerializeToString()) for own in plan.instances)
        )
    share = fmean(times_ns) / 1e3 / cluster.modelled_step_us()
    times_ns.sort()
    return point._asdict() | {
        "load": f"stress, {point.churn_per_step:.1f} x 4",
        "mean_ms": round(fmean(times_ns) / 1e6, 4),
        "p50_ms": round(times_ns[num_steps // 2] / 1e6, 4),
        "p99_ms": round(times_ns[num_steps * 99 // 100] / 1e6, 4),
        "plan_bytes": round(fmean(num_bytes)),
        "share_of_step": round(share, 5),
        "changes_per_step": {
            name: round(count / num_steps, 2) for name, count in cluster.num_changes.items()
        },
    }


class SimulatedInstances:
    """Instances as the scheduler sees them: each reports every window, two windows later."""

    def __init__(self, point: Point) -> None:
        file = load_cluster_file("h200x32-deepseek-v3")
        self._model = CostModel(
            replace(file, cluster=replace(file.cluster, num_instances=point.instances)), "fitted"
        )
        self._point = point
        bounds = replace(file.cluster.bounds, max_rows=2 * point.rows)
        cluster = replace(
            file.cluster, num_instances=point.instances, num_frames=NUM_FRAMES, bounds=bounds
        )
        self._scheduler = Scheduler(cluster, _scheduler_config(file, self._model, point))
        self._policy = _WithMoves(self._scheduler._policy)
        self._scheduler._policy = self._scheduler._rows._policy = self._policy
        self._random = Random(0)
        self._requests = Workload("issue-1", 1.0).requests(cluster.max_model_len - MAX_TOKENS)
        self._num_arrived = 0
        self._owed = 0.0
        self._live: list[int] = []
        self._answers: list[Event] = []
        self.num_changes = {"admitted": 0, "ended": 0, "re-bound": 0, "outgrown": 0}
        self._window = 0

    def fill(self) -> None:
        """Admit the rows, as many in each window."""
        total, num_windows = self._point.instances * self._point.rows, _num_promised(self._point)
        for window in range(num_windows):
            num = total * (window + 1) // num_windows - total * window // num_windows
            self._call(self._arrivals(num), [], 0)
        self._call([], [], 0)

    def step(self) -> tuple[int, Plan]:
        """One window under churn: nanoseconds of the call, and its answer."""
        self._owed += self._point.churn_per_step
        num = int(self._owed)
        self._owed -= num
        ended = []
        for _ in range(num):
            index = self._random.randrange(len(self._live))
            self._live[index], self._live[-1] = self._live[-1], self._live[index]
            ended.append(self._live.pop())
        elapsed_ns, plan = self._call(self._arrivals(num), ended, num)
        return elapsed_ns, plan

    def modelled_step_us(self) -> int:
        """What the step takes on the simulated cluster, by the paper's own microseconds."""
        state = self._scheduler._state
        instances = range(self._point.instances)
        loads = Loads(
            [state.kv_tokens(i) for i in instances],
            state.num_rows,
            state.committed.attention_rows,
            [state.committed.num_links(i) for i in instances],
            [0 for _ in instances],
        )
        return self._model.step(loads).step_us

    def _arrivals(self, num: int) -> list[Event]:
        first = self._num_arrived + 1
        self._num_arrived += num
        return [
            Arrival(request_id, next(self._requests).prompt_len, MAX_TOKENS, ROW_START)
            for request_id in range(first, first + num)
        ]

    def _call(self, arrivals: list[Event], ended: list[int], num_moves: int) -> tuple[int, Plan]:
        scheduler = self._scheduler
        events = [*self._reports(ended), *self._answers, *arrivals]
        linked = scheduler._state.linked.by_degree
        # Those with the fewest holders move first, as where a policy decides (4.2.1).
        drawn = sorted(self._random.choices(linked, k=4 * num_moves)) if linked else []
        self._policy.wanted = [request_id for _, request_id in dict.fromkeys(drawn)]
        self._policy.num_moves = num_moves
        num_outgrown = len(scheduler._rows._due.get(self._window, ()))
        began_ns = time.perf_counter_ns()
        plan = scheduler.plan_window(events, self._window)
        elapsed_ns = time.perf_counter_ns() - began_ns
        assert not plan.ended and not scheduler.num_waiting, (
            "the cluster holds every request at once"
        )
        self._window += plan.window is not None  # None: the first call has no row yet
        self._answers = [
            TransferDone(transfer.ticket, i)
            for transfer in plan.transfers
            for i in transfer.receivers
        ]
        self._live += [start.request_id for own in plan.instances for start in own.starts]
        if num_moves:
            counts = (len(arrivals), len(ended), self._policy.num_moved, num_outgrown)
            for name, count in zip(self.num_changes, counts, strict=True):
                self.num_changes[name] += count
        return elapsed_ns, plan

    def _reports(self, ended: list[int]) -> Iterator[WindowDone]:
        """Every instance reports the window before the last; a row ends on its own instance."""
        window = self._window - MAX_WINDOWS_IN_FLIGHT
        if window < 0:
            return
        finished: list[list[Finished]] = [[] for _ in range(self._point.instances)]
        for request_id in ended:
            row = Finished(request_id, 10, FinishReason.STOP)
            finished[self._scheduler._state.requests[request_id].moe_binding].append(row)
        for instance, rows in enumerate(finished):
            yield WindowDone(instance, window, tuple(rows), 40_000, 1_000)


class _WithMoves:
    """The policy, with as many more re-bindings as make up the churn.

    They go to the member with the fewest rows.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.wanted: list[int] = []
        self.num_moves = 0
        self.num_moved = 0

    def place(self, state: ClusterState, prompt_len: int, window: int) -> Proposal:
        return self._policy.place(state, prompt_len, window)

    def rebindings(self, state: ClusterState, window: int) -> Iterator[tuple[Request, int]]:
        self.num_moved = 0
        for request, new in self._policy.rebindings(state, window):
            yield request, new
            self.num_moved += request.moe_binding == new
        for request_id in self.wanted:
            request = state.requests.get(request_id)
            if self.num_moved >= self.num_moves or request is None:
                continue
            old = request.moe_binding
            new = min((i for i in request.pages_on if i != old), key=state.num_rows.__getitem__)
            yield request, new
            self.num_moved += request.moe_binding != old

    def moves(self, state: ClusterState, window: int) -> Iterator[tuple[Request, range, int]]:
        return self._policy.moves(state, window)

    def holder(self, state: ClusterState, request: Request, window: int) -> int | None:
        return self._policy.holder(state, request, window)


def _num_promised(point: Point) -> int:
    lives = at_rest(point.instances, point.rows, point.policy).churn_per_step / point.churn_per_step
    return round(STEPS_PER_PROMISE * lives)


def _scheduler_config(file: ClusterFile, model: CostModel, point: Point) -> SchedulerConfig:
    return SchedulerConfig(
        policy=point.policy,
        cp_degree_buckets=profile_cp_degrees(model, file.cp_degrees, file.cluster.max_model_len),
        cp_degree_max=max(file.cp_degrees),
        growth_promise=f"tokens:{_num_promised(point)}",
        costs=model.in_tokens(),
        max_queued_requests=10**6,
        max_queued_tokens=10**9,
    )


# --- the fit


class Fit(NamedTuple):
    """What a call costs at FIT_INSTANCES x FIT_ROWS over the churn, and what 8x the rows add."""

    us_per_change: float
    us_per_instance: float
    """At no churn."""
    rows_ratio: float
    """The most rows over the fewest at equal churn."""


def fit(shape: Shape, policy: str, results: list[dict[str, Any]]) -> Fit:
    """Least squares over the points of FIT_INSTANCES x FIT_ROWS, by their medians."""
    points = [
        r
        for r in results
        if "churn_per_step" in r
        and (r["instances"], r["rows"], r["policy"]) == (FIT_INSTANCES, FIT_ROWS, policy)
    ]
    changes = [4 * r["churn_per_step"] for r in points]
    times_us = [1e3 * r["p50_ms"] for r in points]
    mean_change, mean_us = fmean(changes), fmean(times_us)
    slope = sum((x - mean_change) * (y - mean_us) for x, y in zip(changes, times_us, strict=True))
    slope /= sum((x - mean_change) ** 2 for x in changes)
    at = {
        rows: next(
            r["p50_ms"]
            for r in results
            if "churn_per_step" in r and Point(*(r[name] for name in Point._fields)) == point
        )
        for rows, point in zip(shape.fit_rows, _at_equal_churn(shape, policy), strict=True)
    }
    ratio = at[max(at)] / at[min(at)]
    return Fit(
        round(slope, 3), round((mean_us - slope * mean_change) / FIT_INSTANCES, 3), round(ratio, 3)
    )


# --- showing


def show(results: list[dict[str, Any]], console: Console) -> None:
    """Print a line for each point.

    The paper's Figure 16 has the share at 32 instances, with the plans' transfer; our copy of the
    text has lost its percentages.
    """
    table = Table(title="plan_window; share: of a step by the fitted cost model, as in Figure 16")
    columns = (
        "policy",
        "instances",
        "rows",
        "load",
        "mean ms",
        "p50 ms",
        "p99 ms",
        "share",
        "plan bytes",
    )
    for column in columns:
        table.add_column(column, justify="left" if column in ("policy", "load") else "right")
    for r in results:
        times = (f"{r[name]:.3f}" for name in ("mean_ms", "p50_ms", "p99_ms"))
        sizes = (str(r["instances"]), str(r["rows"]), r["load"])
        table.add_row(
            r["policy"], *sizes, *times, f"{r['share_of_step']:.1%}", f"{r['plan_bytes']:,}"
        )
    console.print(table)


def show_claims(results: list[dict[str, Any]], fits: dict[str, Fit], console: Console) -> bool:
    """What is claimed beside what was measured; returns whether every claim holds."""
    table = Table(title="claims")
    for column in ("policy", "what", "measured", "claimed", "holds"):
        table.add_column(column, justify="left" if column in ("policy", "what") else "right")
    all_hold = True
    for policy, what, measured, claimed in claims(results):
        all_hold &= measured <= claimed
        table.add_row(
            policy, what, f"{measured:.3f}", f"<= {claimed}", "yes" if measured <= claimed else "NO"
        )
    console.print(table)
    for policy, found in fits.items():
        console.print(
            f"{policy}: {found.us_per_change} us a change, {found.us_per_instance} us an instance"
        )
    return all_hold


def claims(results: list[dict[str, Any]]) -> Iterator[tuple[str, str, float, float]]:
    """(policy, what, measured, the most that is claimed)."""
    for r in results:
        for (policy, rows), claimed in CLAIMS_MS.items():
            if (r["policy"], r["load"]) == (policy, f"simulated, {rows} rows"):
                yield policy, f"mean ms, {r['load']}", r["mean_ms"], claimed
                if rows == 256:
                    what = "share of a step, 256 rows"
                    yield policy, what, r["share_of_step"], MAX_SHARE_OF_STEP


if __name__ == "__main__":
    typer.run(main)
