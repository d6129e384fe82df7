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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, NamedTuple

import scheduler_churn
import typer
from machine import describe, write_results
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from scheduler_stress import StressedService, StressPoint, at_rest

from control_plane.scheduler.policies.registry import make_policy
from nanocp.config.scheduler import SchedulerConfig
from nanocp.serve.garbage import freeze_long_lived
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
NUM_WARM_STEPS = 20
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


@dataclass(frozen=True, slots=True)
class ChurnShape:
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
FULL = ChurnShape(
    (*((32, rows) for rows in (32, 64, 128, 256)), (256, 256), (1024, 256)),
    (0.25, 0.5, 2.0),
    (32, 64, 128, 256),
    200,
)
QUICK = ChurnShape(STRESSED, (0.25,), (32, 256), 100)


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


def measure(shape: ChurnShape, policy: str, console: Console) -> list[dict[str, Any]]:
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


def _at_equal_churn(shape: ChurnShape, policy: str) -> list[StressPoint]:
    churn = at_rest(FIT_INSTANCES, shape.fit_rows[0], policy).churn_per_step
    return [StressPoint(FIT_INSTANCES, rows, policy, churn) for rows in shape.fit_rows]


def measure_point(point: StressPoint, num_steps: int) -> dict[str, Any]:
    """Fill a cluster, let it run, and time num_steps calls."""
    cluster = StressedService(point)
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


# --- the fit


class ChurnFit(NamedTuple):
    """What a call costs at FIT_INSTANCES x FIT_ROWS over the churn, and what 8x the rows add."""

    us_per_change: float
    us_per_instance: float
    """At no churn."""
    rows_ratio: float
    """The most rows over the fewest at equal churn."""


def fit(shape: ChurnShape, policy: str, results: list[dict[str, Any]]) -> ChurnFit:
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
            if "churn_per_step" in r
            and StressPoint(*(r[name] for name in StressPoint._fields)) == point
        )
        for rows, point in zip(shape.fit_rows, _at_equal_churn(shape, policy), strict=True)
    }
    ratio = at[max(at)] / at[min(at)]
    return ChurnFit(
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


def show_claims(results: list[dict[str, Any]], fits: dict[str, ChurnFit], console: Console) -> bool:
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
