"""Measures `scheduler.lane_table`: the best order of two lanes by batch size, and its time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from data_plane.profiling.batch import Batch, linked_batches, local_batches
from nanocp.config.cluster import ClusterConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.overlap.interference import COMPUTE, NETWORK, Interference
from nanocp.overlap.operations import Operation, without_empty
from nanocp.overlap.policies.scheduled import LANE_TAGS, priority_of
from nanocp.values.plan import PAGE_SIZE

if TYPE_CHECKING:
    from data_plane.profiling.cluster import LaneTimes
    from data_plane.profiling.phase_clock import Parts
    from nanocp.overlap.search import BestSchedule

LaneTable = tuple[tuple[int, int, int, str], ...]
PLAIN = "behind_first"
_LENGTH = 256
_SEARCH_S = 0.5
_ONE_THREAD = Interference(memory=((0, 0), (1, 1)), network=((0, 0), (0.05, 1), (1, 1)))
"""On a CPU a put travels by itself."""


def lane_batches(cluster: ClusterConfig) -> Iterator[tuple[int, int, Batch]]:
    """(rows, links, batch) of an instance, without links and with."""
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


def layer_of(whole: Parts, half: Parts) -> tuple[Operation, ...]:
    """A lane's operators and waits, by steps of all rows and of half."""
    kinds = (1, NETWORK, "wait for "), (0, COMPUTE, "")
    first, *chain = [(tag, *kind) for tag in LANE_TAGS for kind in kinds]
    operations: list[Operation] = []
    for tag, which, resource, prefix in (*chain, first):
        us, half_us = (parts.get(tag, (0.0, 0.0))[which] for parts in (whole, half))
        fixed_us = min(max(2 * half_us - us, 0.0), us)
        needs = (operations[-1].name,) if operations else ()
        before = () if operations else (f"wait for {tag}",)
        operations.append(Operation(prefix + tag, resource, us, fixed_us, needs, before))
    return without_empty(operations)


def candidates(whole: Parts, half: Parts) -> tuple[str, ...]:
    """Plain halves, and the two best orders that a search finds; else policies of papers."""
    from nanocp.overlap.search import search

    found: list[BestSchedule] = []
    search([layer_of(whole, half)], 0.5, _ONE_THREAD, _SEARCH_S, found.append)
    searched = [order for each in found[::-1] if (order := priority_of(each.schedule))]
    return PLAIN, *[*dict.fromkeys(searched), "nanoflow", "dual_batch_overlap"][:2]


def lane_point(
    rows: int, links: int, times: Sequence[LaneTimes], orders: Sequence[str]
) -> tuple[int, int, int, str]:
    """An entry of the table. times: of one lane, then of each order."""
    one, *two = times
    us, number = min((each.us, number) for number, each in enumerate(two))
    return rows, links, max(1, round(100 * us / one.us)), orders[number]


def with_lane_table(scheduler: SchedulerConfig, table: LaneTable) -> SchedulerConfig:
    """The configuration with two lanes where the table says so."""
    scheduler = replace(scheduler, lanes="measured", lane_table=table)
    if not any(scheduler.lane_order(*size) for *size, _, _ in table):
        return replace(scheduler, lanes="off")
    return scheduler
