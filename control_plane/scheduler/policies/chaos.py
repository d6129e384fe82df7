"""Random legal decisions to find bugs, drawn from blake2b(seed, window, counter) so runs replay."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from hashlib import blake2b

from control_plane.scheduler.policies.dual_balanced import degree_limit, num_instances_needed
from control_plane.scheduler.policies.layout import can_hold_next, choose_holder
from control_plane.scheduler.policies.policy import Policy
from control_plane.scheduler.state.cluster_state import ClusterState
from control_plane.scheduler.state.proposal import Proposal
from control_plane.scheduler.state.request import Request, State, num_pages
from nanocp.config.scheduler import SchedulerConfig
from nanocp.values.plan import Arrival


class Chaos(Policy):
    """Policy `chaos`: random legal decisions.

    One in `chaos_period_windows` windows re-binds; one in as many pages goes anywhere legal.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._seed = config.chaos_seed
        self._period = config.chaos_period_windows
        self._window = -1
        self._counter = 0

    def place(self, state: ClusterState, arrival: Arrival, window: int) -> Proposal:
        """Propose any MoE binding and any KV binding that the pages and frames allow.

        The MoE binding may be outside the KV binding.
        """
        pages = num_pages(arrival.prompt_len)
        fewest, most = num_instances_needed(state, pages), degree_limit(state, pages)
        instances = list(state.open)
        # An empty cluster must be able to hold the proposal, or a request would wait for ever. So
        # there the proposal is the plainest.
        is_free = bool(state.requests)
        degree = fewest + (self._draw(window, most - fewest + 1) if is_free else 0)
        members = [instances.pop(self._draw(window, len(instances))) for _ in range(degree)]
        shares = {i: pages // degree + (rank < pages % degree) for rank, i in enumerate(members)}
        if is_free and degree >= 2:
            moved = self._draw(window, shares[members[0]])
            shares[members[0]] -= moved
            shares[members[1]] += moved
        is_outside = is_free and degree < most and self._draw(window, 4) == 0
        moe_binding = instances[self._draw(window, len(instances))] if is_outside else members[0]
        turns = members[self._draw(window, degree) :] if is_free and self._draw(window, 2) else []
        return Proposal(moe_binding, shares, tuple(turns))

    def rebindings(self, state: ClusterState, window: int) -> Iterator[tuple[Request, int]]:
        """Re-bind a few rows in one of `chaos_period_windows` windows."""
        if not state.linked.by_degree or self._draw(window, self._period):
            return
        linked = tuple(state.linked.by_degree)
        for _ in range(1 + self._draw(window, 4)):
            _, request_id = linked[self._draw(window, len(linked))]
            request = state.requests[request_id]
            binding = sorted(i for i in request.pages_on if i in state.open)
            if binding:
                yield request, binding[self._draw(window, len(binding))]

    def moves(self, state: ClusterState, window: int) -> Iterator[tuple[Request, range, int]]:
        """Move pages of a few rows in one of `chaos_period_windows` windows."""
        running = [request for request in state.requests.values() if request.state is State.RUNNING]
        if not running or self._draw(window, self._period):
            return
        for _ in range(1 + self._draw(window, 4)):
            request = running[self._draw(window, len(running))]
            run = request.runs[self._draw(window, len(request.runs))]
            begin = run.first_page + self._draw(window, run.num_pages)
            end = begin + 1 + self._draw(window, run.first_page + run.num_pages - begin)
            yield request, range(begin, end), state.open[self._draw(window, len(state.open))]

    def holder(self, state: ClusterState, request: Request, window: int) -> int | None:
        """Choose any legal holder for one in `chaos_period_windows` pages, else the default."""
        if self._draw(window, self._period) == 0:
            legal = [i for i in state.open if can_hold_next(state, request, i)]
            if legal:
                return legal[self._draw(window, len(legal))]
        return choose_holder(state, request)

    def _draw(self, window: int, bound: int) -> int:
        if window != self._window:
            self._window, self._counter = window, 0
        digest = blake2b(
            struct.pack("<QQQ", self._seed, window, self._counter), digest_size=8
        ).digest()
        self._counter += 1
        return int.from_bytes(digest, "little") % bound
