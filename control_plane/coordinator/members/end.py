"""The end of a cluster: the first reason why it cannot serve, or why its start failed."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial

from control_plane.coordinator.members.deadlines import Deadlines
from control_plane.coordinator.members.output import MembersOutput, PrefillLost
from control_plane.coordinator.members.seats import Seats
from control_plane.coordinator.members.start import Start
from nanocp.values.members import Member
from nanocp.values.plan import ClusterLost


class End:
    """The end of one cluster, which has come or not."""

    def __init__(
        self,
        start: Start,
        seats: Seats,
        deadlines: Deadlines,
        output: MembersOutput,
        recovery_timeout_ms: float,
    ) -> None:
        """recovery_timeout_ms: longest time after a loss until the cluster serves again."""
        self._start, self._seats, self._deadlines = start, seats, deadlines
        self._output, self._recovery_ms = output, recovery_timeout_ms
        self.leaving: str | None = None
        """Reason for asking every member to leave; None until then."""
        self.failure: Future[str] = Future()
        """Done when a running cluster can no longer serve, with the reason."""
        self.last_loss = ""
        """What the latest loss was, in a sentence."""

    @property
    def has_come(self) -> bool:
        """Return whether the cluster has stopped serving."""
        return self.leaving is not None or self.failure.done()

    def fail(self, message: str) -> None:
        """End the cluster, or its start; the first reason counts."""
        if self.leaving is not None:
            return
        if not self._start.is_over:
            self._start.fail(message)
        elif not self.failure.done():
            self._output.say(message)
            self._seats.end(message)
            self.failure.set_result(message)

    def give_up(self, member: Member, message: str, sentence: str = "") -> None:
        """Accept that a lost member is not replaced. sentence: for clients, if given."""
        self.fail(message)
        lost = ClusterLost(sentence or f"{member} was lost")
        self._output.events.append(PrefillLost(member) if member.instance is None else lost)

    def unless_recovered(self, member: Member) -> None:
        """End the cluster if the member's kind does not recover in time."""
        self._deadlines.start(member.kind, self._recovery_ms, partial(self._not_recovered, member))

    def _not_recovered(self, member: Member) -> None:
        if self.has_come:
            return
        limit = f"recovery_timeout_ms ({self._recovery_ms} ms)"
        message = f"the service did not go on within {limit} after a loss: {self.last_loss}"
        self.give_up(member, message, message)
