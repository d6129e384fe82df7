"""The pool: routing tables and row state, allocated once by the bounds; a bucket's context is a
prefix of it (5.2).

Enters: the bounds. Leaves: two staging copies for the host to fill, one live copy for the steps to
read, and contexts. Does not know: requests, plans, the model. The payload pool (Q, RES) is the
exchange's regions, by the same bounds.

Legend: B rows, A received attention rows, N instances, L links, P pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from data_plane.graph.buckets import Bucket
from nanocp.config import ClusterConfig
from nanocp.plan import PAGE_SIZE, PageRun


@dataclass(frozen=True, slots=True)
class LocalPages:
    """The pages of attention rows in this instance's frames, ascending by page, those of coming
    tokens too."""

    num_pages: np.ndarray
    """[rows] int32; 0 for padding."""
    page: np.ndarray
    """[rows, P] int32."""
    frame: np.ndarray
    """[rows, P] int32."""

    @classmethod
    def empty(cls, num_rows: int, max_pages: int) -> LocalPages:
        """All rows without a page."""
        shape = (num_rows, max_pages)
        return cls(
            np.zeros(num_rows, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        )

    def prefix(self, num_rows: int) -> LocalPages:
        """The first rows, as views."""
        return LocalPages(self.num_pages[:num_rows], self.page[:num_rows], self.frame[:num_rows])

    def fill(self, row: int, runs: Sequence[PageRun]) -> None:
        """Set a row from its runs, ascending; frames of coming tokens too: a step reads up to its
        position."""
        end = 0
        for _, first_page, num_pages, frame in runs:
            begin, end = end, end + num_pages
            self.page[row, begin:end] = np.arange(first_page, first_page + num_pages)
            self.frame[row, begin:end] = np.arange(frame, frame + num_pages)
        self.num_pages[row] = end

    def copy_from(self, other: LocalPages, num_rows: int) -> None:
        """Copy the first rows; only as many columns as some row uses."""
        self.num_pages[:] = other.num_pages
        width = int(other.num_pages[:num_rows].max(initial=0))
        self.page[:num_rows, :width] = other.page[:num_rows, :width]
        self.frame[:num_rows, :width] = other.frame[:num_rows, :width]


@dataclass(frozen=True, slots=True)
class StepTables:
    """What a window fixes: shapes, routes and pages. Written by the host, read by every step of the
    window."""

    num_rows: np.ndarray
    """[1] int32: rows without padding."""
    send_row: np.ndarray
    """Q-route, [N, L] int32: slot -> row that is sent to the peer."""
    num_sent: np.ndarray
    """[N] int32: links to the peer."""
    num_received: np.ndarray
    """Res-route, [N] int32: links from the peer. Received row = links of lower peers + slot."""
    tail_page: np.ndarray
    """[B] int32: the page of the window's first append of the row."""
    tail_holder: np.ndarray
    """[B, 2] int32: holder of tail_page and of the page after it."""
    own: LocalPages
    received: LocalPages

    @classmethod
    def empty(cls, cluster: ClusterConfig) -> StepTables:
        """Tables for no rows."""
        bounds, peers = cluster.bounds, cluster.num_instances
        max_pages = min(-(-cluster.max_model_len // PAGE_SIZE), cluster.num_frames)
        return cls(
            num_rows=np.zeros(1, np.int32),
            send_row=np.zeros((peers, bounds.max_links), np.int32),
            num_sent=np.zeros(peers, np.int32),
            num_received=np.zeros(peers, np.int32),
            tail_page=np.zeros(bounds.max_rows, np.int32),
            tail_holder=np.zeros((bounds.max_rows, 2), np.int32),
            own=LocalPages.empty(bounds.max_rows, max_pages),
            received=LocalPages.empty(bounds.max_attention_rows, max_pages),
        )

    def copy_from(self, other: StepTables) -> None:
        """Copy everything."""
        for field in fields(self):
            value = getattr(other, field.name)
            if isinstance(value, np.ndarray):
                getattr(self, field.name)[...] = value
        self.own.copy_from(other.own, int(other.num_rows[0]))
        self.received.copy_from(other.received, int(other.num_received.sum()))


@dataclass(frozen=True, slots=True)
class RowState:
    """What every step advances: one entry a row."""

    token: np.ndarray
    """[B] int64: input token of the next step."""
    position: np.ndarray
    """[B] int64: its position."""
    live: np.ndarray
    """[B] bool: False for rows that stopped and for padding."""

    def prefix(self, num_rows: int) -> RowState:
        """The first rows, as views."""
        return RowState(self.token[:num_rows], self.position[:num_rows], self.live[:num_rows])


@dataclass(frozen=True, slots=True)
class StepContext:
    """The prefix of the pool that one bucket's captured step reads and writes."""

    bucket: Bucket
    tables: StepTables
    """The live tables; `own` and `received` are cut to the bucket."""
    rows: RowState


class ContextPool:
    """One pool for all buckets."""

    def __init__(self, cluster: ClusterConfig) -> None:
        max_rows = cluster.bounds.max_rows
        self.tables = StepTables.empty(cluster)
        self.staging = (StepTables.empty(cluster), StepTables.empty(cluster))
        self.rows = RowState(
            np.zeros(max_rows, np.int64), np.zeros(max_rows, np.int64), np.zeros(max_rows, np.bool_)
        )

    def upload(self, parity: int) -> None:
        """See engine.Pool: nothing is elsewhere."""

    def adopt(self, parity: int) -> None:
        """See engine.Pool."""
        self.tables.copy_from(self.staging[parity])

    def context(self, bucket: Bucket) -> StepContext:
        """The bucket's slice. Contexts of all buckets overlap: only one runs at a time."""
        live = self.tables
        tables = StepTables(
            num_rows=live.num_rows,
            send_row=live.send_row,
            num_sent=live.num_sent,
            num_received=live.num_received,
            tail_page=live.tail_page[: bucket.num_rows],
            tail_holder=live.tail_holder[: bucket.num_rows],
            own=live.own.prefix(bucket.num_rows),
            received=live.received.prefix(bucket.num_received),
        )
        return StepContext(bucket, tables, self.rows.prefix(bucket.num_rows))
