"""Processes of members for the controller: killed, and started in place of lost ones.

Enters: a launcher, a spec for each member. Leaves: calls of the launcher. Does not know: terms.
"""

from __future__ import annotations

from collections.abc import Callable

from control_plane.launchers.launcher import Launcher
from control_plane.member_streams import Member
from data_plane.member.lifetime import MemberSpec


class MemberProcesses:
    """Processes of members for the controller, which replaces those that were lost."""

    def __init__(self, launcher: Launcher, spec: Callable[[Member, int], MemberSpec]) -> None:
        """spec: of a member that will probably join this term; an earlier one's secret is void."""
        self._launcher = launcher
        self._spec = spec

    def kill(self, member: Member) -> None:
        """See replacements.Processes."""
        self._launcher.kill(member)

    def start(self, member: Member, number: int, term: int) -> None:
        """See replacements.Processes."""
        self._launcher.start_one(member, number, self._spec(member, term))
