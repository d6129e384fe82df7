"""Actions and questions of the members' coordinator."""

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
    """Start another process for a member, after all earlier actions for it."""

    member: Member
    number: int
    """Tells the process from earlier ones."""
    term: int
    """Term that it will probably join."""


@dataclass(frozen=True, slots=True)
class PrefillArrived:
    """A prefill or a puller has dialled and was asked to join the term; it knows no ticket."""

    member: Member


@dataclass(frozen=True, slots=True)
class PrefillLost:
    """No prefill or puller will come any more. Requests that have their KV continue."""

    member: Member


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
"""Events of members and terms. The first term of a fresh service begins without one."""


class LogLine(NamedTuple):
    """A line of the log."""

    text: str
    is_warning: bool


@dataclass(slots=True)
class MembersOutput:
    """Actions, each list in its order: first all sends, then the events."""

    sends: list[tuple[Member, Envelope | None]] = field(default_factory=list)
    """None ends the member's stream."""
    events: list[MembersEvent] = field(default_factory=list)
    processes: list[KillProcess | StartProcess] = field(default_factory=list)
    """Commands; the coordinator learns when each is done or has failed."""
    says: list[LogLine] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.sends or self.events or self.processes or self.says)

    def take(self) -> MembersOutput:
        """Return all actions, and forget them."""
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
    """Facts that the coordinator asks for."""

    @property
    def newest_ticket(self) -> int:
        """The last ticket of all terms so far."""

    @property
    def has_windows(self) -> bool:
        """Return whether a window was sent that some instance has not reported."""

    def obstacle_to_more(self, num_instances: int) -> str:
        """Explain why there is no room for this many more instances; empty if there is."""
