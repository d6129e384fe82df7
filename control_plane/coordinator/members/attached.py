"""Members that have a stream: their addresses, and the messages to them."""

from __future__ import annotations

from control_plane.coordinator.members.output import MembersOutput
from nanocp.values.commands import Shutdown, ToMember
from nanocp.values.members import Envelope, Member, Peer


class Attached:
    """The members that have dialled and are not lost since."""

    def __init__(self, output: MembersOutput) -> None:
        self._output = output
        self._where: dict[Member, Peer] = {}

    def __contains__(self, member: Member) -> bool:
        return member in self._where

    def add(self, member: Member, where: Peer) -> None:
        """Record a member that dialled. where: its address for its peers."""
        self._where[member] = where

    def where(self, member: Member) -> Peer:
        """Return the address of a member for its peers, for a Join."""
        return self._where[member]

    def send(self, member: Member, message: ToMember, term: int) -> None:
        """Send a message of this term, if the member has a stream."""
        if member in self._where:
            self._output.sends.append((member, Envelope(message, term)))

    def drop(self, member: Member) -> None:
        """End the stream of a lost member, if it has one."""
        if self._where.pop(member, None) is not None:
            self._output.sends.append((member, None))

    def shut_down(self, member: Member, reason: str) -> None:
        """Ask the member to leave, and send nothing more."""
        if member in self._where:
            self._output.sends += [(member, Envelope(Shutdown(reason))), (member, None)]

    def let_go(self, member: Member, reason: str) -> None:
        """Ask the member to leave for another in its place."""
        self.shut_down(member, reason)
        self._where.pop(member, None)

    def shut_down_all(self, reason: str) -> None:
        """Ask every member to leave."""
        for member in self._where:
            self.shut_down(member, reason)
