"""Placement by predicted cost: the node, degree, instances and split whose cost rises least.

A step waits for the slowest instance of each phase. The sum of load^4 follows that peak, and still
tells proposals apart that leave it unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from heapq import heapify, heappop, heappush, nsmallest
from operator import itemgetter

from control_plane.scheduler.policies.cp_degree import cp_degree
from control_plane.scheduler.policies.dual_balanced import (
    DualBalanced,
    degree_limit,
    num_instances_needed,
)
from control_plane.scheduler.policies.on_time import OnTime
from control_plane.scheduler.policies.policy import Candidate, Explanation, Policy
from control_plane.scheduler.policies.relevel import relevel
from control_plane.scheduler.policies.relevel_nodes import relevel_nodes
from control_plane.scheduler.policies.waterfill import waterfill
from control_plane.scheduler.state.cluster_state import ClusterState
from control_plane.scheduler.state.proposal import Proposal
from control_plane.scheduler.state.request import Request, num_pages
from nanocp.config.scheduler import SchedulerConfig
from nanocp.values.plan import PAGE_SIZE, Arrival

_POWER = 4
_ROW_WEIGHT = 10
"""Weight of the second phase against the first: bad pages move later, bad rows hardly ever."""
_DEGREES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_MAX_DEGREE = 32
_MAX_MOE_BINDINGS = 4
"""Nodes that a long request tries in a large cluster."""

_EARLY_PERCENT = 125
"""Most that a less late placement may raise the cost, in percent of the cheapest rise."""

_LoadOf = Callable[[ClusterState, int], int]


class CostAware(Policy):
    """Policy `cost_aware`, in integers, so that equal states give equal proposals everywhere."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._costs = config.costs
        self._dual_balanced = DualBalanced(config)
        self._on_time = OnTime(config)
        self._by_rows = _ByRows()
        self._means = _Means()

    def place(self, state: ClusterState, arrival: Arrival, window: int) -> Proposal:
        """Propose the candidate that raises the cost least.

        A request too short for CP gets one instance. One that would miss its class's TTFT target
        gets the least late candidate that costs little more. If a share exceeds an instance's
        frames, dual_balanced proposes.
        """
        self._means.bring_up_to_date(state, self._costs.dispatch_tokens_per_row)
        cheapest = self._cheapest(state, arrival.prompt_len)
        if not _may_fit(state, cheapest):
            return self._dual_balanced.place(state, arrival, window)
        target_ms = self._on_time.target_ms(arrival)
        if target_ms is None or not self._on_time.late_ms(state, cheapest.shares, target_ms):
            return cheapest
        early = self._early(state, arrival.prompt_len, cheapest, target_ms)
        return min(early, key=itemgetter(0, 1))[2]

    def explain(self, state: ClusterState, arrival: Arrival, proposal: Proposal) -> Explanation:
        """Return the candidates of `place`, and the rise of the cost by its causes."""
        self._means.bring_up_to_date(state, self._costs.dispatch_tokens_per_row)
        rises: list[tuple[int, Proposal]]
        prompt_len = arrival.prompt_len
        target_ms = self._on_time.target_ms(arrival)
        cheapest = self._cheapest(state, prompt_len)
        if not _may_fit(state, cheapest):
            return self._dual_balanced.explain(state, arrival, proposal)
        if target_ms and (late_ms := self._on_time.late_ms(state, cheapest.shares, target_ms)):
            rule = (
                f"where the cost rises least, its KV would be there {late_ms:,} ms after the "
                f"target of {target_ms:,} ms: what is least late within a node goes first, if the "
                f"cost rises at most {_EARLY_PERCENT}% as much; then what raises it least"
            )
            early = self._early(state, prompt_len, cheapest, target_ms)
            rises = [(rise, one) for _, rise, one in sorted(early, key=itemgetter(0, 1))]
        elif self._is_short(state, prompt_len):
            rule = (
                "too short for CP: the least loaded instance of each row count is looked at, few "
                "rows first"
            )
            pages = num_pages(prompt_len)
            rises = [
                (rise, Proposal(i, {i: pages}))
                for rise, _, i in sorted(self._instances(state, prompt_len))
            ]
        else:
            rule = (
                "the MoE bindings with the fewest rows of their nodes, and for each KV bindings of "
                "every degree"
            )
            rises = sorted(self._proposals(state, prompt_len), key=itemgetter(0))
        candidates: list[Candidate] = []
        for rise, compared in rises:
            candidate = Candidate(compared, self._parts(state, rise, compared))
            if (
                candidate not in candidates
            ):  # the least loaded of the node may be those of the cluster
                candidates.append(candidate)
        return Explanation((rule,), tuple(candidates))

    def rebindings(self, state: ClusterState, window: int) -> Iterator[tuple[Request, int]]:
        """Re-bind rows as dual_balanced does, but only within their node."""
        return self._dual_balanced.rebindings(state, window, within_node=True)

    def moves(self, state: ClusterState, window: int) -> Iterator[tuple[Request, range, int]]:
        """Re-level one node in each window, and between nodes in every second window."""
        node = state.nodes[window % len(state.nodes)]
        yield from relevel(state, {i: self._load(state, i) for i in node if i in state.open})
        if window % 2 == 0 and len(state.open) == state.cluster.num_instances:
            costs = self._costs
            first_link = costs.exchange_tokens_between_nodes + costs.link_tokens_between_nodes
            yield from relevel_nodes(state, partial(self._load, state), first_link)

    def _cheapest(self, state: ClusterState, prompt_len: int) -> Proposal:
        if self._is_short(state, prompt_len):
            _, _, instance = min(self._instances(state, prompt_len))
            return Proposal(instance, {instance: num_pages(prompt_len)})
        return min(self._proposals(state, prompt_len), key=itemgetter(0))[1]

    def _early(
        self, state: ClusterState, prompt_len: int, cheapest: Proposal, target_ms: int
    ) -> Iterator[tuple[int, int, Proposal]]:
        """Yield (milliseconds late, rise of the cost, proposal) for a prompt that would be late."""
        on_time, pages, nodes = self._on_time, num_pages(prompt_len), state.nodes
        node_of = state.cluster.node_of
        loads = [self._load(state, i) for i in range(state.cluster.num_instances)]
        if self._is_short(state, prompt_len):
            compared = [Proposal(i, {i: pages}) for i in range(len(loads))]
        else:
            compared = [proposal for _, proposal in self._proposals(state, prompt_len)]
        near = [p for p in compared if len({node_of(i) for i in (p.moe_binding, *p.shares)}) == 1]
        if all(on_time.late_ms(state, proposal.shares, target_ms) for proposal in near):
            for number, shares in on_time.splits(state, prompt_len):
                moe_binding = min(
                    nodes[number], key=lambda i: (state.loads.num_rows[i], loads[i], i)
                )
                near.append(Proposal(moe_binding, shares))
        least = self._rise_of(state, loads, cheapest)
        yield on_time.late_ms(state, cheapest.shares, target_ms), least, cheapest
        for proposal in near:
            rise = self._rise_of(state, loads, proposal)
            is_cheap = 100 * rise <= _EARLY_PERCENT * least
            if is_cheap and state.can_allocate(proposal.moe_binding, proposal.shares):
                yield on_time.late_ms(state, proposal.shares, target_ms), rise, proposal

    def _rise_of(self, state: ClusterState, loads: Sequence[int], proposal: Proposal) -> int:
        moe_binding, shares, _ = proposal
        costs, mean, node_of = self._costs, self._means.attention, state.cluster.node_of
        home = node_of(moe_binding)
        rise = self._row_rise(state.loads.num_rows[moe_binding])
        are_near: list[bool] = []
        for instance, share in shares.items():
            if instance != moe_binding:
                are_near.append(node_of(instance) == home)
                link = self._link_cost(state, instance, are_near[-1])
                rise += _rise(loads[instance], share * PAGE_SIZE + link, mean)
        first_link = self._link_cost(state, moe_binding, True) - costs.link_tokens
        own = shares.get(moe_binding, 0) * PAGE_SIZE + self._own_links(first_link, are_near)
        return rise + _rise(loads[moe_binding], own, mean)

    def _load(self, state: ClusterState, instance: int) -> int:
        """Return the first phase's tokens: the instance's KV and its exchange."""
        tokens, costs = state.loads.kv_tokens(instance), self._costs
        if num_links := state.committed.num_links(instance):
            tokens += costs.exchange_tokens + num_links * costs.link_tokens
            if num_far := state.committed.num_far_links(instance):
                dearer = costs.link_tokens_between_nodes - costs.link_tokens
                tokens += costs.exchange_tokens_between_nodes + num_far * dearer
        return tokens

    def _is_short(self, state: ClusterState, prompt_len: int) -> bool:
        config = self._config
        is_small = num_instances_needed(state, num_pages(prompt_len)) == 1
        return (
            is_small and cp_degree(prompt_len, config.cp_degree_buckets, config.cp_degree_max) == 1
        )

    def _instances(self, state: ClusterState, prompt_len: int) -> Iterator[tuple[int, int, int]]:
        """Yield (rise of the cost, load, instance) until no other instance can be better."""
        by_rows = self._by_rows
        by_rows.bring_up_to_date(state, self._load)
        least_rise: int | None = None
        for num_rows in by_rows.row_counts():
            row_rise = self._row_rise(num_rows)
            if least_rise is not None and row_rise >= least_rise:
                return
            least = by_rows.least_loaded(state, num_rows, self._load)
            if least is not None:
                load, instance = least
                rise = row_rise + _rise(load, prompt_len, self._means.attention)
                least_rise = rise if least_rise is None else min(least_rise, rise)
                yield rise, load, instance

    def _proposals(self, state: ClusterState, prompt_len: int) -> Iterator[tuple[int, Proposal]]:
        """Yield (rise of the cost, proposal), at least for the fewest instances that hold it."""
        pages = num_pages(prompt_len)
        loads = [self._load(state, i) for i in range(state.cluster.num_instances)]
        needed, most = num_instances_needed(state, pages), degree_limit(state, pages)
        for moe_binding in self._moe_bindings(state, loads):
            tried: list[int] | None = None
            for companions in self._companions(
                state, loads, moe_binding, max(needed, _MAX_DEGREE) - 1
            ):
                degrees = [
                    d
                    for d in sorted({needed, *_DEGREES})
                    if needed <= d <= min(most, len(companions) + 1)
                ]
                if tried is not None:  # the least loaded of the cluster may be those of the node
                    degrees = [d for d in degrees if companions[: d - 1] != tried[: d - 1]]
                tried = companions
                yield from self._splits(state, loads, moe_binding, companions, degrees, pages)

    def _parts(self, state: ClusterState, rise: int, proposal: Proposal) -> dict[str, int]:
        dispatch = self._row_rise(state.loads.num_rows[proposal.moe_binding])
        if proposal.shares.keys() == {proposal.moe_binding}:
            attention = rise - dispatch
        else:
            mean = self._means.attention
            attention = sum(
                _rise(self._load(state, i), n * PAGE_SIZE, mean) for i, n in proposal.shares.items()
            )
        return {
            "attention": attention,
            "exchange": rise - attention - dispatch,
            "dispatch": dispatch,
        }

    def _moe_bindings(self, state: ClusterState, loads: Sequence[int]) -> list[int]:
        moe_bindings = [
            min(node, key=lambda i: (state.loads.num_rows[i], loads[i], i)) for node in state.nodes
        ]
        if len(moe_bindings) <= _MAX_MOE_BINDINGS:
            return moe_bindings
        return nsmallest(
            _MAX_MOE_BINDINGS, moe_bindings, key=lambda i: (state.loads.num_rows[i], loads[i], i)
        )

    def _companions(
        self, state: ClusterState, loads: Sequence[int], moe_binding: int, most: int
    ) -> Iterator[list[int]]:
        node_of = state.cluster.node_of
        home = node_of(moe_binding)
        node = state.nodes[home]
        yield sorted((i for i in node if i != moe_binding), key=lambda i: (loads[i], i))
        if len(state.nodes) > 1:
            least = nsmallest(most + len(node), range(len(loads)), key=loads.__getitem__)
            least = [i for i in {*least, *node} if i != moe_binding]
            costs = {i: loads[i] + self._link_cost(state, i, node_of(i) == home) for i in least}
            yield sorted(least, key=lambda i: (costs[i], i))[:most]

    def _link_cost(self, state: ClusterState, instance: int, is_near: bool) -> int:
        costs = self._costs
        first = 0 if state.committed.num_links(instance) else costs.exchange_tokens
        if is_near:
            return first + costs.link_tokens
        return first + costs.link_tokens_between_nodes + costs.exchange_tokens_between_nodes

    def _splits(
        self,
        state: ClusterState,
        loads: Sequence[int],
        moe_binding: int,
        companions: Sequence[int],
        degrees: Iterable[int],
        pages: int,
    ) -> Iterator[tuple[int, Proposal]]:
        node = state.nodes[state.cluster.node_of(moe_binding)]
        are_near = [i in node for i in companions]
        links = [
            self._link_cost(state, i, is_near)
            for i, is_near in zip(companions, are_near, strict=True)
        ]
        first_link = self._link_cost(state, moe_binding, True) - self._costs.link_tokens
        levels = [num_pages(loads[i] + link) for i, link in zip(companions, links, strict=True)]
        for degree in degrees:
            own_links = self._own_links(first_link, are_near[: degree - 1])
            own_share, *shares = waterfill(
                [num_pages(loads[moe_binding] + own_links), *levels[: degree - 1]], pages
            )
            # Who gets nothing is no member.
            own = {moe_binding: own_share} if own_share else {}
            others = {i: share for i, share in zip(companions, shares, strict=False) if share}
            proposal = Proposal(moe_binding, own | others)
            yield self._rise_of(state, loads, proposal), proposal

    def _own_links(self, first_link: int, are_near: Sequence[bool]) -> int:
        """Price a request's links at its MoE binding, in KV tokens.

        first_link: the price of having links at all. are_near: True for each other member on the
        same node.
        """
        if not are_near:
            return 0
        costs, num_near = self._costs, sum(are_near)
        num_far = len(are_near) - num_near
        links = costs.link_tokens * num_near + costs.link_tokens_between_nodes * num_far
        return first_link + links + (costs.exchange_tokens_between_nodes if num_far else 0)

    def _row_rise(self, num_rows: int) -> int:
        tokens = self._costs.dispatch_tokens_per_row
        return _ROW_WEIGHT * _rise(num_rows * tokens, tokens, self._means.dispatch)


