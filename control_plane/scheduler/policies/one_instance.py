"""Request-level baselines: a request is on one instance, by rows, by KV, or in turn.

Enters: the decided state. Leaves: proposals. Does not know: CP, except for a request that no single
instance can hold. (The paper's section 2.3.1.)
"""

from __future__ import annotations

from collections.abc import Callable

from control_plane.scheduler.policies.dual_balanced import (
    choose_members,
    degree_limit,
    num_instances_needed,
)
from control_plane.scheduler.policies.policy import Policy
from control_plane.scheduler.policies.waterfill import waterfill
from control_plane.scheduler.state.cluster_state import ClusterState
from control_plane.scheduler.state.proposal import Proposal
from control_plane.scheduler.state.request import num_pages
from nanocp.values.plan import Arrival


class OneInstance(Policy):
    """Policies that never re-bind: there is nowhere to go."""

    def __init__(self, load: Callable[[ClusterState, Arrival, int], tuple[int, int]]) -> None:
        """load: what an instance is compared by; the least is chosen, the first of equals."""
        self._load = load

    def place(self, state: ClusterState, arrival: Arrival, window: int) -> Proposal:
        """Propose the least loaded instance, whether the request fits there now or not.

        It proposes several only if no instance could ever hold the request.
        """
        pages = num_pages(arrival.prompt_len)
        instance = min(state.open, key=lambda i: self._load(state, arrival, i))
        degree = min(num_instances_needed(state, pages), degree_limit(state, pages))
        members = choose_members(state, instance, degree)
        shares = (
            waterfill([num_pages(state.loads.kv_tokens(i)) for i in members], pages)
            if degree > 1
            else [pages]
        )
        return Proposal(
            instance, {i: share for i, share in zip(members, shares, strict=True) if share}
        )


def least_batch() -> OneInstance:
    """Policy `least_batch`: the fewest rows, by KV among equals. What vLLM does by default."""
    return OneInstance(lambda state, _, i: (state.loads.num_rows[i], state.loads.kv_tokens(i)))


def least_cache() -> OneInstance:
    """Policy `least_cache`: the least KV, by rows among equals."""
    return OneInstance(lambda state, _, i: (state.loads.kv_tokens(i), state.loads.num_rows[i]))


def round_robin() -> OneInstance:
    """Policy `round_robin`: instances in turn, whatever they hold. What SGLang does by default."""
    return OneInstance(
        lambda state, arrival, i: ((i - arrival.request_id) % state.cluster.num_instances, i)
    )
