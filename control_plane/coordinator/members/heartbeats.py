"""Heartbeats: members that are silent for too long, and the root of a chain of waits.

Silence is counted in ticks of the controller, which may have been stopped.
"""

from __future__ import annotations

from nanocp.values.members import Member

TICKS = 6
"""Ticks without a heartbeat after which a member is silent for too long."""


class Heartbeats:
    """Members that have sent a heartbeat, until they are forgotten."""

    def __init__(self, suspect_ms: int) -> None:
        """suspect_ms: silence that is too long."""
        self.suspect_ms, self.tick_ms = suspect_ms, suspect_ms / TICKS
        self._silent_ticks: dict[Member, int] = {}
        self._awaited: dict[Member, Member] = {}
        """By member with a blocked decode thread: the member that it waits for."""

    def heard(self, member: Member, awaited: int | None = None) -> None:
        """Record a heartbeat. awaited: the instance that the member is blocked on."""
        self._silent_ticks[member] = 0
        if awaited is None:
            self._awaited.pop(member, None)
        else:
            self._awaited[member] = Member("instance", awaited)

    def forget(self, member: Member) -> None:
        """Forget a member without a process."""
        self._silent_ticks.pop(member, None)
        self._awaited.pop(member, None)

    def tick(self) -> list[Member]:
        """Count a tick; return the members that are silent for too long."""
        for member in self._silent_ticks:
            self._silent_ticks[member] += 1
        return [member for member, ticks in self._silent_ticks.items() if ticks > TICKS]

    def root(self, member: Member) -> Member:
        """Return the last member in the chain of waits from this one; any member of a circle."""
        seen = {member}
        while (awaited := self._awaited.get(member)) is not None and awaited not in seen:
            seen.add(awaited)
            member = awaited
        return member