class _ByRows:
    """Instances by row count, then by load, for short requests."""

    def __init__(self) -> None:
        self._as_of: tuple[int, int] | None = None
        self._heaps: dict[int, list[tuple[int, int]]] = {}  # row count -> (load, instance)

    def bring_up_to_date(self, state: ClusterState, load_of: _LoadOf) -> None:
        if self._as_of == (state.step, state.loads.num_falls):
            return
        self._as_of = state.step, state.loads.num_falls
        self._heaps = {}
        for instance, num_rows in enumerate(state.loads.num_rows):
            self._heaps.setdefault(num_rows, []).append((load_of(state, instance), instance))
        for heap in self._heaps.values():
            heapify(heap)

    def row_counts(self) -> Iterator[int]:
        """Yield row counts, ascending, with those that instances move to meanwhile."""
        latest = -1
        while more := [num_rows for num_rows in self._heaps if num_rows > latest]:
            latest = min(more)
            yield latest

    def least_loaded(
        self, state: ClusterState, num_rows: int, load_of: _LoadOf
    ) -> tuple[int, int] | None:
        heap = self._heaps[num_rows]
        while heap:
            load, instance = heap[0]
            now = load_of(state, instance), instance
            if state.loads.num_rows[instance] == num_rows and now[0] == load:
                return now
            heappop(heap)
            heappush(self._heaps.setdefault(state.loads.num_rows[instance], []), now)
        del self._heaps[num_rows]
        return None


class _Means:
    """Mean load of each phase, in tokens, at the step's first placement."""

    def __init__(self) -> None:
        self._step: int | None = None
        self.attention = 1
        self.dispatch = 1

    def bring_up_to_date(self, state: ClusterState, tokens_per_row: int) -> None:
        if self._step == state.step:
            return
        self._step = state.step
        seats, num = state.open, len(state.open)
        self.attention = max(sum(map(state.loads.kv_tokens, seats)) // num, 1)
        self.dispatch = max(sum(state.loads.num_rows[i] for i in seats) * tokens_per_row // num, 1)


def _may_fit(state: ClusterState, proposal: Proposal) -> bool:
    """Return whether the frames of empty instances hold the shares.

    Links make shares uneven, and a huge request could wait forever.
    """
    return max(proposal.shares.values()) <= state.cluster.num_frames


def _rise(load: int, more: int, mean: int) -> int:
    """Return the rise of sum (load / mean)^4; a token more at the mean counts 4."""
    return int(((load + more) ** _POWER - load**_POWER) // mean ** (_POWER - 1))
