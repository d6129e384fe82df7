"""An instance's table: rows, routes, pages and holders, with a digest to compare copies."""

from __future__ import annotations

import struct
from hashlib import blake2b

from nanocp.values.table_changes import (
    HolderChange,
    PageClear,
    PageRun,
    RouteChange,
    RowChange,
    TableChanges,
)

DIGEST_MASK = (1 << 64) - 1
ROW, LINK, PAGE, HOLDER = range(1, 5)
"""Kinds of entries."""
NUM_LANES = 2
"""Lanes that a table may have rows and links in (docs/develop/overlap.md)."""
_LANE_KINDS = 16
_no_entry = blake2b(digest_size=8)  # a copy of it costs less than a new one
_pack_entry = struct.Struct("<QQQQQ").pack
_from_bytes = int.from_bytes


def entry_digest(kind: int, a: int, b: int, c: int, d: int) -> int:
    """The 64-bit digest of one entry.

    Entries are (ROW, 0, 0, row, request), (PAGE, *run), (HOLDER, request, first page, instance, 0)
    and (LINK, MoE binding, holder, slot, request); a link is in both ends' tables.
    """
    entry = _no_entry.copy()
    entry.update(_pack_entry(kind, a, b, c, d))
    return _from_bytes(entry.digest(), "little")


def kind_in_lane(kind: int, lane: int) -> int:
    """The kind of a row or link in a lane; unchanged for lane 0."""
    return kind + _LANE_KINDS * lane


class LaneTable:
    """Rows and links of one lane.

    rows: row -> request id. q_route, res_route: [peer][slot] -> request id.
    """

    __slots__ = ("_q_digests", "_res_digests", "_row_digests", "q_route", "res_route", "rows")

    def __init__(self, num_instances: int) -> None:
        self.rows: list[int] = []
        self.q_route: list[list[int]] = [[] for _ in range(num_instances)]
        self.res_route: list[list[int]] = [[] for _ in range(num_instances)]
        # Digests are kept, so that what leaves is not hashed again: one for each entry of a list.
        self._row_digests: list[int] = []
        self._q_digests: list[list[int]] = [[] for _ in range(num_instances)]
        self._res_digests: list[list[int]] = [[] for _ in range(num_instances)]


