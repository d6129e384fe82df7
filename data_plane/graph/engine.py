"""The ahead-of-time graph engine (5.2, Algorithm 2): prepare a step for every bucket, then stage, look up, replay.

Enters: a function that captures a step over a context. Leaves: replays. Does not know: what a step computes.
On the CPU a captured step is a prepared callable; staging, copy, contexts and lookup are the same as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

from data_plane.graph.buckets import Bucket, BucketTable
from data_plane.graph.pool import ContextPool, StepContext, StepTables

Capture = Callable[[StepContext], Callable[[], None]]


class GraphEngine:
    """Captured steps of one instance."""

    def __init__(self, pool: ContextPool, buckets: BucketTable, capture: Capture) -> None:
        self._pool = pool
        self._buckets = buckets
        self._capture = capture
        self._steps: dict[Bucket, Callable[[], None]] = {}
        self._window = 0
        self._is_staged = False
        self._step: Callable[[], None] | None = None
        self.bucket = Bucket(0, 0)
        """Of the step that was replayed last."""

    def prepare(self, progress: Callable[[int, int], None] = lambda done, total: None) -> int:
        """Capture every bucket, largest first; `progress(done, total)` after each. Returns the number of graphs."""
        buckets = self._buckets.all()
        for done, bucket in enumerate(buckets, start=1):
            self._steps[bucket] = self._capture(self._pool.context(bucket))
            progress(done, len(buckets))
        return len(buckets)

    def stage(self, window: int) -> StepTables:
        """The staging tables of this window's parity, to be filled before its first `replay`.

        Two copies: the window before may still run from the live tables while this one is filled.
        """
        self._window = window
        self._is_staged = True
        return self._pool.staging[window & 1]

    def replay(self) -> None:
        """Run one step. The window's first replay copies the staged tables into the live ones before anything else."""
        if self._is_staged:
            tables = self._pool.tables
            tables.copy_from(self._pool.staging[self._window & 1])
            self.bucket = self._buckets.lookup(int(tables.num_rows[0]), int(tables.num_received.sum()))
            self._step = self._steps[self.bucket]
            self._is_staged = False
        assert self._step is not None, "replay before the first stage"
        self._step()
