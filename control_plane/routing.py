"""Rows and routes as dense lists, and the Q-route with the Res-route that is its transpose (4.2.4).

Enters: which request's row is on which instance and which instances hold its KV. Leaves: rows, slots, and what changed
in them since the last window. Does not know: why a request is where it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from nanocp.plan import RouteChange, RowChange


class DenseList:
    """Request ids without holes: when one leaves, the last takes its place. Remembers what changed."""

    __slots__ = ("_before", "_index", "entries")

    def __init__(self) -> None:
        self.entries: list[int] = []
        self._index: dict[int, int] = {}
        self._before: dict[int, int | None] = {}  # index -> what was there at the last take_changes

    def add(self, request_id: int) -> None:
        """Append a request that is not in the list."""
        assert request_id not in self._index
        index = len(self.entries)
        self._before.setdefault(index, None)
        self._index[request_id] = index
        self.entries.append(request_id)

    def remove(self, request_id: int) -> None:
        """Take a request out and move the last into its place."""
        index = self._index.pop(request_id)
        last = len(self.entries) - 1
        self._before.setdefault(last, self.entries[last])
        moved = self.entries.pop()
        if index != last:
            self._before.setdefault(index, request_id)
            self.entries[index] = moved
            self._index[moved] = index

    def take_changes(self) -> list[tuple[int, int | None]]:
        """(index, request id) since the last call: new values ascending, then cleared entries descending."""
        before, self._before = self._before, {}
        entries, length = self.entries, len(self.entries)
        changes: list[tuple[int, int | None]] = []
        num_values = 0
        for index in sorted(before):
            if index >= length:
                if before[index] is not None:
                    changes.insert(num_values, (index, None))
            elif entries[index] != before[index]:
                changes.append((index, entries[index]))
                num_values += 1
        return changes


class Routes:
    """Rows of each instance, and one list of slots for each ordered pair: both ends of a link read the same list."""

    def __init__(self, num_instances: int) -> None:
        self.rows = [DenseList() for _ in range(num_instances)]
        self.links = [[DenseList() for _ in range(num_instances)] for _ in range(num_instances)]
        self._changed_rows: set[int] = set()
        self._changed_links: set[tuple[int, int]] = set()

    @property
    def has_changes(self) -> bool:
        """Whether a row or a link came or went since the changes were last taken."""
        return bool(self._changed_rows or self._changed_links)

    def add(self, request_id: int, moe_binding: int, kv_binding: Iterable[int]) -> None:
        """A row starts or comes back, with a link to every other instance of its KV binding."""
        self.rows[moe_binding].add(request_id)
        self._changed_rows.add(moe_binding)
        for holder in kv_binding:
            if holder != moe_binding:
                self.add_link(request_id, moe_binding, holder)

    def remove(self, request_id: int, moe_binding: int, kv_binding: Iterable[int]) -> None:
        """A row leaves its instance, and its links with it."""
        self.rows[moe_binding].remove(request_id)
        self._changed_rows.add(moe_binding)
        for holder in kv_binding:
            if holder != moe_binding:
                self.remove_link(request_id, moe_binding, holder)

    def add_link(self, request_id: int, moe_binding: int, holder: int) -> None:
        """The row goes to this holder from now on."""
        self.links[moe_binding][holder].add(request_id)
        self._changed_links.add((moe_binding, holder))

    def remove_link(self, request_id: int, moe_binding: int, holder: int) -> None:
        """The row goes to this holder no more."""
        self.links[moe_binding][holder].remove(request_id)
        self._changed_links.add((moe_binding, holder))

    def take_row_changes(self) -> dict[int, list[RowChange]]:
        """What changed in the rows of each instance since the last call."""
        changed, self._changed_rows = self._changed_rows, set()
        return {instance: [RowChange(*change) for change in self.rows[instance].take_changes()] for instance in changed}

    def take_route_changes(self) -> tuple[dict[int, list[RouteChange]], dict[int, list[RouteChange]]]:
        """(Q-route, Res-route) changes of each instance since the last call, ascending by peer."""
        q_route: defaultdict[int, list[RouteChange]] = defaultdict(list)
        res_route: defaultdict[int, list[RouteChange]] = defaultdict(list)
        changed, self._changed_links = self._changed_links, set()
        for moe_binding, holder in sorted(changed):
            for slot, request_id in self.links[moe_binding][holder].take_changes():
                q_route[moe_binding].append(RouteChange(holder, slot, request_id))
                res_route[holder].append(RouteChange(moe_binding, slot, request_id))
        return q_route, res_route


def build_routes(
    bindings: Iterable[tuple[int, int, Iterable[int]]], num_instances: int
) -> tuple[list[list[list[int]]], list[list[list[int]]]]:
    """(q_route, res_route) from (request id, MoE binding, KV binding), from nothing: the slow reference.

    q_route[i][j]: ids, ascending, of i's rows that go to j; res_route[j][i] is the same list (4.2.4, Figure 9).
    """
    q_route: list[list[list[int]]] = [[[] for _ in range(num_instances)] for _ in range(num_instances)]
    res_route: list[list[list[int]]] = [[[] for _ in range(num_instances)] for _ in range(num_instances)]
    for request_id, moe_binding, kv_binding in sorted(bindings, key=lambda binding: binding[0]):
        for holder in kv_binding:
            if holder != moe_binding:
                q_route[moe_binding][holder].append(request_id)
                res_route[holder][moe_binding].append(request_id)
    return q_route, res_route
