"""The interface for starting processes of members and spares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from nanocp.values.members import Member

KILL_TIMEOUT_S = 5.0
"""A killed process is gone after this long."""

Exited = Callable[[Member, int, str], None]
"""Called from any thread with a member, its process's number, and the kind of its end."""

SpareEnded = Callable[[str, bool], None]
"""Called from any thread with the end of a process without a seat, and whether it was ready."""


class Launcher(Protocol):
    """Starts every member of one cluster, and replacements of lost ones."""

    def start(self, specs: Mapping[Member, object], exited: Exited) -> None:
        """Start a process for each (member, spec): number 0 of each member.

        Raises OSError or RuntimeError if one cannot be started.
        """

    def start_one(self, member: Member, number: int, spec: object) -> None:
        """Start another process for a member in the place of its last one, or give it a spare.

        From any thread. Raises OSError or RuntimeError, also after `stop`.
        """

    def start_spare(self, name: str, spec: object, ended: SpareEnded) -> None:
        """Start a process without a member, which prepares by this spec to become an instance's.

        ended: not called once it has. From any thread. Raises OSError or RuntimeError, also after
        `stop`.
        """

    @property
    def spares(self) -> Sequence[bool]:
        """For each spare whether it is ready to become an instance's. From any thread."""

    def end_spares(self) -> None:
        """End every spare, without calls of `ended`. From any thread."""

    def stop(self, timeout_s: float) -> Sequence[Member]:
        """Wait for members that were asked to leave, kill the others, release everything.

        Returns the known killed members. Idempotent.
        """

    def kill(self, member: Member) -> None:
        """End a member's latest process at once, even if it is stopped; nothing after `stop`."""
