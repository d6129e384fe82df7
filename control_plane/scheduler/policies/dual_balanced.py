"""Algorithm 1 of the paper (4.2): re-binding balances rows, length-aware WaterFill balances KV."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from operator import itemgetter

from control_plane.scheduler.policies.cp_degree import cp_degree
from control_plane.scheduler.policies.policy import Explanation, Policy
from control_plane.scheduler.policies.waterfill import waterfill
from control_plane.scheduler.state.cluster_state import ClusterState
from control_plane.scheduler.state.proposal import Proposal
from control_plane.scheduler.state.request import Request, num_pages
from nanocp.config.scheduler import SchedulerConfig
from nanocp.values.plan import Arrival

_WINDOWS_PER_CARRY_MOVE = 8


class DualBalanced(Policy):
    """Policy `dual_balanced`."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config

    def place(self, state: ClusterState, arrival: Arrival, window: int) -> Proposal:
        """Propose the node with the fewest rows and WaterFill over its least loaded instances.

        The degree is chosen by length. (The paper's sections 4.2.2 and 4.2.3.)
        """
        config = self._config
        node = least_rows_node(state)
        pages = num_pages(arrival.prompt_len)
        moe_binding = least_rows_instance(state, node)
        degree = min(
            cp_degree(arrival.prompt_len, config.cp_degree_buckets, config.cp_degree_max), len(node)
        )
        if degree == 1 and pages <= state.cluster.num_frames:
            return Proposal(moe_binding, {moe_binding: pages})
        # A request that fills more instances than that takes more, from other nodes if it must.
        degree = min(max(degree, num_instances_needed(state, pages)), degree_limit(state, pages))
        return water_filled(state, choose_members(state, moe_binding, degree), pages)

    def explain(self, state: ClusterState, arrival: Arrival, proposal: Proposal) -> Explanation:
        """Explain node, MoE binding, degree and levels, in the rule's order."""
        config, moe_binding = self._config, proposal.moe_binding
        home = state.cluster.node_of(moe_binding)
        nodes = [(rows, f"node {node}") for node, rows in enumerate(state.loads.node_rows)]
        rows = [(state.loads.num_rows[i], f"instance {i}") for i in state.nodes[home]]
        degree = cp_degree(arrival.prompt_len, config.cp_degree_buckets, config.cp_degree_max)
        sentences = [
            _fewest("of the nodes", nodes, home),
            _fewest("of its instances", rows, moe_binding - state.nodes[home].start),
            f"a prompt of {arrival.prompt_len:,} tokens has CP degree {degree} by its length",
        ]
        needed = num_instances_needed(state, num_pages(arrival.prompt_len))
        if needed > 1:
            sentences.append(f"its pages fill the frames of {needed} instances")
        if len(proposal.shares) > 1:
            levels = [
                (i, num_pages(state.loads.kv_tokens(i)), share)
                for i, share in proposal.shares.items()
            ]
            filled = ", ".join(
                f"{i}: {level:,} + {share:,} = {level + share:,}" for i, level, share in levels
            )
            sentences.append(
                f"WaterFill over the MoE binding and those with the least KV, in pages: {filled}"
            )
        return Explanation(tuple(sentences))

    def rebindings(
        self, state: ClusterState, window: int, within_node: bool = False
    ) -> Iterator[tuple[Request, int]]:
        """Move rows within their KV binding where that lowers the higher of two instances' counts.

        within_node: only to instances of the row's node. Rows with recurrent states stop while they
        move, so they move only in every eighth window (4.2.1; protocol.md, hand-offs).
        """
        if state.cluster.carry_pages and window % _WINDOWS_PER_CARRY_MOVE:
            return
        rows, requests = state.loads.num_rows, state.requests
        most_kept = min(rows) + 1
        if max(rows) <= most_kept:
            return
        rows_of = rows.__getitem__
        # One-instance requests have no other choice: they are in the counts and need no visit.
        for _, request_id in tuple(state.linked.by_degree):
            request = requests[request_id]
            num_rows = rows[request.moe_binding]
            if num_rows <= most_kept:
                continue
            holders: Collection[int] = request.pages_on
            if within_node:
                node = state.nodes[state.cluster.node_of(request.moe_binding)]
                holders = [i for i in holders if i in node]
            if min(map(rows_of, holders), default=num_rows) + 1 < num_rows:
                yield request, min(holders, key=lambda i: (rows[i], i))


def _fewest(whose: str, num_rows: list[tuple[int, str]], chosen: int) -> str:
    rows, name = num_rows.pop(chosen)
    sentence = f"{name} has the fewest rows {whose}, {rows:,}"
    if not num_rows:
        return sentence
    next_rows, next_name = min(num_rows, key=itemgetter(0))
    if next_rows == rows:
        return f"{sentence}, and the least KV of those with as many, as {next_name} has"
    return f"{sentence}; {next_name} comes next with {next_rows:,}"


def least_rows_node(state: ClusterState) -> range:
    """Return the node with the fewest rows; KV load and order break ties."""
    rows = state.loads.node_rows
    fewest = min(rows)
    if rows.count(fewest) == 1:
        return state.nodes[rows.index(fewest)]
    nodes = [node for node, num in zip(state.nodes, rows, strict=True) if num == fewest]
    return min(nodes, key=state.loads.kv_tokens_on)


def least_rows_instance(state: ClusterState, node: range) -> int:
    """Return the node's instance with the fewest rows, as `least_rows_node` does."""
    rows = state.loads.num_rows[node.start : node.stop]
    fewest = min(rows)
    if rows.count(fewest) == 1:
        return node.start + rows.index(fewest)
    return min(
        (i for i, num in zip(node, rows, strict=True) if num == fewest), key=state.loads.kv_tokens
    )


def num_instances_needed(state: ClusterState, pages: int) -> int:
    """Return the fewest instances whose frames could hold the pages."""
    return -(-pages // state.cluster.num_frames)


def degree_limit(state: ClusterState, pages: int) -> int:
    """Return the most instances that can share the pages, within max_partials."""
    return min(pages, len(state.open), 1 + state.bounds.max_partials)


def water_filled(state: ClusterState, members: Sequence[int], pages: int) -> Proposal:
    """Propose the first member as MoE binding, and the pages over all by WaterFill."""
    shares = waterfill([num_pages(state.loads.kv_tokens(i)) for i in members], pages)
    return Proposal(members[0], {i: n for i, n in zip(members, shares, strict=True) if n})


def choose_members(state: ClusterState, moe_binding: int, degree: int) -> Sequence[int]:
    """Choose the MoE binding, then the degree - 1 others with the least KV, its node first."""
    if degree == 1:
        return [moe_binding]
    node = state.nodes[state.cluster.node_of(moe_binding)]
    near = [i for i in state.open if i in node and i != moe_binding]
    others = sorted(near, key=state.loads.kv_tokens)
    if len(others) < degree - 1:
        others += sorted((i for i in state.open if i not in node), key=state.loads.kv_tokens)
    return [moe_binding, *others[: degree - 1]]
