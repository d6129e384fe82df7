"""What changes in one instance's table from one window to the next.

Enters: nothing. Leaves: frozen values of a plan, which nanocp.values.table applies. Does not know:
why they change. `None` clears an entry. Rows and slots are dense: only the last entry of a list is
ever cleared, after a move.
"""

from __future__ import annotations

from typing import NamedTuple

PAGE_SIZE = 64
"""Tokens in a page, and in the frame that holds it (FlashMLA's page size)."""
CARRY_PAGE = 1 << 24
"""Number of the first page of a request's state in linear attention layers: behind all pages of KV.

These pages are in frames of their own, behind an instance's frames of KV.
"""


class RowChange(NamedTuple):
    """Row `row` of a lane of this instance belongs to the request from this window on."""

    row: int
    request_id: int | None
    lane: int = 0
    """0 or 1; every row is in lane 0 if the cluster runs one lane."""


class RouteChange(NamedTuple):
    """Slot `slot` between this instance and `peer` belongs to the request from this window on.

    In the Q-route of instance i with peer j: i sends the request's row to slot `slot` of i's region
    at j. In the Res-route of j with peer i: what arrives there is that request, and its partial
    returns to the same slot of j's region at i. So q_route[i][j] == res_route[j][i], always: one is
    the transpose of the other (4.2.4).
    """

    peer: int
    slot: int
    request_id: int | None
    lane: int = 0
    """The lane of the request's row: each lane has slots of its own."""


class PageRun(NamedTuple):
    """A run of pages in a run of frames of the instance: first_page + i is in frame + i.

    Page p is for token positions 64p .. 64p + 63. Frames for coming tokens are shipped ahead of
    them.
    """

    request_id: int
    first_page: int
    num_pages: int
    frame: int


class TargetRun(NamedTuple):
    """Where a run of pages goes: first_page + i into frame + i of the instance."""

    first_page: int
    num_pages: int
    instance: int
    frame: int

    def num_tokens_of(self, num_tokens: int) -> int:
        """How many of a request's first num_tokens tokens have KV in it; 0: it has a state."""
        before = self.first_page * PAGE_SIZE
        return max(min(self.num_pages * PAGE_SIZE, num_tokens - before), 0)


class PageClear(NamedTuple):
    """Pages first_page .. first_page + num_pages - 1 of the request leave this instance."""

    request_id: int
    first_page: int
    num_pages: int


class HolderChange(NamedTuple):
    """From first_page on, up to the request's next entry, the row appends to pages at `instance`.

    Before its first entry, and without any, the row appends to its MoE binding's own pages.
    """

    request_id: int
    first_page: int
    instance: int


class TableChanges(NamedTuple):
    """What changes in one instance's table. Applied in the order of the fields."""

    forgotten: tuple[int, ...] = ()
    """Requests whose pages and holders leave this table."""
    rows: tuple[RowChange, ...] = ()
    q_route: tuple[RouteChange, ...] = ()
    res_route: tuple[RouteChange, ...] = ()
    cleared: tuple[PageClear, ...] = ()
    pages: tuple[PageRun, ...] = ()
    holders_forgotten: tuple[int, ...] = ()
    """Requests whose holders (not pages) leave this table: their MoE binding moved away."""
    holders: tuple[HolderChange, ...] = ()
