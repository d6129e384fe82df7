"""Rows and routes as dense lists; the Res-route is the transpose of the Q-route (4.2.4)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial

from nanocp.values.table import LINK, NUM_LANES, ROW, entry_digest, kind_in_lane
from nanocp.values.table_changes import RouteChange, RowChange

# A window makes hundreds of these; this way they cost half.
_row_change: Callable[[tuple[int, int | None, int]], RowChange] = partial(tuple.__new__, RowChange)
_route_change: Callable[[tuple[int, int, int | None, int]], RouteChange] = partial(
    tuple.__new__, RouteChange
)


class DenseList:
    """Request ids without holes, and their changes: when one leaves, the last takes its place."""

    __slots__ = ("_index", "_name", "_overwritten", "_told", "entries")

    def __init__(self, kind: int, a: int = 0, b: int = 0) -> None:
        """(kind, a, b): the prefix of the digests of all its entries."""
        self.entries: list[int] = []
        self._name = kind, a, b
        self._index: dict[int, int] = {}
        self._told: list[int] = []
        """Digests of the entries at the last take_changes."""
        self._overwritten: list[int] = []
        """Indices where another request was at the last take_changes, unless appended or
        cleared."""

    def add(self, request_id: int) -> None:
        """Append a request that is not in the list."""
        entries = self.entries
        index = self._index[request_id] = len(entries)
        entries.append(request_id)
        if index < len(self._told):
            self._overwritten.append(index)

    def remove(self, request_id: int) -> None:
        """Remove a request, and move the last one into its place."""
        index = self._index.pop(request_id)
        last = self.entries.pop()
        if last != request_id:
            self.entries[index] = last
            self._index[last] = index
            if index < len(self._told):
                self._overwritten.append(index)

    def take_changes(self) -> tuple[list[tuple[int, int | None]], int]:
        """Return the changes since the last call, and their sum of digests.

        A change is (index, request id): new values ascending, then cleared entries (None)
        descending.
        """
        entries, told = self.entries, self._told
        kind, a, b = self._name
        num_entries, num_told = len(entries), len(told)
        changes: list[tuple[int, int | None]] = []
        difference = 0
        if self._overwritten:
            for index in sorted(self._overwritten):
                if index < num_entries:
                    digest = entry_digest(kind, a, b, index, entries[index])
                    if digest != told[index]:
                        changes.append((index, entries[index]))
                        difference += digest - told[index]
                        told[index] = digest
            self._overwritten.clear()
        if num_entries > num_told:
            for index in range(num_told, num_entries):
                digest = entry_digest(kind, a, b, index, entries[index])
                changes.append((index, entries[index]))
                difference += digest
                told.append(digest)
        else:
            while num_told > num_entries:
                num_told -= 1
                changes.append((num_told, None))
                difference -= told.pop()
        return changes, difference


class Routes:
    """Rows of each instance, and one list of slots for each link of each lane.

    Both ends of a link read the same list.
    """

    def __init__(self, num_instances: int) -> None:
        self._num_instances = num_instances
        self._rows = [
            DenseList(kind_in_lane(ROW, lane))
            for lane in range(NUM_LANES)
            for _ in range(num_instances)
        ]
        """Rows by lane * num_instances + MoE binding."""
        self._links: dict[int, DenseList] = {}
        """Slots by (lane * num_instances + MoE binding) * num_instances + holder, once used."""
        self._changed_rows: set[int] = set()
        self._changed_links: set[int] = set()
        self.digests = [0] * num_instances
        """Sum over the entries of each instance, at the last taken changes."""

    @property
    def has_changes(self) -> bool:
        """Return whether a row or a link changed since the last taken changes."""
        return bool(self._changed_rows or self._changed_links)

    def rows(self, instance: int) -> list[int]:
        """Return request ids of the instance's rows; lane 1 follows lane 0."""
        num = self._num_instances
        return [r for lane in range(NUM_LANES) for r in self._rows[lane * num + instance].entries]

    def slots(self, moe_binding: int, holder: int) -> list[int]:
        """Return ids of the links between two instances; lane 1 follows lane 0."""
        num = self._num_instances
        pairs = ((lane * num + moe_binding) * num + holder for lane in range(NUM_LANES))
        return [r for pair in pairs if pair in self._links for r in self._links[pair].entries]

    def add(
        self, request_id: int, moe_binding: int, kv_binding: Iterable[int], lane: int = 0
    ) -> None:
        """Add a row with its links."""
        row_list = lane * self._num_instances + moe_binding
        self._rows[row_list].add(request_id)
        self._changed_rows.add(row_list)
        self.add_links(request_id, moe_binding, kv_binding, lane)

    def remove(
        self, request_id: int, moe_binding: int, kv_binding: Iterable[int], lane: int = 0
    ) -> None:
        """Remove a row and its links."""
        row_list = lane * self._num_instances + moe_binding
        self._rows[row_list].remove(request_id)
        self._changed_rows.add(row_list)
        self.remove_links(request_id, moe_binding, kv_binding, lane)

    def add_links(
        self, request_id: int, moe_binding: int, holders: Iterable[int], lane: int = 0
    ) -> None:
        """Link the row to these holders; its MoE binding needs no link."""
        first = (lane * self._num_instances + moe_binding) * self._num_instances
        links, changed = self._links, self._changed_links
        for holder in holders:
            if holder != moe_binding:
                pair = first + holder
                if pair not in links:
                    links[pair] = DenseList(kind_in_lane(LINK, lane), moe_binding, holder)
                links[pair].add(request_id)
                changed.add(pair)

    def remove_links(
        self, request_id: int, moe_binding: int, holders: Iterable[int], lane: int = 0
    ) -> None:
        """Remove the row's links to these holders."""
        first = (lane * self._num_instances + moe_binding) * self._num_instances
        links, changed = self._links, self._changed_links
        for holder in holders:
            if holder != moe_binding:
                links[first + holder].remove(request_id)
                changed.add(first + holder)

    def take_row_changes(self) -> dict[int, list[RowChange]]:
        """Return the row changes of each instance since the last call."""
        changed, self._changed_rows = self._changed_rows, set()
        row_changes: dict[int, list[RowChange]] = {}
        for row_list in sorted(changed):
            lane, instance = divmod(row_list, self._num_instances)
            changes, difference = self._rows[row_list].take_changes()
            told = [_row_change((row, request_id, lane)) for row, request_id in changes]
            row_changes.setdefault(instance, []).extend(told)
            self.digests[instance] += difference
        return row_changes

    def take_route_changes(
        self,
    ) -> tuple[dict[int, list[RouteChange]], dict[int, list[RouteChange]]]:
        """Return (Q-route, Res-route) changes of each instance since the last call, by peer."""
        q_route: defaultdict[int, list[RouteChange]] = defaultdict(list)
        res_route: defaultdict[int, list[RouteChange]] = defaultdict(list)
        changed, self._changed_links = self._changed_links, set()
        links, digests = self._links, self.digests
        for pair in sorted(changed):
            row_list, holder = divmod(pair, self._num_instances)
            lane, moe_binding = divmod(row_list, self._num_instances)
            changes, difference = links[pair].take_changes()
            q_of_sender, res_of_holder = q_route[moe_binding], res_route[holder]
            for slot, request_id in changes:
                q_of_sender.append(_route_change((holder, slot, request_id, lane)))
                res_of_holder.append(_route_change((moe_binding, slot, request_id, lane)))
            digests[moe_binding] += difference
            digests[holder] += difference
        return q_route, res_route


def build_routes(
    bindings: Iterable[tuple[int, int, Iterable[int]]], num_instances: int
) -> tuple[list[list[list[int]]], list[list[list[int]]]]:
    """Build (q_route, res_route) from nothing: the slow reference of Routes.

    bindings: (request id, MoE binding, KV binding). q_route[i][j]: ids, ascending, of i's rows that
    go to j; res_route[j][i] is the same list (4.2.4, Figure 9).
    """
    q_route: list[list[list[int]]] = [
        [[] for _ in range(num_instances)] for _ in range(num_instances)
    ]
    res_route: list[list[list[int]]] = [
        [[] for _ in range(num_instances)] for _ in range(num_instances)
    ]
    for request_id, moe_binding, kv_binding in sorted(bindings, key=lambda binding: binding[0]):
        for holder in kv_binding:
            if holder != moe_binding:
                q_route[moe_binding][holder].append(request_id)
                res_route[holder][moe_binding].append(request_id)
    return q_route, res_route
