"""The graph engine: prepare a step for every bucket ahead of time, then stage, look up, replay.

On the CPU a captured step is a prepared callable. (The paper's section 5.2, Algorithm 2.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, Protocol

from data_plane.graph.buckets import Bucket, BucketTable
from data_plane.graph.pool_cpu import RowState, StepTables

Capture = Callable[[Any], Callable[[], None]]


class Pool(Protocol):
    """Tables and row state for the captured steps of all buckets."""

    @property
    def staging(self) -> Sequence[StepTables]:
        """Two copies of the tables, which the host fills in turn."""

    @property
    def rows(self) -> RowState:
        """The rows' state before the next step."""

    def context(self, bucket: Bucket) -> Any:
        """Return the pool's slice for the bucket's captured step."""

    def upload(self, parity: int) -> None:
        """Start copying the staged tables of this parity."""

    def adopt(self, parity: int) -> None:
        """Make the staged tables of this parity the next step's."""


class GraphEngine:
    """The captured steps of one instance."""

    def __init__(self, pool: Pool, buckets: BucketTable, capture: Capture) -> None:
        self.pool = pool
        self._buckets = buckets
        self._capture = capture
        self._steps: dict[Bucket, Callable[[], None]] = {}
        self._window, self._width = 0, 1
        self._is_staged = False
        self._step: Callable[[], None] | None = None
        self.bucket = Bucket(0, 0)

    @property
    def rows(self) -> RowState:
        """The rows' state before the next step."""
        return self.pool.rows

    def prepare(self, progress: Callable[[int, int], None] = lambda done, total: None) -> int:
        """Capture every bucket, largest first, with `progress(done, total)`; return how many."""
        buckets = self._buckets.all()
        for done, bucket in enumerate(buckets, start=1):
            self._steps[bucket] = self._capture(self.pool.context(bucket))
            progress(done, len(buckets))
        return len(buckets)

    def stage(self, window: int, width: int = 1) -> StepTables:
        """Return the staging tables of this window, to be filled before its first `replay`.

        width: step rows of each row, side by side. The last window may still read the other tables.
        """
        self._window, self._width = window, width
        self._is_staged = True
        return self.pool.staging[window & 1]

    def staged(self) -> None:
        """Report that the tables of `stage` are filled."""
        self.pool.upload(self._window & 1)

    def replay(self) -> None:
        """Run one step."""
        self.next_step()()

    def next_step(self) -> Callable[[], None]:
        """Return the next step's captured call; a window's first adopts the staged tables."""
        if self._is_staged:
            self.adopt()
            self._step = self._steps[self.bucket]
        assert self._step is not None, "replay before the first stage"
        return self._step

    def adopt(self) -> None:
        """Adopt the staged tables, if any, and look up their bucket."""
        if self._is_staged:
            staged = self.pool.staging[self._window & 1]
            self.pool.adopt(self._window & 1)
            received = int(staged.num_received.sum())
            has_links = bool(received or staged.num_sent.any())
            self.bucket = self._buckets.lookup(
                int(staged.num_rows[0]), received, self._width, has_links
            )
            self._is_staged = False


class PairedEngine:
    """The captured steps of two lanes: each of both, in an order and the smallest bucket."""

    def __init__(
        self,
        lanes: Sequence[GraphEngine],
        buckets: BucketTable,
        num_orders: int,
        capture: Callable[[Bucket, int], Callable[[], None]],
    ) -> None:
        """lanes: the stages of each lane, in these buckets. capture: captures both in an order."""
        self._lanes = lanes
        self._buckets, self._num_orders = buckets, num_orders
        self._capture = capture
        self._steps: dict[tuple[Bucket, int], Callable[[], None]] = {}

    def prepare(self, progress: Callable[[int, int], None] = lambda done, total: None) -> int:
        """Capture every bucket, largest first; returns the number of graphs."""
        steps = [*product(self._buckets.all(), range(self._num_orders))]
        for done, step in enumerate(steps, start=1):
            self._steps[step] = self._capture(*step)
            progress(done, len(steps))
        return len(steps)

    def replay(self, order: int) -> None:
        """Run one step of both lanes, each staged by its own engine, in an order by its number."""
        for lane in self._lanes:
            lane.adopt()
        bucket = Bucket(
            max(lane.bucket.num_rows for lane in self._lanes),
            max(lane.bucket.num_received for lane in self._lanes),
            has_links=any(lane.bucket.has_links for lane in self._lanes),
        )
        for lane in self._lanes:
            lane.bucket = bucket
        self._steps[bucket, order]()
