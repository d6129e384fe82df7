"""What a policy decides: where a request is placed, which rows re-bind, who holds the next page.

Enters: the decided state. Leaves: wishes; the scheduler carries out those that are within every
bound. Does not know: events, windows in flight, frames' numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol, runtime_checkable

from control_plane.scheduler.policies.layout import choose_holder
from control_plane.scheduler.state.cluster_state import ClusterState
from control_plane.scheduler.state.proposal import Proposal
from control_plane.scheduler.state.request import Request
from nanocp.values.plan import Arrival


class Policy(Protocol):
    """A scheduling policy (4.2). Deterministic: no clocks, no random numbers but counted hashes."""

    def place(self, state: ClusterState, arrival: Arrival, window: int) -> Proposal:
        """Propose where to place a request.

        The request stays in the queue if the proposal does not fit.
        """

    def rebindings(self, state: ClusterState, window: int) -> Iterator[tuple[Request, int]]:
        """Yield (running request, new MoE binding of its KV binding), one at a time; here none.

        Each is carried out, or passed over, before the next is asked for.
        """
        return iter(())

    def moves(self, state: ClusterState, window: int) -> Iterator[tuple[Request, range, int]]:
        """Yield (running request, full pages of a run, new instance), one at a time; here none.

        Each is carried out, or passed over, before the next is asked for.
        """
        return iter(())

    def holder(self, state: ClusterState, request: Request, window: int) -> int | None:
        """Instance for the request's next page, here the default order's; None if none can."""
        return choose_holder(state, request)


class Candidate(NamedTuple):
    """A proposal that a policy compared with others."""

    proposal: Proposal
    rise: Mapping[str, int]
    """Part of the step -> how much the policy's cost of it rises. The least sum wins."""


class Explanation(NamedTuple):
    """Why a policy chose as it did."""

    sentences: tuple[str, ...]
    candidates: tuple[Candidate, ...] = ()
    """What it compared, the best first; empty if its rule leads straight to the proposal."""


@runtime_checkable
class Explains(Protocol):
    """A policy that can say more of a proposal than what its rule is."""

    def explain(self, state: ClusterState, arrival: Arrival, proposal: Proposal) -> Explanation:
        """Why `place` makes this proposal in this state."""
