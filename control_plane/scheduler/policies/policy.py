"""The interface of policies: they place requests, re-bind rows, move pages and choose holders.

The scheduler carries out wishes within every bound.
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
    """A scheduling policy (4.2): deterministic, without clocks or random numbers."""

    def place(self, state: ClusterState, arrival: Arrival, window: int) -> Proposal:
        """Propose the place of a request, which stays in the queue if that does not fit."""

    def rebindings(self, state: ClusterState, window: int) -> Iterator[tuple[Request, int]]:
        """Yield (running request, new MoE binding of its KV binding), one at a time; here none.

        Each is carried out, or passed over, before the next is asked for.
        """
        return iter(())

    def moves(self, state: ClusterState, window: int) -> Iterator[tuple[Request, range, int]]:
        """Yield (running request, full pages of a run, new instance), like `rebindings`."""
        return iter(())

    def holder(self, state: ClusterState, request: Request, window: int) -> int | None:
        """Return the instance for the request's next page, if any; here the default one."""
        return choose_holder(state, request)


class Candidate(NamedTuple):
    """A proposal that a policy compared with others."""

    proposal: Proposal
    rise: Mapping[str, int]
    """Part of the step -> rise of its cost. The least sum wins."""


class Explanation(NamedTuple):
    """A policy's reason for its choice."""

    sentences: tuple[str, ...]
    candidates: tuple[Candidate, ...] = ()
    """Compared candidates, best first; empty if the rule leads straight to the proposal."""


@runtime_checkable
class Explains(Protocol):
    """A policy that can explain a proposal beyond its rule."""

    def explain(self, state: ClusterState, arrival: Arrival, proposal: Proposal) -> Explanation:
        """Explain the proposal of `place` in this state."""
