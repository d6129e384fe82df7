"""Replacement of lost processes: each is killed, seen dead if that is possible, and followed.

Enters: members whose process is lost, processes that ended or were started. Leaves: commands to
kill and to start a process, or the reason why there is none. Does not know: streams, terms, why a
process was lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from control_plane.coordinator.members.deadlines import Deadlines
from control_plane.coordinator.members.output import KillProcess, MembersOutput, StartProcess
from nanocp.values.members import Member

_FENCE_S = 1.0
"""Longest wait to see a killed process dead. A term never needs it: it shares nothing with the last
one."""
_LAST_WORD_S = 0.2
"""Longest wait before a lost process is killed: how it ended says more than that its stream did."""
_END_S = 2.0
"""Longest wait for the end of a process that nothing else waits for, whose stream has ended."""
_DIAL_S, _LEAST_DIAL_S = 120.0, 30.0
"""Longest time without a sign of life of a process that was started: it may be stopped. Half of
recovery_timeout_ms, so that another one can be tried, but within these. Imports and what its start
reads first take less, also on a busy machine: an actor of Ray on a machine that has had none took
54 s at a load of 16 on two cores, and once more than 60."""

_PAUSES_S = (0.0, 0.0, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Before each further process of a member while no term begins; the last one again and again."""


@dataclass(slots=True, eq=False)
class _Lost:
    """A lost process that another one follows, until that was started."""

    member: Member
    number: int
    lives_on: Callable[[], None]
    failed: Callable[[str], None]
    how: str | None = None
    """How it ended, empty if that was known before; None until it was seen dead."""

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
        """silent: called with a member whose process shows no sign of life, and what it did not do.

        Signs of life are that it loads weights and that it dials. next_term: asked late for the
        term that a process will probably join.
        """
        self._deadlines, self._output = deadlines, output
        self._silent, self._next_term = silent, next_term
        self._dial_s = min(_DIAL_S, max(_LEAST_DIAL_S, recovery_timeout_ms / 2000))
        self._numbers = dict.fromkeys(members, 0)
        """The number of each member's process, counted from 0; a lost one is counted already."""
        self._lost: dict[tuple[Member, int], _Lost] = {}
        """By member and number of the lost process."""
        self._num_tries: Counter[Member] = Counter()
        """Processes that each member has had since a term last began."""
        self._coming: set[Member] = set()
        """Members whose next process is to be started, or has yet to dial."""

    def begin_term(self) -> None:
        """A term begins: what was tried has served its purpose."""
        self._num_tries.clear()

    def is_coming(self, member: Member) -> bool:
        """Whether a process of the member is on its way."""
        return member in self._coming

    def is_latest(self, member: Member, number: int) -> bool:
        """Whether the process of this number is the member's, and was not lost."""
        return self._numbers[member] == number

    def kill(self, member: Member) -> None:
        """End the process of a lost member, which no other follows."""
        self._output.processes.append(KillProcess(member, self._numbers[member]))
        self.retire(member)

    def kill_unheard(self) -> None:
        """End processes that import or load: they cannot read that they should leave."""
        for member in self._numbers:
            if member in self._coming or self._deadlines.met(f"{member} dials"):
                self.kill(member)

    def expect(self, member: Member) -> None:
        """The member has a process, which is to dial."""
        sentence = f"{member}: its process has not dialled in {self._dial_s:.0f} s"
        overdue = partial(self._silent, member, sentence)
        self._deadlines.start(f"{member} dials", self._dial_s * 1000, overdue)

    def loads(self, member: Member) -> None:
        """The member's process has loaded some of its weights."""
        if self._deadlines.met(f"{member} dials"):
            self.expect(member)

    def dialled(self, member: Member) -> None:
        """The member's process has dialled or beats: from now on its stream shows that it lives."""
        self._deadlines.met(f"{member} dials")
        self._coming.discard(member)

    def await_end(self, member: Member, overdue: Callable[[], None]) -> None:
        """Call this if the member's process has not been seen to end in a while."""
        self._deadlines.start(f"end of {member}", _END_S * 1000, overdue)

    def retire(self, member: Member) -> None:
        """The member's process is not waited for any more, and its end is no loss."""
        self.dialled(member)
        self._deadlines.met(f"end of {member}")
        self._numbers[member] += 1

    # --- a lost process, from its last word to the start of the next one

    def replace(
        self, member: Member, lives_on: Callable[[], None], failed: Callable[[str], None]
    ) -> None:
        """Kill a lost member's process, and start another.

        lives_on: called if the old process is not seen dead. failed: called with the reason if no
        process can be started.
        """
        lost = _Lost(member, self._numbers[member], lives_on, failed)
        self.retire(member)
        self._coming.add(member)
        self._lost[member, lost.number] = lost
        self._deadlines.start(f"last word of {lost}", _LAST_WORD_S * 1000, partial(self._end, lost))

    def exited(self, member: Member, number: int, how: str = "") -> None:
        """A process of this number was seen dead. how: it ended, if nobody knows yet."""
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
        """A command of the output was carried out. error: why it could not be."""
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
        num_tries = self._num_tries[lost.member]
        self._num_tries[lost.member] += 1
        pause_s = _PAUSES_S[min(num_tries, len(_PAUSES_S) - 1)]
        self._deadlines.start(f"pause after {lost}", pause_s * 1000, partial(self._start, lost))

    def _start(self, lost: _Lost) -> None:
        member, number = lost.member, lost.number + 1
        if not self.is_latest(member, number):
            del self._lost[member, lost.number]
            return  # It is not wanted any more, or another one comes.
        self.expect(member)
        self._output.processes.append(StartProcess(member, number, self._next_term()))
