"""An instance's table: rows, routes, pages and holders, with the digest that proves both ends hold the same.

Enters: TableChanges. Leaves: the table after them, its digest, and the changes that build it from nothing.
Does not know: who plans, who runs, tensors. The brain, the controller's shadow and every instance use this one class.
"""

from __future__ import annotations

import struct
from hashlib import blake2b

from nanocp.plan import HolderChange, PageChange, RouteChange, RowChange, TableChanges

_MASK = (1 << 64) - 1
_pack_entry = struct.Struct("<BQQQ").pack
_ROW, _Q, _RES, _PAGE, _HOLDER = range(1, 6)


def _entry_digest(kind: int, a: int, b: int, c: int) -> int:
    return int.from_bytes(blake2b(_pack_entry(kind, a, b, c), digest_size=8).digest(), "little")


class InstanceTable:
    """One instance's table.

    rows: row -> request id.
    q_route, res_route: [peer][slot] -> request id (see plan.RouteChange).
    pages: request id -> {page -> frame}, pages of this instance only.
    holders: request id -> {page -> instance}, at the MoE binding, for the pages its row appends to.
    digest: sum mod 2^64 of an 8-byte blake2b per entry; an empty table has 0 (rule 7).
    """

    __slots__ = ("_holder_digests", "_page_digests", "digest", "holders", "pages", "q_route", "res_route", "rows")

    def __init__(self, num_instances: int) -> None:
        self.rows: list[int] = []
        self.q_route: list[list[int]] = [[] for _ in range(num_instances)]
        self.res_route: list[list[int]] = [[] for _ in range(num_instances)]
        self.pages: dict[int, dict[int, int]] = {}
        self.holders: dict[int, dict[int, int]] = {}
        self.digest = 0
        # Sums of each request's entries: forgetting a request then hashes nothing, however many pages it had.
        self._page_digests: dict[int, int] = {}
        self._holder_digests: dict[int, int] = {}

    def apply(self, changes: TableChanges) -> None:
        """Apply the changes and update the digest. Raises AssertionError if a list would get a hole."""
        for request_id in changes.forgotten:
            self._forget_pages(request_id)
            self._forget_holders(request_id)
        for row, row_request in changes.rows:
            self._set_dense(self.rows, _ROW, row, row_request, None)
        for peer, slot, request in changes.q_route:
            self._set_dense(self.q_route[peer], _Q, slot, request, peer)
        for peer, slot, request in changes.res_route:
            self._set_dense(self.res_route[peer], _RES, slot, request, peer)
        self._set_keyed(self.pages, self._page_digests, _PAGE, changes.pages)
        for request_id in changes.holders_forgotten:
            self._forget_holders(request_id)
        self._set_keyed(self.holders, self._holder_digests, _HOLDER, changes.holders)

    def full_changes(self) -> TableChanges:
        """The changes that build this table from an empty one: a resync equals the sum of the deltas."""
        return TableChanges(
            rows=tuple(RowChange(row, request) for row, request in enumerate(self.rows)),
            q_route=_route_changes(self.q_route),
            res_route=_route_changes(self.res_route),
            pages=tuple(
                PageChange(request, page, frame)
                for request, frames in sorted(self.pages.items())
                for page, frame in sorted(frames.items())
            ),
            holders=tuple(
                HolderChange(request, page, instance)
                for request, holders in sorted(self.holders.items())
                for page, instance in sorted(holders.items())
            ),
        )

    def _add(self, kind: int, a: int, b: int, c: int, sign: int) -> None:
        self.digest = (self.digest + sign * _entry_digest(kind, a, b, c)) & _MASK

    def _set_dense(self, entries: list[int], kind: int, index: int, request: int | None, peer: int | None) -> None:
        # An entry of a route is hashed as (peer, slot, request), a row as (row, request, 0).
        def add(value: int, sign: int) -> None:
            if peer is None:
                self._add(kind, index, value, 0, sign)
            else:
                self._add(kind, peer, index, value, sign)

        assert index <= len(entries), f"entry {index} would leave a hole behind {len(entries)} entries"
        if request is None:
            assert index == len(entries) - 1, f"only the last of {len(entries)} entries can be cleared, not {index}"
            add(entries.pop(), -1)
            return
        if index < len(entries):
            add(entries[index], -1)
            entries[index] = request
        else:
            entries.append(request)
        add(request, +1)

    def _set_keyed(
        self,
        table: dict[int, dict[int, int]],
        digests: dict[int, int],
        kind: int,
        changes: tuple[PageChange, ...] | tuple[HolderChange, ...],
    ) -> None:
        total = self.digest
        # Most of a plan is pages and holders, so the digest of an entry is written out here.
        for request, page, value in changes:
            entries = table.get(request)
            if entries is None:
                entries = table[request] = {}
                digests[request] = 0
            packed = _pack_entry(kind, request, page, value)
            added = int.from_bytes(blake2b(packed, digest_size=8).digest(), "little")
            if page in entries:
                added -= _entry_digest(kind, request, page, entries[page])
            entries[page] = value
            digests[request] += added
            total += added
        self.digest = total & _MASK

    def _forget_pages(self, request: int) -> None:
        self.pages.pop(request, None)
        self.digest = (self.digest - self._page_digests.pop(request, 0)) & _MASK

    def _forget_holders(self, request: int) -> None:
        self.holders.pop(request, None)
        self.digest = (self.digest - self._holder_digests.pop(request, 0)) & _MASK


def _route_changes(route: list[list[int]]) -> tuple[RouteChange, ...]:
    return tuple(
        RouteChange(peer, slot, request) for peer, slots in enumerate(route) for slot, request in enumerate(slots)
    )
