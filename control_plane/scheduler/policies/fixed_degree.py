"""A fixed CP degree for every request, as far as its pages go: to test and measure."""

from __future__ import annotations

from collections.abc import Iterator

from control_plane.scheduler.policies.dual_balanced import (
    DualBalanced,
    choose_members,
    degree_limit,
    least_rows_instance,
    least_rows_node,
    num_instances_needed,
)
from control_plane.scheduler.policies.policy import Policy
from control_plane.scheduler.policies.waterfill import waterfill
from control_plane.scheduler.state.cluster_state import ClusterState
from control_plane.scheduler.state.proposal import Proposal
from control_plane.scheduler.state.request import Request, num_pages
from nanocp.config.scheduler import SchedulerConfig
from nanocp.values.plan import Arrival


class FixedDegree(Policy):
    """Policy `fixed_degree:N`: dual_balanced with degree N for all requests, across nodes."""

    def __init__(self, config: SchedulerConfig, degree: int) -> None:
        self._degree = degree
        self._dual_balanced = DualBalanced(config)

    def place(self, state: ClusterState, arrival: Arrival, window: int) -> Proposal:
        """Propose dual_balanced's MoE binding and N - 1 others.

        Each gets a page before WaterFill spreads the rest.
        """
        pages = num_pages(arrival.prompt_len)
        degree = min(
            max(self._degree, num_instances_needed(state, pages)), degree_limit(state, pages)
        )
        moe_binding = least_rows_instance(state, least_rows_node(state))
        members = choose_members(state, moe_binding, degree)
        rest = waterfill([num_pages(state.loads.kv_tokens(i)) + 1 for i in members], pages - degree)
        return Proposal(moe_binding, {i: 1 + share for i, share in zip(members, rest, strict=True)})

    def rebindings(self, state: ClusterState, window: int) -> Iterator[tuple[Request, int]]:
        return self._dual_balanced.rebindings(state, window)
