"""The end of a cluster: why it can no longer serve, or why its start failed.

Enters: reasons, losses that are not made good. Leaves: the first reason, for who waits for it; to
the scheduler, which loss ends the requests. Does not know: streams, processes, terms.
"""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial

from control_plane.coordinator.members.deadlines import Deadlines
from control_plane.coordinator.members.output import MembersOutput, PrefillLost
from control_plane.coordinator.members.seats import Seats
from control_plane.coordinator.members.start import Start
from nanocp.values.members import PREFILL, Member
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
        """Why every member is asked to leave; None until then."""
        self.failure: Future[str] = Future()
        """Done when a running cluster can no longer serve: the sentence that says why."""
        self.last_loss = ""
        """What the latest loss was, in a sentence."""

    @property
    def has_come(self) -> bool:
        """Whether the cluster serves nobody any more, and a loss changes nothing."""
        return self.leaving is not None or self.failure.done()

    def fail(self, message: str) -> None:
        """End the cluster, or its start, for this reason; the first reason counts."""
        if self.leaving is not None:
            return
        if not self._start.is_over:
            self._start.fail(message)
        elif not self.failure.done():
            self._output.say(message)
            self._seats.end(message)
            self.failure.set_result(message)

    def give_up(self, member: Member, message: str, sentence: str = "") -> None:
        """A lost member is not replaced. sentence: what clients get; empty: that it was lost."""
        self.fail(message)
        lost = ClusterLost(sentence or f"{member} was lost")
        self._output.events.append(PrefillLost() if member == PREFILL else lost)

    def unless_recovered(self, member: Member) -> None:
        """End the cluster if the member's kind does not serve again in time."""
        self._deadlines.start(member.kind, self._recovery_ms, partial(self._not_recovered, member))

    def _not_recovered(self, member: Member) -> None:
        if self.has_come:
            return
        limit = f"recovery_timeout_ms ({self._recovery_ms} ms)"
        message = f"the service did not go on within {limit} after a loss: {self.last_loss}"
        self.give_up(member, message, message)
