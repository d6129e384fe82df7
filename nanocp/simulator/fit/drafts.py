"""Measures `scheduler.draft_table`: step time with drafts over step time without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from data_plane.profiling.batch import Batch, local_batches
from nanocp.config.cluster import ClusterConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.values.plan import PAGE_SIZE

_LENGTH = 1024
"""Mean tokens of a row, at most."""

Measure = Callable[[Batch, int], tuple[float, float]]


def with_draft_table(
    scheduler: SchedulerConfig, cluster: ClusterConfig, measure: Measure
) -> SchedulerConfig:
    """The scheduler's configuration with drafts where the measured table says that they pay."""
    num_instances, bounds = cluster.num_instances, cluster.bounds
    table = []
    for drafts in range(1, scheduler.num_drafts + 1):
        max_rows = min(bounds.max_rows, bounds.max_attention_rows) // (1 + drafts)
        frames = cluster.num_frames // (1 + drafts)
        most = min(frames * PAGE_SIZE, max_rows * _LENGTH)
        for batch in local_batches(num_instances, max_rows, most):
            rows, without_with = len(batch) // num_instances, measure(batch, drafts)
            percent = max(1, round(100 * without_with[1] / without_with[0]))
            table.append((rows, rows * batch[0].length, drafts, percent))
    return replace(scheduler, drafting="measured", draft_table=tuple(sorted(table)))
