"""Counts of rows, attention rows, partials and links that the bounds of a step limit.

A parked row keeps its place, so that it can always come back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from nanocp.config.cluster import ClusterConfig


class Commitments:
    """The decided counts of every instance."""

    def __init__(self, cluster: ClusterConfig) -> None:
        num_instances = cluster.num_instances
        self._bounds = cluster.bounds
        self._nodes = [cluster.node_of(instance) for instance in range(num_instances)]
        self.rows = [0] * num_instances
        """Rows, including parked ones."""
        self.attention_rows = [0] * num_instances
        """Rows that the instance runs attention for: its own, and one for each link to it."""
        self.partials = [0] * num_instances
        """Partials that return to the instance: one for each link from it."""
        self.links = [[0] * num_instances for _ in range(num_instances)]
        """Links by [MoE binding][other instance of the KV binding]."""
        self.far_from = [0] * num_instances
        """Links from the instance to other nodes."""
        self.far_to = [0] * num_instances
        """Links to the instance from other nodes."""

    def num_links(self, instance: int) -> int:
        """Return the larger of the links from and to the instance: what its exchange takes."""
        num_from = self.partials[instance]
        num_to = self.attention_rows[instance] - self.rows[instance]
        return num_from if num_from > num_to else num_to

    def num_far_links(self, instance: int) -> int:
        """Return the larger of the links to and from other nodes."""
        num_from, num_to = self.far_from[instance], self.far_to[instance]
        return num_from if num_from > num_to else num_to

    # --- room

    def bound_reached(self, moe_binding: int, kv_binding: Iterable[int]) -> tuple[str, int] | None:
        """Return the first bound without room for one more row, and the instance that reached it.

        The row has links to its KV binding. None: it fits.
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
        """Return the first bound without room for one more link, and the instance that reached it.

        None: it fits. num_linked: links of this row that are made first and not counted yet.
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
        """Return whether a row has the link that pages on the instance need, or could get it.

        span: the instances with committed links.
        """
        return (
            instance == moe_binding
            or instance in span
            or self.link_bound_reached(moe_binding, instance) is None
        )

    def can_rebind(self, kv_binding: Collection[int], moe_binding: int) -> bool:
        """Return whether a row and its links could move to another instance of its KV binding."""
        # It has its place in attention on every member already; only the row and its links move.
        bounds = self._bounds
        return (
            self.rows[moe_binding] < bounds.max_rows
            and self.partials[moe_binding] + len(kv_binding) - 1 <= bounds.max_partials
            and max(map(self.links[moe_binding].__getitem__, kv_binding)) < bounds.max_links
        )

    # --- changes; sign: +1 or -1

    def count_row(self, moe_binding: int, kv_binding: Iterable[int], sign: int) -> None:
        """Count a row and its links: +1 when it comes, -1 when it goes."""
        self.rows[moe_binding] += sign
        self.attention_rows[moe_binding] += sign
        self.count_links(moe_binding, kv_binding, sign)

    def count_links(self, moe_binding: int, kv_binding: Iterable[int], sign: int) -> None:
        """Count links of one row to these instances; its MoE binding needs none."""
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
        """Move the counts of a row and its links to another instance."""
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
