"""The pool on the CPU: routing tables and row state, allocated once by the bounds.

Enters: the bounds. Leaves: two staging copies for the host to fill, one live copy for the steps to
read, and for each bucket a context, which is a prefix of the pool. Does not know: requests, plans,
the model. The payload pool (Q, RES) is the exchange's regions, by the same bounds. (The paper's
section 5.2.)

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
    """The pages of attention rows that are in this instance's frames, ascending by page.

    Pages of coming tokens are among them.
    """

    num_pages: np.ndarray
    """[rows] int32: pages of each row; 0 for padding."""
    page: np.ndarray
    """[rows, P] int32: page numbers of each row."""
    frame: np.ndarray
    """[rows, P] int32: the frame of each page."""

    @classmethod
    def empty(cls, num_rows: int, max_pages: int) -> LocalPages:
        """Tables of `num_rows` rows, none of which has a page."""
        shape = (num_rows, max_pages)
        return cls(
            num_pages=np.zeros(num_rows, np.int32),
            page=np.zeros(shape, np.int32),
            frame=np.zeros(shape, np.int32),
        )

    def prefix(self, num_rows: int) -> LocalPages:
        """The first rows, as views."""
        return LocalPages(
            num_pages=self.num_pages[:num_rows],
            page=self.page[:num_rows],
            frame=self.frame[:num_rows],
        )

    def fill(self, row: int, runs: Sequence[PageRun]) -> None:
        """Set the pages of a row from its runs, which ascend.

        Pages of coming tokens may be among them: a step reads only up to its position.
        """
        end = 0
        for run in runs:
            begin, end = end, end + run.num_pages
            self.page[row, begin:end] = np.arange(run.first_page, run.first_page + run.num_pages)
            self.frame[row, begin:end] = np.arange(run.frame, run.frame + run.num_pages)
        self.num_pages[row] = end

    def copy_from(self, other: LocalPages, num_rows: int) -> None:
        """Copy the first rows, with only the columns that some row uses."""
        self.num_pages[:] = other.num_pages
        width = int(other.num_pages[:num_rows].max(initial=0))
        self.page[:num_rows, :width] = other.page[:num_rows, :width]
        self.frame[:num_rows, :width] = other.frame[:num_rows, :width]


@dataclass(frozen=True, slots=True)
class StepTables:
    """What a window fixes: shapes, routes and pages.

    The host writes them; every step of the window reads them.
    """

    num_rows: np.ndarray
    """[1] int32: number of rows without padding."""
    send_row: np.ndarray
    """Q-route, [N, L] int32: for each peer and slot, the row that is sent."""
    num_sent: np.ndarray
    """[N] int32: number of links to each peer."""
    num_received: np.ndarray
    """Res-route, [N] int32: number of links from each peer.

    The number of a received row is the number of links from lower peers, plus its slot.
    """
    tail_page: np.ndarray
    """[B] int32: the page that the row's first append of the window goes to."""
    tail_holder: np.ndarray
    """[B, 2] int32: the holders of tail_page and of the page after it."""
    carry_frame: np.ndarray
    """[B] int32: where the row's state of linear attention layers lies; 0 without such layers."""
    own: LocalPages
    """Pages of this instance's rows, B of them."""
    received: LocalPages
    """Pages of the received attention rows, A of them."""

    @classmethod
    def empty(cls, cluster: ClusterConfig) -> StepTables:
        """Tables of the cluster's bounds, without any row."""
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
        """Copy all tables; of the pages only those that count."""
        for field in fields(self):
            value = getattr(other, field.name)
            if isinstance(value, np.ndarray):
                getattr(self, field.name)[...] = value
        self.own.copy_from(other.own, int(other.num_rows[0]))
        self.received.copy_from(other.received, int(other.num_received.sum()))


@dataclass(frozen=True, slots=True)
class RowState:
    """What every step advances, with one entry for each row."""

    token: np.ndarray
    """[B] int64: input token of the next step."""
    position: np.ndarray
    """[B] int64: position of that token."""
    live: np.ndarray
    """[B] bool: False for rows that stopped and for padding."""

    def prefix(self, num_rows: int) -> RowState:
        """The first rows, as views."""
        return RowState(
            token=self.token[:num_rows],
            position=self.position[:num_rows],
            live=self.live[:num_rows],
        )


@dataclass(frozen=True, slots=True)
class StepContext:
    """The prefix of the pool that one bucket's captured step reads and writes."""

    bucket: Bucket
    tables: StepTables
    """The live tables, cut to the bucket's rows."""
    rows: RowState


class ContextPool:
    """The pool of an instance on the CPU: one for all buckets. See engine.Pool."""

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
        """Do nothing: the tables are already where the steps run. See engine.Pool."""

    def adopt(self, parity: int) -> None:
        """Copy the staged tables of this parity over the live ones. See engine.Pool."""
        self.tables.copy_from(self.staging[parity])

    def context(self, bucket: Bucket) -> StepContext:
        """The bucket's slice of the pool. All contexts overlap, so only one step runs at a time."""
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
