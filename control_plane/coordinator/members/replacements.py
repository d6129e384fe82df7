"""Replacement of lost processes: each is killed, seen dead if possible, and followed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from control_plane.coordinator.members.deadlines import Deadlines
from control_plane.coordinator.members.output import KillProcess, MembersOutput, StartProcess
from nanocp.values.members import Member
from nanocp.values.restarts import Restarts

_FENCE_S = 1.0
"""Longest wait to see a killed process dead. A term shares nothing with it."""
_LAST_WORD_S = 0.2
"""Longest wait before a lost process is killed: its end says more than its stream did."""
_END_S = 2.0
"""Longest wait for the end of a process whose stream has ended."""
_DIAL_S, _LEAST_DIAL_S = 120.0, 30.0
"""Bounds of the time without a sign of life of a started process: half of recovery_timeout_ms.

An actor of Ray took 54 s on a busy machine, and once over 60.
"""

_PAUSES_S = (0.0, 0.0, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Pauses before further processes of a member while no term begins; the last one repeats."""


@dataclass(slots=True, eq=False)
class _Lost:
    """A lost process until its successor was started."""

    member: Member
    number: int
    lives_on: Callable[[], None]
    failed: Callable[[str], None]
    how: str | None = None
    """Sentence about its end, empty if already known; None until it was seen dead."""

    def __str__(self) -> str:
        return f"{self.member}, process {self.number}"


class Replacements:
    """The latest process of each member."""

    def __init__(
        self,
        members: Iterable[Member],
        deadlines: Deadlines,
        output: MembersOutput,
        silent: Callable[[Member, str], None],
        next_term: Callable[[], int],
        recovery_timeout_ms: float,
    ) -> None:
        """silent: called with a member without a sign of life, and what it did not do.

        next_term: returns the term that a process will probably join.
        """
        self._deadlines, self._output = deadlines, output
        self._silent, self._next_term = silent, next_term
        self._dial_s = min(_DIAL_S, max(_LEAST_DIAL_S, recovery_timeout_ms / 2000))
        self._numbers = dict.fromkeys(members, 0)
        """Number of each member's process, from 0; a lost one is already counted."""
        self._lost: dict[tuple[Member, int], _Lost] = {}
        """By member and number of the lost process."""
        self._restarts = {member: Restarts(_PAUSES_S) for member in self._numbers}
        """Restarts of each member since a term last began."""
        self._coming: set[Member] = set()
        """Members whose next process has yet to dial."""

    def begin_term(self) -> None:
        """Forget earlier tries, since a term begins."""
        for restarts in self._restarts.values():
            restarts.clear()

    def is_coming(self, member: Member) -> bool:
        """Return whether a process of the member is on its way."""
        return member in self._coming

    def is_latest(self, member: Member, number: int) -> bool:
        """Return whether this is the member's process, and not lost."""
        return self._numbers[member] == number

    def kill(self, member: Member) -> None:
        """End the process of a lost member without a successor."""
        self._output.processes.append(KillProcess(member, self._numbers[member]))
        self.retire(member)

    def kill_unheard(self) -> None:
        """End processes that import or load: they read no messages."""
        for member in self._numbers:
            if member in self._coming or self._deadlines.met(f"{member} dials"):
                self.kill(member)

    def expect(self, member: Member) -> None:
        """Expect the member's process to dial."""
        sentence = f"{member}: its process has not dialled in {self._dial_s:.0f} s"
        overdue = partial(self._silent, member, sentence)
        self._deadlines.start(f"{member} dials", self._dial_s * 1000, overdue)

    def loads(self, member: Member) -> None:
        """Record that the member's process has loaded some of its weights."""
        if self._deadlines.met(f"{member} dials"):
            self.expect(member)

    def dialled(self, member: Member) -> None:
        """Record that the process dialled or beats: now its stream shows its life."""
        self._deadlines.met(f"{member} dials")
        self._coming.discard(member)

    def await_end(self, member: Member, overdue: Callable[[], None]) -> None:
        """Call `overdue` if the process does not end in a while."""
        self._deadlines.start(f"end of {member}", _END_S * 1000, overdue)

    def retire(self, member: Member) -> None:
        """Stop waiting for the member's process; its end is no loss."""
        self.dialled(member)
        self._deadlines.met(f"end of {member}")
        self._numbers[member] += 1

    # --- a lost process, from its last word to the start of the next one

    def replace(
        self, member: Member, lives_on: Callable[[], None], failed: Callable[[str], None]
    ) -> None:
        """Kill a lost member's process, and start another.

        lives_on: called if the old process is not seen dead. failed: called with the reason if none
        can be started.
        """
        lost = _Lost(member, self._numbers[member], lives_on, failed)
        self.retire(member)
        self._coming.add(member)
        self._lost[member, lost.number] = lost
        self._deadlines.start(f"last word of {lost}", _LAST_WORD_S * 1000, partial(self._end, lost))

    def exited(self, member: Member, number: int, how: str = "") -> None:
        """Record a process that was seen dead. how: it ended, if nobody knows yet."""
        lost = self._lost.get((member, number))
        if lost is None or lost.how is not None:
            return
        lost.how = how
        if self._deadlines.met(f"last word of {lost}"):
            self._end(lost)
        elif self._deadlines.met(f"end of {lost}"):
            self._follow(lost)

    def _end(self, lost: _Lost) -> None:
        if lost.how:
            self._output.warn(f"{lost.member}: {lost.how}")
        self._output.processes.append(KillProcess(lost.member, lost.number))

    def done(self, command: KillProcess | StartProcess, error: str | None) -> None:
        """Record a command that was carried out. error: the reason if it failed."""
        is_start = isinstance(command, StartProcess)
        lost = self._lost.get((command.member, command.number - is_start))
        if lost is None:
            if error is not None:
                self._output.warn(f"{command.member}: {error}")
            return
        if error is not None or is_start:
            del self._lost[lost.member, lost.number]
        if error is not None:
            self.dialled(lost.member)
            lost.failed(error)
        elif not is_start and lost.how is not None:
            self._follow(lost)
        elif not is_start:
            overdue = partial(self._not_seen_dead, lost)
            self._deadlines.start(f"end of {lost}", _FENCE_S * 1000, overdue)

    def _not_seen_dead(self, lost: _Lost) -> None:
        lost.lives_on()
        self._follow(lost)

    def _follow(self, lost: _Lost) -> None:
        pause_s = self._restarts[lost.member].pause_s()
        assert pause_s is not None
        self._deadlines.start(f"pause after {lost}", pause_s * 1000, partial(self._start, lost))

    def _start(self, lost: _Lost) -> None:
        member, number = lost.member, lost.number + 1
        if not self.is_latest(member, number):
            del self._lost[member, lost.number]
            return  # It is not wanted any more, or another one comes.
        self.expect(member)
        self._output.processes.append(StartProcess(member, number, self._next_term()))
