"""What the bounds of a step limit on every instance: rows, attention rows, partials and links.

Enters: rows that are placed, re-bound and removed, and instances that a KV binding wins and loses.
Leaves: which bound has no room for one more row or link. Does not know: frames, tokens, whether a
row runs: a parked row keeps its place under every bound, so that it can always come back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from nanocp.config.cluster import ClusterConfig


class Commitments:
    """Counts of what is decided, by instance."""

    def __init__(self, cluster: ClusterConfig) -> None:
        num_instances = cluster.num_instances
        self._bounds = cluster.bounds
        self._nodes = [cluster.node_of(instance) for instance in range(num_instances)]
        self.rows = [0] * num_instances
        """Rows, parked rows too."""
        self.attention_rows = [0] * num_instances
        """Rows of which the instance runs attention: its own, and one for each link to it."""
        self.partials = [0] * num_instances
        """Partials that return to the instance: one for each link from it."""
        self.links = [[0] * num_instances for _ in range(num_instances)]
        """[MoE binding][other instance of the KV binding] -> links."""
        self.far_from = [0] * num_instances
        """Links from the instance to other nodes."""
        self.far_to = [0] * num_instances
        """Links to the instance from other nodes."""

    def num_links(self, instance: int) -> int:
        """Links from the instance or to it, whichever are more: what its exchange takes."""
        num_from = self.partials[instance]
        num_to = self.attention_rows[instance] - self.rows[instance]
        return num_from if num_from > num_to else num_to

    def num_far_links(self, instance: int) -> int:
        """Those of its links that leave the node: from it or to it, whichever are more."""
        num_from, num_to = self.far_from[instance], self.far_to[instance]
        return num_from if num_from > num_to else num_to

    # --- room

    def bound_reached(self, moe_binding: int, kv_binding: Iterable[int]) -> tuple[str, int] | None:
        """The first bound without room for one more row, and the instance where it is reached.

        The row is at the MoE binding, with links to the other instances of its KV binding. None if
        every bound has room.
        """
        bounds = self._bounds
        if self.rows[moe_binding] >= bounds.max_rows:
            return "max_rows", moe_binding
        if self.attention_rows[moe_binding] >= bounds.max_attention_rows:
            return "max_attention_rows", moe_binding
        num_linked = 0
        for instance in kv_binding:
            if instance != moe_binding:
                if (
                    reached := self.link_bound_reached(moe_binding, instance, num_linked)
                ) is not None:
                    return reached
                num_linked += 1
        return None

    def link_bound_reached(
        self, moe_binding: int, instance: int, num_linked: int = 0
    ) -> tuple[str, int] | None:
        """The first bound without room for one more link between the two, and where it is reached.

        None if every bound has room. num_linked: links of the same row that will be made before
        this one, and are not counted yet.
        """
        bounds = self._bounds
        if self.links[moe_binding][instance] >= bounds.max_links:
            return "max_links", instance
        if self.attention_rows[instance] >= bounds.max_attention_rows:
            return "max_attention_rows", instance
        if self.partials[moe_binding] + num_linked >= bounds.max_partials:
            return "max_partials", moe_binding
        return None

    def can_reach(self, moe_binding: int, span: Collection[int], instance: int) -> bool:
        """Whether a row has the link that pages on the instance need, or could have it.

        span: the instances that its links are committed for.
        """
        return (
            instance == moe_binding
            or instance in span
            or self.link_bound_reached(moe_binding, instance) is None
        )

    def can_rebind(self, kv_binding: Collection[int], moe_binding: int) -> bool:
        """Whether a row could move to another instance of its KV binding, its links with it."""
        # It has its place in attention on every member already; only the row and its links move.
        bounds = self._bounds
        return (
            self.rows[moe_binding] < bounds.max_rows
            and self.partials[moe_binding] + len(kv_binding) - 1 <= bounds.max_partials
            and max(map(self.links[moe_binding].__getitem__, kv_binding)) < bounds.max_links
        )

    # --- changes; sign: +1 or -1

    def count_row(self, moe_binding: int, kv_binding: Iterable[int], sign: int) -> None:
        """A row comes or goes, and its links with it."""
        self.rows[moe_binding] += sign
        self.attention_rows[moe_binding] += sign
        self.count_links(moe_binding, kv_binding, sign)

    def count_links(self, moe_binding: int, kv_binding: Iterable[int], sign: int) -> None:
        """Links of one row to these instances come or go; it needs none to its MoE binding."""
        links, attention_rows = self.links[moe_binding], self.attention_rows
        num_links = 0
        for instance in kv_binding:
            if instance != moe_binding:
                links[instance] += sign
                attention_rows[instance] += sign
                num_links += sign
                self._count_far(moe_binding, instance, sign)
        self.partials[moe_binding] += num_links

    def rebind(self, kv_binding: Collection[int], old: int, new: int) -> None:
        """A row moves from one instance to another, its links with it."""
        old_links, new_links = self.links[old], self.links[new]
        for instance in kv_binding:
            if instance != old:
                old_links[instance] -= 1
                self._count_far(old, instance, -1)
            if instance != new:
                new_links[instance] += 1
                self._count_far(new, instance, +1)
        # Every member keeps its attention row. A MoE binding outside the KV binding had one only
        # for the row itself.
        was_outside = old not in kv_binding
        self.attention_rows[old] -= was_outside
        self.partials[old] -= len(kv_binding) - 1 + was_outside
        self.partials[new] += len(kv_binding) - 1
        self.rows[old] -= 1
        self.rows[new] += 1

    def _count_far(self, moe_binding: int, instance: int, sign: int) -> None:
        if self._nodes[moe_binding] != self._nodes[instance]:
            self.far_from[moe_binding] += sign
            self.far_to[instance] += sign
