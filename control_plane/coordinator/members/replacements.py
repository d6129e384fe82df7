"""Replacement of lost processes: each is killed, seen dead if that is possible, and followed.

Enters: members whose process is lost, processes that ended. Leaves: another process for the same
member, or the reason why there is none. Does not know: streams, terms, why a process was lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Protocol

from control_plane.coordinator.members.deadlines import Deadlines
from nanocp.values.members import Member

logger = logging.getLogger(__name__)

_FENCE_S = 1.0
"""Longest wait to see a killed process dead. A term never needs it: it shares nothing with the last
one."""
_LAST_WORD_S = 0.2
"""Longest wait before a lost process is killed: how it ended says more than that its stream did."""
_DIAL_S, _LEAST_DIAL_S = 120.0, 30.0
"""Longest time without a sign of life of a process that was started: it may be stopped. Half of
recovery_timeout_ms, so that another one can be tried, but within these. Imports and what its start
reads first take less, also on a busy machine: an actor of Ray on a machine that has had none took
54 s at a load of 16 on two cores, and once more than 60."""

_PAUSES_S = (0.0, 0.0, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Before each further process of a member while no term begins; the last one again and again."""


class Processes(Protocol):
    """The members' processes. Calls block, and come from worker threads."""

    def kill(self, member: Member) -> None:
        """End the member's latest process at once, as a failure would."""

    def start(self, member: Member, number: int, term: int) -> None:
        """Start another process for a member, whose number tells it from earlier ones.

        term: the one that it will probably join. Raises OSError or RuntimeError.
        """

    def obstacle_to_more(self, num_instances: int) -> str:
        """Why there is no room for so many more instances, for an operator; empty if there is."""


class Replacements:
    """The latest process of each member. Used from the controller's event loop."""

    def __init__(
        self,
        members: Iterable[Member],
        processes: Processes,
        deadlines: Deadlines,
        silent: Callable[[Member, str], None],
        recovery_timeout_ms: float,
    ) -> None:
        """silent: called with a member whose process shows no sign of life, and what it did not do.

        Signs of life are that it loads weights and that it dials.
        """
        self.processes = processes
        self._deadlines = deadlines
        self._silent = silent
        self._dial_s = min(_DIAL_S, max(_LEAST_DIAL_S, recovery_timeout_ms / 2000))
        self._numbers = dict.fromkeys(members, 0)
        """The number of each member's process, counted from 0; a lost one is counted already."""
        self._exits: dict[tuple[Member, int], asyncio.Future[str]] = {}
        """By member and number of a lost process: done once it was seen dead, with how it ended."""
        self._num_tries: Counter[Member] = Counter()
        """Processes that each member has had since a term last began."""
        self._coming: set[Member] = set()
        """Members whose next process is to be started, or has yet to dial."""
        self._tasks: set[asyncio.Task[None]] = set()

    def begin_term(self) -> None:
        """A term begins: what was tried has served its purpose."""
        self._num_tries.clear()

    def is_coming(self, member: Member) -> bool:
        """Whether a process of the member is on its way."""
        return member in self._coming

    def is_latest(self, member: Member, number: int) -> bool:
        """Whether the process of this number is the member's, and was not lost."""
        return self._numbers[member] == number

    def exited(self, member: Member, number: int, how: str = "") -> None:
        """A process of this number was seen dead. how: it ended, if nobody knows yet."""
        gone = self._exits.get((member, number))
        if gone is not None and not gone.done():
            gone.set_result(how)

    def kill(self, member: Member) -> None:
        """End the process of a lost member, which no other follows."""
        self.retire(member)
        self._run(asyncio.to_thread(self.processes.kill, member))

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

    def retire(self, member: Member) -> None:
        """The member's process is not waited for any more, and its end is no loss."""
        self.dialled(member)
        self._numbers[member] += 1

    def replace(
        self,
        member: Member,
        term: Callable[[], int],
        lives_on: Callable[[], None],
        failed: Callable[[str], None],
    ) -> None:
        """Kill a lost member's process, and start another.

        term: asked late for the one that it will probably join. lives_on: called if the old process
        is not seen dead. failed: called with the reason if no process can be started.
        """
        number = self._numbers[member]
        self.retire(member)
        self._coming.add(member)
        gone = self._exits[member, number] = asyncio.get_running_loop().create_future()

        async def replace() -> None:
            try:
                await asyncio.wait({gone}, timeout=_LAST_WORD_S)
                if gone.done() and gone.result():
                    logger.warning("%s: %s", member, gone.result())
                await asyncio.to_thread(self.processes.kill, member)
                await asyncio.wait({gone}, timeout=_FENCE_S)
                del self._exits[member, number]
                if not gone.done():
                    lives_on()
                num_tries = self._num_tries[member]
                self._num_tries[member] += 1
                await asyncio.sleep(_PAUSES_S[min(num_tries, len(_PAUSES_S) - 1)])
                if not self.is_latest(member, number + 1):
                    return  # It is not wanted any more, or another one comes.
                self.expect(member)
                await asyncio.to_thread(self.processes.start, member, number + 1, term())
            except (OSError, RuntimeError) as error:
                self.dialled(member)
                failed(str(error))

        self._run(replace())

    def _run(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