class InstanceTable:
    """One instance's table; nanocp.values.table_changes explains its entries.

    pages: request id -> runs, ascending. holders: request id -> (first page, instance), ascending.
    digest: sum mod 2^64 of an 8-byte blake2b per entry, 0 for none (protocol.md, table digests).
    """

    __slots__ = (
        "_holder_digests",
        "_page_digests",
        "digest",
        "holders",
        "instance",
        "lanes",
        "pages",
    )

    def __init__(self, instance: int, num_instances: int) -> None:
        self.instance = instance
        self.lanes = tuple(LaneTable(num_instances) for _ in range(NUM_LANES))
        self.pages: dict[int, list[PageRun]] = {}
        self.holders: dict[int, list[tuple[int, int]]] = {}
        self.digest = 0
        # One sum for the pages and one for the holders of a request.
        self._page_digests: dict[int, int] = {}
        self._holder_digests: dict[int, int] = {}

    @property
    def rows(self) -> list[int]:
        """Row -> request id; lane 1 follows lane 0."""
        return self.lanes[0].rows + self.lanes[1].rows

    @property
    def q_route(self) -> list[list[int]]:
        """[peer][slot] -> request id sent there; lane 1 follows lane 0."""
        return _joined(*(lane.q_route for lane in self.lanes))

    @property
    def res_route(self) -> list[list[int]]:
        """[peer][slot] -> request id from there; lane 1 follows lane 0."""
        return _joined(*(lane.res_route for lane in self.lanes))

    def apply(self, changes: TableChanges) -> None:
        """Apply the changes and update the digest.

        Raises AssertionError if a list gets a hole, or runs of a request overlap.
        """
        forgotten, rows, q_route, res_route, cleared, pages, holders_forgotten, holders = changes
        total, own = self.digest, self.instance
        for request_id in forgotten:
            self.pages.pop(request_id, None)
            self.holders.pop(request_id, None)
            total -= self._page_digests.pop(request_id, 0) + self._holder_digests.pop(request_id, 0)
        for row, request, lane in rows:
            kind, of_lane = kind_in_lane(ROW, lane), self.lanes[lane]
            digest = 0 if request is None else entry_digest(kind, 0, 0, row, request)
            total += _set_dense(of_lane.rows, of_lane._row_digests, row, request, digest)
        for peer, slot, request, lane in q_route:
            kind, of_lane = kind_in_lane(LINK, lane), self.lanes[lane]
            digest = 0 if request is None else entry_digest(kind, own, peer, slot, request)
            total += _set_dense(
                of_lane.q_route[peer], of_lane._q_digests[peer], slot, request, digest
            )
        for peer, slot, request, lane in res_route:
            kind, of_lane = kind_in_lane(LINK, lane), self.lanes[lane]
            digest = 0 if request is None else entry_digest(kind, peer, own, slot, request)
            total += _set_dense(
                of_lane.res_route[peer], of_lane._res_digests[peer], slot, request, digest
            )
        for clear in cleared:
            total += self._clear_pages(clear)
        for run in pages:
            total += self._add_run(run)
        for request_id in holders_forgotten:
            self.holders.pop(request_id, None)
            total -= self._holder_digests.pop(request_id, 0)
        for request_id, first_page, instance in holders:
            entries = self.holders.setdefault(request_id, [])
            assert not entries or entries[-1][0] < first_page, (
                f"holders of request {request_id} do not ascend"
            )
            entries.append((first_page, instance))
            digest = entry_digest(HOLDER, request_id, first_page, instance, 0)
            self._holder_digests[request_id] = self._holder_digests.get(request_id, 0) + digest
            total += digest
        self.digest = total & DIGEST_MASK

    def holder(self, request_id: int, page: int) -> int:
        """The instance of a page that the row appends to."""
        for first_page, instance in reversed(self.holders.get(request_id, ())):
            if first_page <= page:
                return instance
        return self.instance

    def frames(self, request_id: int) -> dict[int, int]:
        """page -> frame of the request's pages here."""
        return {
            run.first_page + index: run.frame + index
            for run in self.pages.get(request_id, ())
            for index in range(run.num_pages)
        }

    def full_changes(self) -> TableChanges:
        """Changes that build this table from nothing, for a resync."""
        return TableChanges(
            rows=tuple(
                RowChange(row, request, number)
                for number, lane in enumerate(self.lanes)
                for row, request in enumerate(lane.rows)
            ),
            q_route=_route_changes([lane.q_route for lane in self.lanes]),
            res_route=_route_changes([lane.res_route for lane in self.lanes]),
            pages=tuple(run for _, runs in sorted(self.pages.items()) for run in runs),
            holders=tuple(
                HolderChange(request, *entry)
                for request, entries in sorted(self.holders.items())
                for entry in entries
            ),
        )

    def _add_run(self, run: PageRun) -> int:
        request_id, first_page, num_pages, frame = run
        digest = entry_digest(PAGE, request_id, first_page, num_pages, frame)
        runs = self.pages.get(request_id)
        if runs is None:
            self.pages[request_id] = [run]
            self._page_digests[request_id] = digest
            return digest
        self._page_digests[request_id] += digest
        if runs[-1].first_page > first_page:
            runs.append(run)
            runs.sort(key=lambda other: other.first_page)
            index = runs.index(run)
            assert first_page + num_pages <= runs[index + 1].first_page, (
                f"{run} overlaps {runs[index + 1]}"
            )
        else:
            index = len(runs)
            runs.append(run)
        if index:
            before = runs[index - 1]
            assert before.first_page + before.num_pages <= first_page, f"{run} overlaps {before}"
        return digest

    def _clear_pages(self, clear: PageClear) -> int:
        request_id, begin, num_pages = clear
        end = begin + num_pages
        kept: list[PageRun] = []
        change = num_cut = 0
        for run in self.pages.get(request_id, ()):
            first, last = run.first_page, run.first_page + run.num_pages
            if last <= begin or first >= end:
                kept.append(run)
                continue
            change -= entry_digest(PAGE, *run)
            num_cut += min(last, end) - max(first, begin)
            for part in parts_outside(run, begin, end):
                kept.append(part)
                change += entry_digest(PAGE, *part)
        assert num_cut == num_pages, f"{clear}, but only {num_cut} of these pages are here"
        if kept:
            self.pages[request_id] = kept
            self._page_digests[request_id] += change
        else:
            del self.pages[request_id], self._page_digests[request_id]
        return change


def parts_outside(run: PageRun, begin: int, end: int) -> list[PageRun]:
    """Parts of a run outside the pages begin .. end - 1."""
    request_id, first, num_pages, frame = run
    parts = ((first, begin), (end, first + num_pages))
    return [PageRun(request_id, a, b - a, frame + a - first) for a, b in parts if a < b]


def _set_dense(
    entries: list[int], digests: list[int], index: int, request: int | None, digest: int
) -> int:
    """Set, append or clear (request None: the last) an entry; returns the digest's change."""
    length = len(entries)
    if request is None:
        assert index == length - 1, f"only the last of {length} entries can be cleared, not {index}"
        entries.pop()
        return -digests.pop()
    if index < length:
        change = digest - digests[index]
        entries[index] = request
        digests[index] = digest
        return change
    assert index == length, f"entry {index} would leave a hole after {length} entries"
    entries.append(request)
    digests.append(digest)
    return digest


def _joined(first: list[list[int]], second: list[list[int]]) -> list[list[int]]:
    return [a + b for a, b in zip(first, second, strict=True)]


def _route_changes(lanes: list[list[list[int]]]) -> tuple[RouteChange, ...]:
    return tuple(
        RouteChange(peer, slot, request, lane)
        for lane, route in enumerate(lanes)
        for peer, slots in enumerate(route)
        for slot, request in enumerate(slots)
    )
