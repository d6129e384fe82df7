"""What the controller does about the members: losses, terms, reports.

Enters: nothing. Leaves: a protocol. Does not know: how members are watched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from nanocp.values.members import Member, Report
from nanocp.values.plan import TargetRun


class MemberEvents(Protocol):
    """What is done about the members. Called from the controller's event loop."""

    @property
    def newest_ticket(self) -> int:
        """The last ticket of all terms so far."""

    @property
    def has_windows(self) -> bool:
        """Whether a window was sent that some instance has not reported."""

    def reported(self, member: Member, report: Report) -> None:
        """Take a member's report on its work in this term.

        Raises ValueError if the member cannot have meant it: its stream then ends.
        """

    def prefill_arrived(self) -> None:
        """A prefill has dialled and will join the term; it knows no ticket."""

    def took_over(self, kept: Sequence[tuple[int, tuple[TargetRun, ...]]]) -> None:
        """The first term of a controller is joined that takes the place of a lost one.

        kept: (request, its pages), as the instances still hold them.
        """

    def instance_lost(self, instance: int) -> None:
        """The instance's process is gone, with its frames. Another takes its seat."""

    def seats_wanted(self, seats: tuple[int, ...]) -> None:
        """Bring the term to its end in order, for one with these instances; see plan.SeatsWanted.

        The seats of the present term end a change that is under way.
        """

    def term_ended(self) -> None:
        """No member takes windows any more."""

    def term_began(self, term: int) -> None:
        """Every instance has joined a term that is not the first."""

    def cluster_lost(self, message: str) -> None:
        """No term will serve any more."""

    def prefill_lost(self) -> None:
        """No prefill will come any more. Requests that have their KV go on."""
