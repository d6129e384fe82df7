"""The uniform-CP baseline, Helix-style (2.3.2): each request's KV is on a fixed group.

Requests below N pages have fewer links than in a real group.
"""

from __future__ import annotations

from control_plane.scheduler.policies.dual_balanced import (
    choose_members,
    degree_limit,
    num_instances_needed,
)
from control_plane.scheduler.policies.layout import can_hold_next, choose_holder
from control_plane.scheduler.policies.policy import Policy
from control_plane.scheduler.state.cluster_state import ClusterState
from control_plane.scheduler.state.proposal import Proposal
from control_plane.scheduler.state.request import Request, num_pages
from nanocp.values.plan import Arrival


class UniformCp(Policy):
    """Policy `uniform_cp:N`."""

    def __init__(self, degree: int) -> None:
        self._degree = degree

    def place(self, state: ClusterState, arrival: Arrival, window: int) -> Proposal:
        """Propose the group with the fewest rows, its pages in equal shares.

        The MoE binding is the group's instance with the fewest rows.
        """
        pages = num_pages(arrival.prompt_len)
        groups = self._groups(state)
        rows = [sum(state.loads.num_rows[i] for i in group) for group in groups]
        group = groups[rows.index(min(rows))]
        moe_binding = min(
            group, key=lambda i: (state.loads.num_rows[i], state.loads.kv_tokens(i), i)
        )
        needed = num_instances_needed(state, pages)
        if needed > len(group):
            members = list(
                choose_members(state, moe_binding, min(needed, degree_limit(state, pages)))
            )
        else:
            others = sorted(
                (i for i in group if i != moe_binding), key=lambda i: (state.loads.kv_tokens(i), i)
            )
            members = [moe_binding, *others]
        turns = members[: degree_limit(state, len(members))]
        members = members[: degree_limit(state, pages)]
        share, more = divmod(pages, len(members))
        turns = turns[pages % len(turns) :] + turns[: pages % len(turns)]
        return Proposal(
            moe_binding, {i: share + (rank < more) for rank, i in enumerate(members)}, tuple(turns)
        )

    def holder(self, state: ClusterState, request: Request, window: int) -> int | None:
        """Choose the members of the group in turn."""
        members = [
            i for group in self._groups(state) if request.moe_binding in group for i in group
        ]
        legal = [i for i in members if can_hold_next(state, request, i)]
        if not legal:
            return choose_holder(state, request)
        return min(legal, key=lambda i: (request.pages_on.get(i, 0), state.loads.kv_tokens(i), i))

    def _groups(self, state: ClusterState) -> list[list[int]]:
        num, seats = len(state.open), state.open
        return [seats[first : first + self._degree] for first in range(0, num, self._degree)]
