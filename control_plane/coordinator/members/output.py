"""What leaves the members' coordinator, and what it asks: values, and one protocol.

Enters: nothing. Leaves: the values. Does not know: streams, processes, clocks, logs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from nanocp.values.members import Envelope, Member
from nanocp.values.plan import (
    ClusterLost,
    InstanceLost,
    Regrouped,
    SeatsWanted,
    TermEnded,
    TookOver,
)


@dataclass(frozen=True, slots=True)
class KillProcess:
    """End the member's latest process at once, as a failure would."""

    member: Member
    number: int
    """The process that is lost."""


@dataclass(frozen=True, slots=True)
class StartProcess:
    """Start another process for a member, after all that was to be done for it before."""

    member: Member
    number: int
    """Tells the process from earlier ones."""
    term: int
    """The term that it will probably join."""


@dataclass(frozen=True, slots=True)
class PrefillArrived:
    """A prefill has dialled and was asked to join the term; it knows no ticket."""


@dataclass(frozen=True, slots=True)
class PrefillLost:
    """No prefill will come any more. Requests that have their KV go on."""


MembersEvent = (
    InstanceLost
    | TermEnded
    | Regrouped
    | SeatsWanted
    | ClusterLost
    | TookOver
    | PrefillArrived
    | PrefillLost
)
"""What becomes of members and terms, for the scheduler and for what is in flight. The first term of
a service that takes over nothing begins without one."""


class LogLine(NamedTuple):
    """A line of the log."""

    text: str
    is_warning: bool


@dataclass(slots=True)
class MembersOutput:
    """What is to be done, each list in its order: first all sends, then the events."""

    sends: list[tuple[Member, Envelope | None]] = field(default_factory=list)
    """Messages down the members' streams; None ends the stream after what went before."""
    events: list[MembersEvent] = field(default_factory=list)
    processes: list[KillProcess | StartProcess] = field(default_factory=list)
    """The coordinator is told when each is done, or why it cannot be."""
    says: list[LogLine] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.sends or self.events or self.processes or self.says)

    def take(self) -> MembersOutput:
        """Return what is here, and forget it."""
        taken = MembersOutput(self.sends, self.events, self.processes, self.says)
        self.sends, self.events, self.processes, self.says = [], [], [], []
        return taken

    def say(self, text: str) -> None:
        """Add a line to the log."""
        self.says.append(LogLine(text, is_warning=False))

    def warn(self, text: str) -> None:
        """Add a warning to the log."""
        self.says.append(LogLine(text, is_warning=True))


class Facts(Protocol):
    """What the coordinator asks of the world around it."""

    @property
    def newest_ticket(self) -> int:
        """The last ticket of all terms so far."""

    @property
    def has_windows(self) -> bool:
        """Whether a window was sent that some instance has not reported."""

    def obstacle_to_more(self, num_instances: int) -> str:
        """Why there is no room for so many more instances, for an operator; empty if there is."""
