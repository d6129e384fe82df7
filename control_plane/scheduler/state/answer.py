"""What one call has decided so far, and returns in its plan.

Enters: decisions of every part of the scheduler, in their order. Leaves: a Plan. Does not know: the
reasons of a decision.
"""

from __future__ import annotations

from control_plane.scheduler.state.request import Request
from nanocp.values.plan import (
    Ended,
    Fence,
    Fetch,
    FinishReason,
    InstancePlan,
    Plan,
    Preempted,
    Stow,
    Transfer,
)


class Answer:
    """The fields of the next plan but for its window; `take` makes the plan and empties them."""

    __slots__ = ("ended", "fences", "fetches", "placed", "preempted", "stows", "transfers")

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.transfers: list[Transfer] = []
        self.fences: list[Fence] = []
        self.placed: dict[int, Request] = {}
        """By request id: requests that were placed, or whose bindings changed."""
        self.ended: list[Ended] = []
        self.preempted: list[Preempted] = []
        self.stows: list[Stow] = []
        self.fetches: list[Fetch] = []

    def go_on(self, request_id: int) -> None:
        """A later attempt of the request has come: its end in this very call is no end."""
        self.ended = [each for each in self.ended if each.request_id != request_id]

    def end(self, request_id: int, reason: FinishReason, message: str) -> None:
        """The request has ended, and the front end does not know it yet."""
        self.ended.append(Ended(request_id, reason, message))

    def take(
        self,
        window: int | None,
        instances: tuple[InstancePlan, ...],
        step: int,
        begins: tuple[int, int] | None = None,
    ) -> Plan:
        """The plan of all that was decided since the last call.

        window: the one that is issued, or None. step: the first step after the windows issued so
        far. begins: see Request.placement.
        """
        plan = Plan(
            window,
            instances,
            tuple(self.transfers),
            tuple(self.fences),
            tuple([request.placement(step, begins) for request in self.placed.values()]),
            tuple(self.ended),
            tuple(self.preempted),
            tuple(self.stows),
            tuple(self.fetches),
        )
        self._clear()
        return plan
