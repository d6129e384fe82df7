"""Changes of an instance's table between windows.

`None` clears an entry. Rows and slots are dense: only the last entry is cleared, after a move.
"""

from __future__ import annotations

from typing import NamedTuple

PAGE_SIZE = 64
"""Tokens in a page and its frame (FlashMLA's page size)."""
CARRY_PAGE = 1 << 24
"""First page number of a request's state in linear attention layers, behind all KV pages and in
frames of their own."""


class RowChange(NamedTuple):
    """Row `row` of a lane belongs to the request from this window on."""

    row: int
    request_id: int | None
    lane: int = 0
    """0 or 1; always 0 without lanes."""


class RouteChange(NamedTuple):
    """Slot `slot` for `peer` belongs to the request from this window on.

    In the Q-route of instance i with peer j, i sends the row to slot `slot` of i's region at j. In
    the Res-route of j with peer i, the partial returns to that slot of j's region at i. So
    q_route[i][j] == res_route[j][i] (4.2.4).
    """

    peer: int
    slot: int
    request_id: int | None
    lane: int = 0
    """The row's lane; each lane has its own slots."""


class PageRun(NamedTuple):
    """A run of pages in frames of the instance: first_page + i is in frame + i.

    Page p has positions 64p .. 64p + 63.
    """

    request_id: int
    first_page: int
    num_pages: int
    frame: int


class TargetRun(NamedTuple):
    """A run's target: first_page + i into frame + i of the instance."""

    first_page: int
    num_pages: int
    instance: int
    frame: int

    def num_tokens_of(self, num_tokens: int) -> int:
        """Tokens of the first num_tokens with KV in it; 0: it has a state."""
        before = self.first_page * PAGE_SIZE
        return max(min(self.num_pages * PAGE_SIZE, num_tokens - before), 0)


class PageClear(NamedTuple):
    """Pages first_page .. first_page + num_pages - 1 of the request leave."""

    request_id: int
    first_page: int
    num_pages: int


class HolderChange(NamedTuple):
    """From first_page to the request's next entry, the row appends to pages at `instance`.

    Without one it appends to its MoE binding's.
    """

    request_id: int
    first_page: int
    instance: int


class TableChanges(NamedTuple):
    """Changes of one instance's table, in the order of the fields."""

    forgotten: tuple[int, ...] = ()
    """Requests that lose their pages and holders here."""
    rows: tuple[RowChange, ...] = ()
    q_route: tuple[RouteChange, ...] = ()
    res_route: tuple[RouteChange, ...] = ()
    cleared: tuple[PageClear, ...] = ()
    pages: tuple[PageRun, ...] = ()
    holders_forgotten: tuple[int, ...] = ()
    """Requests that lose only holders: their MoE binding moved."""
    holders: tuple[HolderChange, ...] = ()
