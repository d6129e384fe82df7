"""Placement by predicted time: the node, the degree, the set and the split whose convex cost rises least.

Enters: the decided state and what links and rows cost in KV tokens. Leaves: choices. Does not know: microseconds.

A step waits for the slowest instance of each phase, so what counts is the peak; but many choices leave today's peak as
it is. The sum of load^4 over the instances is near the peak's fourth power and still tells those choices apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from control_plane.cluster_state import ClusterState
from control_plane.cp_degree import cp_degree
from control_plane.policies.dual_balanced import DualBalanced, degree_limit, num_instances_needed
from control_plane.policies.policy import Choice
from control_plane.request import Request, num_pages
from control_plane.waterfill import waterfill
from nanocp.config import SchedulerConfig
from nanocp.plan import PAGE_SIZE

_POWER = 4
_DEGREES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


class CostAware:
    """Policy `cost_aware`. Integers throughout, so that equal states give equal choices everywhere."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._costs = config.costs
        self._dual_balanced = DualBalanced(config)

    def place(self, state: ClusterState, prompt_len: int, window: int) -> Choice:
        """The candidate that raises the cost least; a request too short for CP only chooses its instance."""
        pages = num_pages(prompt_len)
        needed = num_instances_needed(state, pages)
        loads = [self._load(state, i) for i in range(state.cluster.num_instances)]
        if needed == 1 and cp_degree(prompt_len, self._config.cp_degree_buckets, self._config.cp_degree_max) == 1:
            instance = min(
                range(len(loads)),
                key=lambda i: (_rise(loads[i], prompt_len) + self._row_rise(state, i), loads[i], i),
            )
            return Choice(instance, {instance: pages})
        best: tuple[int, Choice] | None = None
        for node in state.nodes:
            moe_binding = min(node, key=lambda i: (state.num_rows[i], loads[i], i))
            for members in self._candidates(state, loads, moe_binding, needed, degree_limit(state, pages)):
                choice = self._split(state, loads, moe_binding, members, pages)
                rise = self._cost_rise(state, loads, choice)
                if best is None or rise < best[0]:
                    best = rise, choice
        assert best is not None, "every node has a candidate: the request alone on as few instances as hold it"
        return best[1]

    def rebindings(self, state: ClusterState, window: int) -> Iterator[tuple[Request, int]]:
        """As dual_balanced."""
        return self._dual_balanced.rebindings(state, window)

    def holder(self, state: ClusterState, request: Request, window: int) -> int | None:
        """As dual_balanced."""
        return self._dual_balanced.holder(state, request, window)

    def _load(self, state: ClusterState, instance: int) -> int:
        """The instance's part of the first phase, in tokens: its KV and its exchange."""
        links = max(state.partials[instance], state.attention_rows[instance] - state.rows_committed[instance])
        exchange = self._costs.exchange_tokens + links * self._costs.link_tokens if links else 0
        return state.kv_tokens(instance) + exchange

    def _candidates(
        self, state: ClusterState, loads: Sequence[int], moe_binding: int, needed: int, most: int
    ) -> Iterator[list[int]]:
        """Sets to consider: the MoE binding with the least loaded of its node, and of the cluster."""
        home = state.cluster.node_of(moe_binding)
        others = [i for i in range(len(loads)) if i != moe_binding]
        inside = sorted((i for i in others if state.cluster.node_of(i) == home), key=lambda i: (loads[i], i))
        anywhere = sorted(
            others, key=lambda i: (loads[i] + self._link_cost(state, i, state.cluster.node_of(i) == home), i)
        )
        for companions in (inside, anywhere):
            for degree in sorted({needed, *_DEGREES}):
                if needed <= degree <= min(most, len(companions) + 1):
                    yield [moe_binding, *companions[: degree - 1]]

    def _link_cost(self, state: ClusterState, instance: int, is_near: bool) -> int:
        """Tokens that one more link costs the instance."""
        costs = self._costs
        has_link = state.attention_rows[instance] > state.rows_committed[instance] or state.partials[instance] > 0
        first = 0 if has_link else costs.exchange_tokens
        if is_near:
            return first + costs.link_tokens
        return first + costs.link_tokens_between_nodes + costs.exchange_tokens_between_nodes

    def _split(
        self, state: ClusterState, loads: Sequence[int], moe_binding: int, members: Sequence[int], pages: int
    ) -> Choice:
        """WaterFill over what each member would carry with its link; who gets nothing is no member."""
        levels = [num_pages(loads[i] + self._extra(state, moe_binding, members, i)) for i in members]
        shares = waterfill(levels, pages)
        return Choice(moe_binding, {i: share for i, share in zip(members, shares, strict=True) if share})

    def _extra(self, state: ClusterState, moe_binding: int, members: Iterable[int], instance: int) -> int:
        """Tokens that the request's links cost a member. The MoE binding has one to each of the others."""
        node_of = state.cluster.node_of
        home = node_of(moe_binding)
        if instance != moe_binding:
            return self._link_cost(state, instance, node_of(instance) == home)
        near = [node_of(i) == home for i in members if i != moe_binding]
        if not near:
            return 0
        costs = self._costs
        links = costs.link_tokens * sum(near) + costs.link_tokens_between_nodes * (len(near) - sum(near))
        first = self._link_cost(state, moe_binding, True) - costs.link_tokens
        return first + links + (0 if all(near) else costs.exchange_tokens_between_nodes)

    def _cost_rise(self, state: ClusterState, loads: Sequence[int], choice: Choice) -> int:
        members = choice.shares.keys() | {choice.moe_binding}
        rise = self._row_rise(state, choice.moe_binding)
        for instance in members:
            more = choice.shares.get(instance, 0) * PAGE_SIZE
            more += self._extra(state, choice.moe_binding, members, instance)
            rise += _rise(loads[instance], more)
        return rise

    def _row_rise(self, state: ClusterState, instance: int) -> int:
        """The second phase: one more row to dispatch and combine."""
        tokens = self._costs.dispatch_tokens_per_row
        return _rise(state.num_rows[instance] * tokens, tokens)


def _rise(load: int, more: int) -> int:
    return int((load + more) ** _POWER - load**_POWER)
