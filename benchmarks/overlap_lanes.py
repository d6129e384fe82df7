"""Two lanes of a decode step against one, on two instances whose puts arrive late.

    python benchmarks/overlap_lanes.py [--quick] [--json PATH]

Enters: a preset's checkpoint. Leaves: a table, and a list of {rows, late_ms, one_us, two_us,
waits_of_compute, ratio, chosen, regret}; exit status 1 if a claim does not hold. Does not know: how
lanes take turns. Times of one and two lanes are taken by turns; the fastest step of each counts.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from machine import describe, write_results
from rich.console import Console
from rich.table import Table
from service import checkpoint_of

from data_plane.profiling.batch import Batch, BatchRequest
from data_plane.profiling.cluster import MeasuringCluster, measuring
from nanocp.config import ClusterConfig, Config, SchedulerConfig
from nanocp.serve.service import member_environment

MAX_RATIO = 0.85
"""Claim: two lanes take at most this much of one lane where waits are as long as compute."""
WAITS = (0.7, 1.2)
"""What counts as "as long": waits over compute."""
MAX_REGRET = 1.05
MIN_RIGHT = 0.9
"""Claim: what the table chooses is within 5% of the better one at 90% of the points."""
MAX_NOISE = 1.15
"""Two measurements of one point may differ so much; beyond it nothing is judged."""
LENGTH = 256
LINKED_SHARE = 4
"""One of so many rows is at CP degree 2."""


def main(
    quick: Annotated[
        bool, typer.Option(help="Under a minute: preset tiny, few points; judges no claim.")
    ] = False,
    json: Annotated[
        Path | None, typer.Option(help="Write the results here, the machine beside it.")
    ] = None,
) -> None:
    """Measure every point twice: one half chooses, as a profile does, the other judges."""
    console, load_before = Console(), os.getloadavg()[0]
    preset, rows, delays, num_steps = (
        ("tiny", (8,), (0.0, 1.0), 3)
        if quick
        else ("small", (8, 16, 32), (0.0, 0.5, 1.0, 2.0, 3.0, 5.0), 7)
    )
    config = Config(
        cluster=ClusterConfig(num_instances=2, num_frames=256),
        scheduler=SchedulerConfig(lanes="always"),
    )
    with measuring(config, checkpoint_of(preset), member_environment(config)) as cluster:
        results = [
            point for count in rows for point in measure(cluster, count, delays, num_steps, config)
        ]
    show(results, console)
    if json is not None:
        write_results(json, results, describe(load_before) | {"preset": preset})
    wrong = [] if quick else broken_claims(results, console)
    for claim in wrong:
        console.print(claim)
    raise typer.Exit(bool(wrong))


def batch_of(rows: int) -> Batch:
    """So many rows on each of two instances, some of them linked to the other."""
    return [
        BatchRequest(LENGTH, (here, 1 - here) if number % LINKED_SHARE == 0 else (here,))
        for here in range(2)
        for number in range(rows)
    ]


def measure(
    cluster: MeasuringCluster,
    rows: int,
    delays: tuple[float, ...],
    num_steps: int,
    config: Config,
) -> list[dict[str, Any]]:
    """Every delay with as many rows."""
    batch, points, compute_us = batch_of(rows), [], 0.0
    for late_ms in delays:
        first, second = (cluster.measure_lanes(batch, num_steps, late_ms) for _ in range(2))
        one_us, two_us = map(min, zip(first, second, strict=True))
        compute_us = compute_us or one_us
        percent = max(1, round(100 * first.two_us / first.one_us))
        table = replace(
            config.scheduler, lanes="measured", lane_table=((rows, len(batch), percent),)
        )
        chosen = 2 if table.lanes_pay(rows, 0) else 1
        points.append(
            {
                "rows": rows,
                "late_ms": late_ms,
                "one_us": round(one_us),
                "two_us": round(two_us),
                "waits_of_compute": round((one_us - compute_us) / compute_us, 2),
                "ratio": round(two_us / one_us, 3),
                "chosen": chosen,
                "regret": round(second[chosen - 1] / min(second), 3),
                "noise": round(
                    max(max(a, b) / min(a, b) for a, b in zip(first, second, strict=True)), 3
                ),
            }
        )
    return points


def broken_claims(results: list[dict[str, Any]], console: Console) -> list[str]:
    """A sentence for each claim that does not hold."""
    judged = [point for point in results if point["noise"] <= MAX_NOISE]
    if len(judged) < len(results) / 2:
        console.print(
            f"cannot judge: {len(results) - len(judged)} of {len(results)} points differ by more "
            f"than {MAX_NOISE:.2f} between two measurements; run it on a quiet machine"
        )
        return []
    wrong = [
        f"{point['rows']} rows, {point['late_ms']} ms: two lanes take {point['ratio']:.2f} of one, "
        f"not {MAX_RATIO}"
        for point in judged
        if WAITS[0] <= point["waits_of_compute"] <= WAITS[1] and point["ratio"] > MAX_RATIO
    ]
    num_right = sum(point["regret"] <= MAX_REGRET for point in judged)
    if num_right < MIN_RIGHT * len(judged):
        wrong.append(f"the choice is right at {num_right} of {len(judged)} points")
    return wrong


def show(results: list[dict[str, Any]], console: Console) -> None:
    """One line for each point."""
    table = Table(title="a step in two lanes against one")
    for name in results[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for point in results:
        table.add_row(*map(str, point.values()))
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
