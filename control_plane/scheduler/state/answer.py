"""The decisions of one scheduler call, collected in order until they become a Plan."""

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
    """The fields of the next plan except its window."""

    __slots__ = ("ended", "fences", "fetches", "placed", "preempted", "stows", "transfers")

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.transfers: list[Transfer] = []
        self.fences: list[Fence] = []
        self.placed: dict[int, Request] = {}
        """Requests that were placed or re-bound, by request id."""
        self.ended: list[Ended] = []
        self.preempted: list[Preempted] = []
        self.stows: list[Stow] = []
        self.fetches: list[Fetch] = []

    def go_on(self, request_id: int) -> None:
        """Forget the request's end: a later attempt has come."""
        self.ended = [each for each in self.ended if each.request_id != request_id]

    def end(self, request_id: int, reason: FinishReason, message: str) -> None:
        """Record that the request ended, for its front end."""
        self.ended.append(Ended(request_id, reason, message))

    def take(
        self,
        window: int | None,
        instances: tuple[InstancePlan, ...],
        step: int,
        begins: tuple[int, int] | None = None,
    ) -> Plan:
        """Return a plan of all decisions since the last call.

        window: the issued one, if any. step: the first after the windows issued so far. begins: see
        Request.placement.
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
