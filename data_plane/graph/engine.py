"""The ahead-of-time graph engine (5.2, Algorithm 2): prepare a step for every bucket, then stage,
look up, replay.

Enters: a function that captures a step over a context. Leaves: replays. Does not know: what a step
computes. On the CPU (pool.py) a captured step is a prepared callable; staging, contexts and lookup
are the same as on a GPU (device_pool.py, cuda_graphs.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from data_plane.graph.buckets import Bucket, BucketTable
from data_plane.graph.pool_cpu import RowState, StepTables

Capture = Callable[[Any], Callable[[], None]]
"""Of a context of the pool: what runs its step."""


class Pool(Protocol):
    """Tables and row state of all buckets."""

    @property
    def staging(self) -> Sequence[StepTables]:
        """Two, for the host to fill."""

    @property
    def rows(self) -> RowState:
        """What the next step starts from, for the host to fill."""

    def context(self, bucket: Bucket) -> Any:
        """The bucket's slice."""

    def upload(self, parity: int) -> None:
        """The staged tables of this parity are filled in."""

    def adopt(self, parity: int) -> None:
        """The next step reads the staged tables of this parity."""


class GraphEngine:
    """Captured steps of one instance."""

    def __init__(self, pool: Pool, buckets: BucketTable, capture: Capture) -> None:
        self._pool = pool
        self._buckets = buckets
        self._capture = capture
        self._steps: dict[Bucket, Callable[[], None]] = {}
        self._window = 0
        self._is_staged = False
        self._step: Callable[[], None] | None = None
        self.bucket = Bucket(0, 0)
        """Of the step that was replayed last."""

    @property
    def rows(self) -> RowState:
        """What the next step starts from, for the host to fill."""
        return self._pool.rows

    def prepare(self, progress: Callable[[int, int], None] = lambda done, total: None) -> int:
        """Capture every bucket, largest first; `progress(done, total)` after each. Returns the
        number of graphs."""
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

    def staged(self) -> None:
        """The tables that `stage` handed out are filled in."""
        self._pool.upload(self._window & 1)

    def replay(self) -> None:
        """Run one step. The window's first replay copies the staged tables into the live ones
        before anything else."""
        if self._is_staged:
            staged = self._pool.staging[self._window & 1]
            self._pool.adopt(self._window & 1)
            self.bucket = self._buckets.lookup(
                int(staged.num_rows[0]), int(staged.num_received.sum())
            )
            self._step = self._steps[self.bucket]
            self._is_staged = False
        assert self._step is not None, "replay before the first stage"
        self._step()
