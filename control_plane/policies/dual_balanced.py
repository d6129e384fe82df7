"""Algorithm 1 of the paper: rows balanced by re-binding, KV balanced by length-aware WaterFill (4.2).

Enters: the decided state. Leaves: choices. Does not know: predicted times; that is cost_aware's, which is not here yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from control_plane.cluster_state import ClusterState
from control_plane.cp_degree import cp_degree
from control_plane.growth import choose_holder
from control_plane.policies.policy import Choice
from control_plane.request import Request, num_pages
from control_plane.waterfill import waterfill
from nanocp.config import SchedulerConfig


class DualBalanced:
    """Policy `dual_balanced`."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config

    def place(self, state: ClusterState, prompt_len: int, window: int) -> Choice:
        """The node with the fewest rows, a degree by length, and WaterFill over the least loaded (4.2.2, 4.2.3)."""
        config = self._config
        node = least_rows_node(state)
        pages = num_pages(prompt_len)
        degree = min(cp_degree(prompt_len, config.cp_degree_buckets, config.cp_degree_max), len(node))
        # A request that fills more instances than that takes more, from other nodes if it must.
        degree = min(max(degree, num_instances_needed(state, pages)), degree_limit(state, pages))
        moe_binding = min(node, key=lambda i: (state.num_rows[i], state.kv_tokens(i), i))
        members = choose_members(state, moe_binding, degree)
        shares = waterfill([num_pages(state.kv_tokens(i)) for i in members], pages)
        return Choice(moe_binding, {i: share for i, share in zip(members, shares, strict=True) if share})

    def rebindings(self, state: ClusterState, window: int) -> Iterator[tuple[Request, int]]:
        """Rows move within their KV binding where that lowers the higher of the two counts (4.2.1, rule 5)."""
        rows = state.num_rows
        fewest_rows = min(rows)
        if max(rows) - fewest_rows < 2:
            return
        # One-instance requests have no other choice: they are in the counts and need no visit.
        for _, request_id in tuple(state.multi):
            request = state.requests[request_id]
            if rows[request.moe_binding] < fewest_rows + 2:
                continue
            fewest = min(request.pages_on, key=lambda i: (rows[i], i))
            if rows[fewest] + 1 < rows[request.moe_binding]:
                yield request, fewest

    def holder(self, state: ClusterState, request: Request, window: int) -> int | None:
        """The default order."""
        return choose_holder(state, request)


def least_rows_node(state: ClusterState) -> range:
    """The node whose instances own the fewest requests, by KV load and order among equals."""
    rows = [sum(state.num_rows[node.start : node.stop]) for node in state.nodes]
    nodes = [node for node, num in zip(state.nodes, rows, strict=True) if num == min(rows)]
    return nodes[0] if len(nodes) == 1 else min(nodes, key=lambda node: sum(map(state.kv_tokens, node)))


def num_instances_needed(state: ClusterState, pages: int) -> int:
    """Fewest instances whose frames could hold the pages."""
    return -(-pages // state.cluster.num_frames)


def degree_limit(state: ClusterState, pages: int) -> int:
    """Most instances that can share the pages: one page each, and a partial from all but the MoE binding."""
    return min(pages, state.cluster.num_instances, 1 + state.bounds.max_partials)


def choose_members(state: ClusterState, moe_binding: int, degree: int) -> Sequence[int]:
    """The MoE binding and the degree - 1 others with the least KV, its node before the rest; the MoE binding first."""
    if degree == 1:
        return [moe_binding]
    home = state.cluster.node_of(moe_binding)
    others = sorted(
        (i for i in range(state.cluster.num_instances) if i != moe_binding),
        key=lambda i: (state.cluster.node_of(i) != home, state.kv_tokens(i), i),
    )
    return [moe_binding, *others[: degree - 1]]
