"""What starts the processes of members and of spares, whatever they are.

Enters: nothing. Leaves: a protocol. Does not know: what a member does, the controller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from nanocp.values.members import Member

KILL_TIMEOUT_S = 5.0
"""A process that was killed is gone after this long."""

Exited = Callable[[Member, int, str], None]
"""Called with a member, the number of its process, and how that ended. From any thread; also after
a member left because it was asked to."""

SpareEnded = Callable[[str, bool], None]
"""Called with how a process without a seat ended, and whether it was ready for one. From any
thread."""


class Launcher(Protocol):
    """Starts every member of one cluster, and others in place of those that were lost."""

    def start(self, specs: Mapping[Member, object], exited: Exited) -> None:
        """Start a process for each (member, spec): number 0 of each member.

        Raises OSError or RuntimeError if one cannot be started.
        """

    def start_one(self, member: Member, number: int, spec: object) -> None:
        """Start another process for a member whose process is gone, where that one was.

        A spare becomes an instance's process if there is one. From any thread. Raises OSError or
        RuntimeError, also after `stop`.
        """

    def start_spare(self, name: str, spec: object, ended: SpareEnded) -> None:
        """Start a process of no member, which prepares by this spec to become an instance's.

        ended: not called once it has. From any thread. Raises OSError or RuntimeError, also after
        `stop`.
        """

    @property
    def spares(self) -> Sequence[bool]:
        """For each spare whether it is ready to become an instance's process. From any thread."""

    def end_spares(self) -> None:
        """End every spare, without a call of what was to be called. From any thread."""

    def stop(self, timeout_s: float) -> Sequence[Member]:
        """Wait for members that were asked to leave, kill the others, release everything.

        Returns the members that were killed, where that is known. A second call does nothing.
        """

    def kill(self, member: Member) -> None:
        """End a member's latest process at once, as a failure would, even if it is stopped."""
