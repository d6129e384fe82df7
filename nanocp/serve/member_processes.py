"""Processes of members for the controller: killed, and started again when lost."""

from __future__ import annotations

from collections.abc import Callable

from control_plane.launchers.launcher import Launcher
from control_plane.shell.members_shell import Processes
from data_plane.member.lifetime import MemberSpec
from data_plane.transport.shared_memory import obstacle_to_more
from nanocp.values.members import Member


class MemberProcesses(Processes):
    """Processes of members, restarted when lost."""

    def __init__(
        self, launcher: Launcher, spec: Callable[[Member, int], MemberSpec], cluster_id: str
    ) -> None:
        """spec: of a member likely to join this term; it voids the earlier secret."""
        self._launcher = launcher
        self._spec = spec
        self._cluster_id = cluster_id

    def kill(self, member: Member) -> None:
        self._launcher.kill(member)

    def start(self, member: Member, number: int, term: int) -> None:
        self._launcher.start_one(member, number, self._spec(member, term))

    def obstacle_to_more(self, num_instances: int) -> str:
        return obstacle_to_more(self._cluster_id, num_instances)
