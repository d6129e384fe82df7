"""Baselines that place each request on one instance, by rows, by KV or in turn (2.3.1)."""

from __future__ import annotations

from collections.abc import Callable

from control_plane.scheduler.policies.dual_balanced import (
    choose_members,
    degree_limit,
    num_instances_needed,
    water_filled,
)
from control_plane.scheduler.policies.policy import Policy
from control_plane.scheduler.state.cluster_state import ClusterState
from control_plane.scheduler.state.proposal import Proposal
from control_plane.scheduler.state.request import num_pages
from nanocp.values.plan import Arrival


class OneInstance(Policy):
    """Places on one instance, and never re-binds."""

    def __init__(self, load: Callable[[ClusterState, Arrival, int], tuple[int, int]]) -> None:
        """load: the key; the first instance with the least is chosen."""
        self._load = load

    def place(self, state: ClusterState, arrival: Arrival, window: int) -> Proposal:
        """Propose the least loaded instance, whether the request fits there now or not.

        It proposes several only if no instance could ever hold the request.
        """
        pages = num_pages(arrival.prompt_len)
        instance = min(state.open, key=lambda i: self._load(state, arrival, i))
        degree = min(num_instances_needed(state, pages), degree_limit(state, pages))
        return water_filled(state, choose_members(state, instance, degree), pages)


def least_batch() -> OneInstance:
    """Make policy `least_batch`: the fewest rows, then the least KV, as vLLM does by default."""
    return OneInstance(lambda state, _, i: (state.loads.num_rows[i], state.loads.kv_tokens(i)))


def least_cache() -> OneInstance:
    """Make policy `least_cache`: the least KV, then the fewest rows."""
    return OneInstance(lambda state, _, i: (state.loads.kv_tokens(i), state.loads.num_rows[i]))


def round_robin() -> OneInstance:
    """Make policy `round_robin`: instances in turn, as SGLang does by default."""
    return OneInstance(
        lambda state, arrival, i: ((i - arrival.request_id) % state.cluster.num_instances, i)
    )
