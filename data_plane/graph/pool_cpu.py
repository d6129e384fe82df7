"""The pool on the CPU: routing tables and row state, allocated once by the bounds.

The host fills two staging copies, steps read a live one, by prefixes. (The paper's section 5.2.)

Legend: B rows, A received attention rows, N instances, L links, P pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from data_plane.graph.buckets import Bucket
from nanocp.config.cluster import ClusterConfig
from nanocp.values.plan import PAGE_SIZE
from nanocp.values.table_changes import PageRun


@dataclass(frozen=True, slots=True)
class LocalPages:
    """The ascending pages of attention rows in this instance's frames, also of coming tokens."""

    num_pages: np.ndarray
    """[rows] int32; 0 for padding."""
    page: np.ndarray
    """[rows, P] int32."""
    frame: np.ndarray
    """[rows, P] int32."""

    @classmethod
    def empty(cls, num_rows: int, max_pages: int) -> LocalPages:
        """Return tables of `num_rows` rows without pages."""
        shape = (num_rows, max_pages)
        return cls(
            num_pages=np.zeros(num_rows, np.int32),
            page=np.zeros(shape, np.int32),
            frame=np.zeros(shape, np.int32),
        )

    def prefix(self, num_rows: int) -> LocalPages:
        """Return views of the first rows."""
        return LocalPages(
            num_pages=self.num_pages[:num_rows],
            page=self.page[:num_rows],
            frame=self.frame[:num_rows],
        )

    def fill(self, row: int, runs: Sequence[PageRun]) -> None:
        """Set the pages of a row from its ascending runs."""
        end = 0
        for run in runs:
            begin, end = end, end + run.num_pages
            self.page[row, begin:end] = np.arange(run.first_page, run.first_page + run.num_pages)
            self.frame[row, begin:end] = np.arange(run.frame, run.frame + run.num_pages)
        self.num_pages[row] = end

    def copy_from(self, other: LocalPages, num_rows: int) -> None:
        """Copy the first rows, with only the used columns."""
        self.num_pages[:] = other.num_pages
        width = int(other.num_pages[:num_rows].max(initial=0))
        self.page[:num_rows, :width] = other.page[:num_rows, :width]
        self.frame[:num_rows, :width] = other.frame[:num_rows, :width]


@dataclass(frozen=True, slots=True)
class StepTables:
    """The shapes, routes and pages of a window: the host writes them, its steps read them."""

    num_rows: np.ndarray
    """[1] int32, without padding."""
    send_row: np.ndarray
    """Q-route, [N, L] int32: the row that goes to each peer by each slot."""
    num_sent: np.ndarray
    """[N] int32, by peer."""
    num_received: np.ndarray
    """Res-route, [N] int32, by peer; a received row's number is lower peers' links plus its slot.
    """
    tail_page: np.ndarray
    """[B] int32: the page of the row's first append in the window."""
    tail_holder: np.ndarray
    """[B, 2] int32: the holders of tail_page and of the page after it."""
    carry_frame: np.ndarray
    """[B] int32: of the recurrent state; 0 without linear attention layers."""
    own: LocalPages
    received: LocalPages

    @classmethod
    def empty(cls, cluster: ClusterConfig) -> StepTables:
        """Return tables of the cluster's bounds, without rows."""
        bounds, peers = cluster.bounds, cluster.num_instances
        max_pages = min(-(-cluster.max_model_len // PAGE_SIZE), cluster.num_frames)
        return cls(
            num_rows=np.zeros(1, np.int32),
            send_row=np.zeros((peers, bounds.max_links), np.int32),
            num_sent=np.zeros(peers, np.int32),
            num_received=np.zeros(peers, np.int32),
            tail_page=np.zeros(bounds.max_rows, np.int32),
            tail_holder=np.zeros((bounds.max_rows, 2), np.int32),
            carry_frame=np.zeros(bounds.max_rows, np.int32),
            own=LocalPages.empty(bounds.max_rows, max_pages),
            received=LocalPages.empty(bounds.max_attention_rows, max_pages),
        )

    def copy_from(self, other: StepTables) -> None:
        """Copy all tables, but only used pages."""
        for field in fields(self):
            value = getattr(other, field.name)
            if isinstance(value, np.ndarray):
                getattr(self, field.name)[...] = value
        self.own.copy_from(other.own, int(other.num_rows[0]))
        self.received.copy_from(other.received, int(other.num_received.sum()))


@dataclass(frozen=True, slots=True)
class RowState:
    """The state of each row that every step advances."""

    token: np.ndarray
    """[B] int64: the next step's input."""
    position: np.ndarray
    """[B] int64."""
    live: np.ndarray
    """[B] bool: False for stopped rows and padding."""

    def prefix(self, num_rows: int) -> RowState:
        """Return views of the first rows."""
        return RowState(
            token=self.token[:num_rows],
            position=self.position[:num_rows],
            live=self.live[:num_rows],
        )


@dataclass(frozen=True, slots=True)
class StepContext:
    """The prefix of the pool for one bucket's captured step."""

    bucket: Bucket
    tables: StepTables
    rows: RowState


class ContextPool:
    """The pool of an instance on the CPU; an engine.Pool."""

    def __init__(self, cluster: ClusterConfig) -> None:
        max_rows = cluster.bounds.max_rows
        self.tables = StepTables.empty(cluster)
        self.staging = (StepTables.empty(cluster), StepTables.empty(cluster))
        self.rows = RowState(
            token=np.zeros(max_rows, np.int64),
            position=np.zeros(max_rows, np.int64),
            live=np.zeros(max_rows, np.bool_),
        )

    def upload(self, parity: int) -> None:
        """Do nothing: the tables are in place already."""

    def adopt(self, parity: int) -> None:
        """Copy the staged tables of this parity over the live ones."""
        self.tables.copy_from(self.staging[parity])

    def context(self, bucket: Bucket) -> StepContext:
        """Return the bucket's slice of the pool; only one step runs at a time."""
        live = self.tables
        tables = StepTables(
            num_rows=live.num_rows,
            send_row=live.send_row,
            num_sent=live.num_sent,
            num_received=live.num_received,
            tail_page=live.tail_page[: bucket.num_rows],
            tail_holder=live.tail_holder[: bucket.num_rows],
            carry_frame=live.carry_frame[: bucket.num_rows],
            own=live.own.prefix(bucket.num_rows),
            received=live.received.prefix(bucket.num_received),
        )
        return StepContext(bucket, tables, self.rows.prefix(bucket.num_rows))
