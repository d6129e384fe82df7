"""Heartbeats: which member has been silent for too long, and whom a blocked member waits for.

Enters: heartbeats of members, ticks of the controller. Leaves: silent members; the member at the
root of a chain of waits. Does not know: clocks, streams, what is done about a silent member.

Silence is counted in ticks that the controller itself has lived through. A controller that was
stopped for a minute has seen one tick, and blames no member for that minute.
"""

from __future__ import annotations

from nanocp.values.members import Member

TICKS = 6
"""Ticks without a heartbeat after which a member is silent for too long."""


class Heartbeats:
    """Members that have sent a heartbeat, until they are forgotten."""

    def __init__(self) -> None:
        self._silent_ticks: dict[Member, int] = {}
        self._awaited: dict[Member, Member] = {}
        """For each member whose decode thread is blocked: the one that it waits for."""

    def heard(self, member: Member, awaited: int | None = None) -> None:
        """A heartbeat came. awaited: the instance that the member is blocked on."""
        self._silent_ticks[member] = 0
        if awaited is None:
            self._awaited.pop(member, None)
        else:
            self._awaited[member] = Member("instance", awaited)

    def forget(self, member: Member) -> None:
        """The member's process is gone; another one counts from its first heartbeat on."""
        self._silent_ticks.pop(member, None)
        self._awaited.pop(member, None)

    def tick(self) -> list[Member]:
        """A tick has passed; returns the members that are silent for too long."""
        for member in self._silent_ticks:
            self._silent_ticks[member] += 1
        return [member for member, ticks in self._silent_ticks.items() if ticks > TICKS]

    def root(self, member: Member) -> Member:
        """The member that this one waits for, itself or through others; itself if for none.

        Members that wait for each other in a circle are all to blame; one of them is returned.
        """
        seen = {member}
        while (awaited := self._awaited.get(member)) is not None and awaited not in seen:
            seen.add(awaited)
            member = awaited
        return member
