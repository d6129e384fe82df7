"""Two lanes of a decode step against one, on two instances with links of limited rates.

Enters: a preset's checkpoint. Leaves: a table, and a list of {rows, mb_per_s, one_us, two_us,
halves_on_time, waits_of_compute, hidden, ...}. Does not know: how lanes take turns. A put is
published when a link of the rate would have carried it. Times are taken by turns; the fastest step
of each counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.kit.bench import BenchRun, Claim, at_most, bench
from benchmarks.kit.measured_twice import (
    Ways,
    claims_of_choices,
    claims_of_long_waits,
    point_of,
    quiet,
)
from benchmarks.kit.service import checkpoint_of
from data_plane.profiling.batch import Batch, BatchRequest
from data_plane.profiling.cluster import MeasuringCluster, measuring
from nanocp.config.cluster import BoundsConfig, ClusterConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.config.whole import Config
from nanocp.serve.service import member_environment
from nanocp.simulator.fit.lanes import candidates, lane_point

MAX_RATIO = 0.85
"""Claim: two lanes take at most this much of one lane where waits are as long as compute."""
MAX_HALVES = 1.2
"""That is claimed where two lanes take at most this much of one lane's time with puts on time."""
WAITS = (0.7, 1.2)
"""What counts as "as long": waits over compute."""
MAX_OF_HALVES = 0.97
"""Claim: there the chosen order takes at most this much of the order "behind_first"."""
MAX_OF_ONE = 1.02
"""Claim: what is chosen takes at most this much of one lane where two are no faster."""
WANTED_WAITS = (0.0, 0.3, 0.8, 1.0, 2.0)
"""Waits over compute that rates are chosen for."""
PROBE_NS = 20.0
"""Time for a byte at which calibration begins."""
LENGTH = 256
MAX_ROWS = 128
LINKED_SHARE = 4
"""One of so many rows is at CP degree 2."""


@bench("Under a minute: preset tiny, few points; judges no claim.")
def main(run: BenchRun) -> None:
    """Measure every point twice: one half chooses, as a profile does, the other judges."""
    preset, rows, wanted, num_steps = (
        ("tiny", (8,), (0.0, 1.0), 3)
        if run.is_quick
        else ("small", (8, 32, MAX_ROWS), WANTED_WAITS, 5)
    )
    bounds = BoundsConfig(max_rows=MAX_ROWS, max_links=MAX_ROWS, max_attention_rows=2 * MAX_ROWS)
    config = Config(
        cluster=ClusterConfig(num_instances=2, num_frames=5 * MAX_ROWS, bounds=bounds),
        scheduler=SchedulerConfig(lanes="always"),
    )
    with measuring(config, checkpoint_of(preset), member_environment(config)) as cluster:
        points = (
            point for count in rows for point in measure(cluster, count, wanted, num_steps, config)
        )
        results = list(run.track(points, "measuring", len(rows) * len(wanted)))
    run.table("a step in two lanes against one", results)
    run.keep(*results, preset=preset)
    judged, reason = quiet(results)
    run.judge(claims_of(judged if judged else results), run.too_quick or reason)


def batch_of(rows: int) -> Batch:
    """So many rows on each of two instances, some of them linked to the other."""
    return [
        BatchRequest(LENGTH, (here, 1 - here) if number % LINKED_SHARE == 0 else (here,))
        for here in range(2)
        for number in range(rows)
    ]


def measure(
    cluster: MeasuringCluster, rows: int, wanted: tuple[float, ...], num_steps: int, config: Config
) -> Iterator[dict[str, Any]]:
    """A point for each wanted length of waits; steps on time are measured beside each."""
    batch = batch_of(rows)

    def waits_of_compute(ns_per_byte: float) -> float:
        return cluster.measure_lanes(batch, num_steps, ns_per_byte, ())[0].us / compute_us - 1

    on_time = cluster.measure_lanes(batch, num_steps)
    compute_us = on_time[0].us
    probe_ns = PROBE_NS
    while (probed := waits_of_compute(probe_ns)) < 0.5 and probe_ns < 64 * PROBE_NS:
        probe_ns *= 2
    # From there on waits grow in proportion. What is shorter, a step's own compute hides.
    ns_per_wait = probe_ns / max(waits_of_compute(2 * probe_ns) - probed, 0.1)
    for share in wanted:
        ns_per_byte = share and max(probe_ns + (share - probed) * ns_per_wait, 1.0)
        ((*_, whole),), ((*_, half),) = (
            cluster.measure_lanes(part, num_steps, ns_per_byte, ())
            for part in (batch, batch_of(rows // 2))
        )
        orders = candidates(whole, half)
        first = cluster.measure_lanes(batch, num_steps, ns_per_byte, orders)
        before, on_time = on_time, cluster.measure_lanes(batch, num_steps)
        second = cluster.measure_lanes(batch, num_steps, ns_per_byte, orders)
        compute_us, halves_us = (min(ways)[0] for ways in zip(before, on_time, strict=True))
        entry = lane_point(rows, len(batch), first, orders)
        table = replace(config.scheduler, lanes="measured", lane_table=(entry,))
        chosen = 1 + orders.index(entry[3])
        (one_us, one_waited_us), (two_us, two_waited_us) = (
            min(first[way][:2], second[way][:2]) for way in (0, chosen)
        )
        yield {
            "rows": rows,
            "mb_per_s": round(1000 / ns_per_byte, 1) if share else "on time",
            "one_us": round(one_us),
            "two_us": round(two_us),
            "halves_on_time": round(halves_us / compute_us, 2),
            "waits_of_compute": round((one_us - compute_us) / compute_us, 2),
            "hidden": round(1 - two_waited_us / one_waited_us, 2) if share else None,
            "order": entry[3],
            "of_plain_halves": round(second[chosen].us / second[1].us, 3),
            **point_of(
                *(Ways(each[0].us, each[chosen].us) for each in (first, second)),
                other_is_chosen=table.lane_order(rows, 0) > 0,
            ),
        }


def claims_of(points: list[dict[str, Any]]) -> Iterator[Claim]:
    """What is claimed of points; nothing without points."""
    yield from claims_of_choices(points, MAX_OF_ONE)
    long = [each for each in points if WAITS[0] <= float(each["waits_of_compute"]) <= WAITS[1]]
    as_long = [each for each in long if each["halves_on_time"] <= MAX_HALVES]
    named = (
        (f"{point['rows']} rows, a wait of {point['waits_of_compute']} of compute", point)
        for point in as_long
    )
    yield from claims_of_long_waits(named, "two lanes take {} of one", MAX_RATIO)
    for point in long:
        what = f"{point['rows']} rows: {point['order']} takes {{}} of plain halves"
        yield at_most(what, point["of_plain_halves"], MAX_OF_HALVES)
    if points and not as_long:
        yield Claim(
            f"a point has waits of {WAITS[0]} to {WAITS[1]} of compute, and halves on time take "
            f"{MAX_HALVES} of the whole",
            False,
        )


if __name__ == "__main__":
    main()
