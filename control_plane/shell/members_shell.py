"""The shell around the members' coordinator: it carries out its output, and wakes it in time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, Protocol, TypeVar

from control_plane.coordinator.members.deadlines import Deadlines
from control_plane.coordinator.members.members import Members
from control_plane.coordinator.members.output import (
    KillProcess,
    MembersEvent,
    MembersOutput,
    StartProcess,
)
from control_plane.ports.member_streams import MemberListener, MemberStream
from nanocp.values.members import Hello, Loading, Member, Report, Said

logger = logging.getLogger(__name__)

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class Processes(Protocol):
    """The members' processes. `kill` and `start` block, in worker threads."""

    def kill(self, member: Member) -> None:
        """End the member's latest process at once, as a failure would."""

    def start(self, member: Member, number: int, term: int) -> None:
        """Start another process for a member, with a new number.

        term: the one that it will probably join. Raises OSError or RuntimeError.
        """

    def obstacle_to_more(self, num_instances: int) -> str:
        """Explain why there is no room for this many more instances; empty if there is."""


class MembersShell(MemberListener):
    """The listener of the members' port. Used from the controller's event loop."""

    def __init__(
        self,
        members: Members,
        processes: Processes,
        take_up: Callable[[MembersEvent], None],
        reported: Callable[[Member, Report], None],
        deadlines: Deadlines,
    ) -> None:
        """take_up: called with each event. reported: with each report of the present term.

        `reported` may raise a ValueError, which ends the stream. deadlines: others that need the
        time too.
        """
        self._members = members
        self._processes = processes
        self._take_up = take_up
        self._reported = reported
        self.loaded: Callable[[Member, int], None] = lambda member, percent: None
        """Called for each percent of its weights that a member has loaded."""
        self.deadlines = deadlines
        self._streams: dict[Member, MemberStream] = {}
        self._commands: dict[Member, deque[KillProcess | StartProcess]] = {}
        """Pending commands for each member's processes, one after the other."""
        self._workers: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    # --- member_streams.MemberListener

    @property
    def leaving(self) -> str | None:
        return self._members.end.leaving

    def attach(self, member: Member, hello: Hello | None) -> MemberStream:
        self._members.attach(member, hello)
        stream = self._streams[member] = MemberStream(member)
        self.settle()
        return stream

    def loading(self, member: Member, percent: int) -> None:
        if self.within(self._members.loading, member):
            self.loaded(member, percent)

    def received(self, member: Member, said: Said, term: int) -> None:
        if isinstance(said, Loading):
            self.loading(member, said.percent)
            return
        if self._members.heard(member, said, term):
            self._reported(member, said)  # type: ignore[arg-type]
            if not self._members.output:
                return  # As after most reports, of which every instance sends one a window.
        self.settle()

    def failed(self, member: Member | None, message: str, says_why: bool = True) -> None:
        self.within(self._members.failed, member, message, says_why)

    # --- what leaves the coordinator

    def within(
        self,
        call: Callable[_Arguments, _Result],
        *arguments: _Arguments.args,
        **named: _Arguments.kwargs,
    ) -> _Result:
        """Call the coordinator, and carry out its output."""
        result = call(*arguments, **named)
        self.settle()
        return result

    def settle(self) -> None:
        """Carry out the coordinator's output, and wake it again in time."""
        now_us = time.monotonic_ns() // 1000
        try:
            self._tick(now_us)
            while output := self._members.output.take():
                self._carry_out(output)
                self._tick(now_us)
        except Exception as error:
            # What it wanted may be done in part: nothing that follows could be trusted.
            logger.exception("the coordinator of members failed")
            self._members.end.fail(f"the controller failed: {type(error).__name__}: {error}")
        self._sleep(now_us)

    def _tick(self, now_us: int) -> None:
        self.deadlines.tick(now_us)
        self._members.deadlines.tick(now_us)

    def _carry_out(self, output: MembersOutput) -> None:
        for text, is_warning in output.says:
            logger.log(logging.WARNING if is_warning else logging.INFO, "%s", text)
        for command in output.processes:
            self._begin(command)
        unread = self._send(output)
        for event in output.events:
            self._take_up(event)
        for stream in unread:
            if self._streams.get(stream.member) is stream:
                limit = f"{stream.member} left {stream.max_messages} messages unread"
                self._members.lose(stream.member, limit, "unread")

    def _send(self, output: MembersOutput) -> list[MemberStream]:
        full = []
        for member, message in output.sends:
            stream = self._streams.get(member)
            if stream is None:
                continue
            if message is None:
                stream.close()
                del self._streams[member]
            elif not stream.send(message) and not stream.closed:
                stream.close()  # It has a gap: nothing may follow.
                full.append(stream)
        return full

    def _sleep(self, now_us: int) -> None:
        deadlines = (self.deadlines.next_us, self._members.deadlines.next_us)
        due_us = min((each for each in deadlines if each is not None), default=None)
        if due_us is None:
            return
        loop = asyncio.get_running_loop()
        due_s = loop.time() + (due_us - now_us) / 1e6
        if self._timer is not None:
            if self._timer.when() <= due_s and not self._timer.cancelled():
                return  # It wakes earlier, and sleeps again.
            self._timer.cancel()
        self._timer = loop.call_at(due_s, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self.settle()

    # --- processes

    def _begin(self, command: KillProcess | StartProcess) -> None:
        member = command.member
        if member in self._commands:
            self._commands[member].append(command)
            return
        self._commands[member] = deque([command])
        worker = asyncio.get_running_loop().create_task(self._work(member))
        self._workers.add(worker)
        worker.add_done_callback(self._workers.discard)

    async def _work(self, member: Member) -> None:
        commands = self._commands[member]
        while commands:
            command, error = commands.popleft(), None
            try:
                await asyncio.to_thread(self._do, command)
            except (OSError, RuntimeError) as failure:
                error = str(failure)
            except Exception as failure:
                error = f"{type(failure).__name__}: {failure}"
            self.within(self._members.replacements.done, command, error)
        del self._commands[member]

    def _do(self, command: KillProcess | StartProcess) -> None:
        match command:
            case KillProcess():
                self._processes.kill(command.member)
            case StartProcess():
                self._processes.start(command.member, command.number, command.term)


async def wait_for(done: Future[None], limit_s: float, what_follows: str) -> None:
    """Wait for an operator's change; at the limit `done` is cancelled.

    Raises the error of `done`, or TimeoutError, with a sentence that ends with what_follows.
    """
    try:
        async with asyncio.timeout(limit_s):
            await asyncio.wrap_future(done)
    except TimeoutError:
        raise TimeoutError(f"not done after {limit_s:.0f} s; {what_follows}") from None
