"""Measures `scheduler.lane_table`: step time in two lanes over one, by batch size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from data_plane.profiling.batch import Batch, linked_batches, local_batches
from nanocp.config.cluster import ClusterConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.values.plan import PAGE_SIZE

if TYPE_CHECKING:
    from data_plane.profiling.cluster import LaneTimes

LaneTable = tuple[tuple[int, int, int], ...]
_LENGTH = 256


def lane_batches(cluster: ClusterConfig) -> Iterator[tuple[int, int, Batch]]:
    """(rows, links, batch) of an instance, without links and with a link for each row."""
    num_instances, bounds = cluster.num_instances, cluster.bounds
    tokens = min(cluster.num_frames * PAGE_SIZE, bounds.max_rows * _LENGTH)
    batches = (
        *local_batches(num_instances, bounds.max_rows, tokens),
        *linked_batches(num_instances, bounds, tokens),
    )
    sizes = set()
    for batch in batches:
        rows = len(batch) // num_instances
        size = rows, rows * (len(batch[0].kv_binding) - 1)
        if rows > 1 and size not in sizes:
            sizes.add(size)
            yield *size, batch


def measure_lane_table(cluster: ClusterConfig, measure: Callable[[Batch], LaneTimes]) -> LaneTable:
    """Measure every size once."""
    points = []
    for rows, links, batch in lane_batches(cluster):
        times = measure(batch)
        points.append((rows, links, max(1, round(100 * times.two_us / times.one_us))))
    return tuple(sorted(points))


def with_lane_table(scheduler: SchedulerConfig, table: LaneTable) -> SchedulerConfig:
    """The scheduler's configuration with two lanes where the table says so, else with one."""
    scheduler = replace(scheduler, lanes="measured", lane_table=table)
    if not any(scheduler.lanes_pay(rows, links) for rows, links, _ in table):
        return replace(scheduler, lanes="off")
    return scheduler
