"""Algorithm 1 of the paper with bindings chosen from any node; links between nodes cost nothing."""

from __future__ import annotations

from collections.abc import Iterator

from control_plane.scheduler.policies.cp_degree import cp_degree
from control_plane.scheduler.policies.dual_balanced import (
    DualBalanced,
    degree_limit,
    num_instances_needed,
    water_filled,
)
from control_plane.scheduler.policies.policy import Policy
from control_plane.scheduler.state.cluster_state import ClusterState
from control_plane.scheduler.state.proposal import Proposal
from control_plane.scheduler.state.request import Request, num_pages
from nanocp.config.scheduler import SchedulerConfig
from nanocp.values.plan import Arrival


class DualBalancedAnyNode(Policy):
    """Policy `dual_balanced_any_node`."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._dual_balanced = DualBalanced(config)

    def place(self, state: ClusterState, arrival: Arrival, window: int) -> Proposal:
        """Propose the instance with the fewest rows, and WaterFill over the least loaded of all."""
        config = self._config
        pages = num_pages(arrival.prompt_len)
        degree = cp_degree(arrival.prompt_len, config.cp_degree_buckets, config.cp_degree_max)
        degree = min(max(degree, num_instances_needed(state, pages)), degree_limit(state, pages))
        instances = state.open
        moe_binding = min(
            instances, key=lambda i: (state.loads.num_rows[i], state.loads.kv_tokens(i), i)
        )
        others = sorted(
            (i for i in instances if i != moe_binding), key=lambda i: (state.loads.kv_tokens(i), i)
        )
        return water_filled(state, [moe_binding, *others[: degree - 1]], pages)

    def rebindings(self, state: ClusterState, window: int) -> Iterator[tuple[Request, int]]:
        return self._dual_balanced.rebindings(state, window)
