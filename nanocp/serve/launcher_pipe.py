"""A launcher whose processes outlive their controller: its host is in the supervisor.

A later controller gets a new pipe and the living processes, each as number 0.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from control_plane.launchers.launcher import Exited, Launcher, SpareEnded
from nanocp.values.members import Member

logger = logging.getLogger(__name__)

_ANSWER_TIMEOUT_S = 60.0


@dataclass(slots=True)
class _Process:
    number: int
    """Counts all processes of the host."""
    spec: Any
    known_as: int
    lives: bool = True


class LauncherHost:
    """The processes of one launcher, for successive controllers. In the supervisor."""

    def __init__(self, name: str, launcher: Launcher) -> None:
        """name: the launcher's, in its pipe.

        From the main thread. Raises as Launcher.start does.
        """
        self.name = name
        self._launcher = launcher
        self._numbers = itertools.count()
        self._processes: dict[Member, _Process] = {}
        self._pipe: Pipe | None = None
        self._lock = threading.Lock()
        launcher.start({}, self._exited)

    def attach(self, pipe: Pipe) -> dict[Member, Any]:
        """Serve another controller; returns the specs of living processes."""
        with self._lock:
            self._pipe = pipe
            self._processes = {m: each for m, each in self._processes.items() if each.lives}
            for process in self._processes.values():
                process.known_as = 0
            return {member: process.spec for member, process in self._processes.items()}

    def call(self, method: str, arguments: Sequence[Any]) -> Any:
        """Make a call of PipedLauncher."""
        match method:
            case "start_one":
                return self._start_one(*arguments)
            case "start_spare":
                name, spec = arguments
                return self._launcher.start_spare(name, spec, self._spare_ended)
            case "spares":
                return tuple(self._launcher.spares)
        return getattr(self._launcher, method)(*arguments)

    def stop(self, timeout_s: float) -> None:
        """End every process."""
        self._launcher.stop(timeout_s)

    def _start_one(self, member: Member, number: int, spec: Any) -> None:
        with self._lock:
            own = next(self._numbers)
            process = self._processes[member] = _Process(own, spec, number)
        try:
            self._launcher.start_one(member, own, spec)
        except (OSError, RuntimeError):
            process.lives = False
            raise

    def _exited(self, member: Member, number: int, how: str) -> None:
        with self._lock:
            process = self._processes.get(member)
            if process is None or process.number != number:
                return  # Another took its place, which the controller has asked for.
            process.lives = False
            pipe, known_as = self._pipe, process.known_as
        if pipe is not None:
            pipe.send("exited", self.name, member, known_as, how)

    def _spare_ended(self, how: str, was_ready: bool) -> None:
        with self._lock:
            pipe = self._pipe
        if pipe is not None:
            pipe.send("spare ended", self.name, how, was_ready)


class PipedLauncher(Launcher):
    """A Launcher in the controller's process; the supervisor has the processes."""

    def __init__(self, name: str, pipe: Pipe, living: Mapping[Member, Any]) -> None:
        """living: specs of an earlier controller's processes."""
        self.living = dict(living)
        self._name = name
        self._pipe = pipe

    def start(self, specs: Mapping[Member, object], exited: Exited) -> None:
        """Start members that do not live yet."""
        self._pipe.listen(self._name, exited)
        for member, spec in specs.items():
            if member not in self.living:
                self.start_one(member, 0, spec)

    def start_one(self, member: Member, number: int, spec: object) -> None:
        self._pipe.ask(self._name, "start_one", member, number, spec)

    def start_spare(self, name: str, spec: object, ended: SpareEnded) -> None:
        """Start a spare; `ended` is called for each from now on."""
        self._pipe.on_spare_end[self._name] = ended
        self._pipe.ask(self._name, "start_spare", name, spec)

    @property
    def spares(self) -> Sequence[bool]:
        """Living spares, also of an earlier controller."""
        spares: Sequence[bool] = self._pipe.ask(self._name, "spares")
        return spares

    def end_spares(self) -> None:
        self._pipe.ask(self._name, "end_spares")

    def stop(self, timeout_s: float) -> Sequence[Member]:
        stopped: Sequence[Member] = self._pipe.ask(self._name, "stop", timeout_s)
        return stopped

    def kill(self, member: Member) -> None:
        self._pipe.ask(self._name, "kill", member)

    def pid(self, member: Member) -> int:
        pid: int = self._pipe.ask(self._name, "pid", member)
        return pid


def living_of(launcher: object) -> Mapping[Member, Any]:
    """Specs of an earlier controller's processes; none without a supervisor."""
    return launcher.living if isinstance(launcher, PipedLauncher) else {}


class Pipe:
    """One end of the pipe between supervisor and controller."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._questions = itertools.count()
        self._asked: dict[int, Future[Any]] = {}
        self._on_exit: dict[str, Exited] = {}
        """By launcher name: called at the end of a process."""
        self._exits: list[tuple[str, Member, int, str]] = []
        """Processes that have ended before somebody listened."""
        self._listening = threading.Lock()
        self.on_spare_end: dict[str, SpareEnded] = {}
        """By launcher name: called at the end of a spare."""

    def listen(self, name: str, exited: Exited) -> None:
        """Call `exited` when a process of this launcher ends, or has ended already."""
        with self._listening:
            self._on_exit[name] = exited
            exits, self._exits = self._exits, []
        for each in exits:
            self._has_exited(*each)

    def send(self, *message: Any) -> None:
        """Send a message, unless the other end is gone."""
        with self._sending, suppress(OSError):
            self._connection.send(message)

    def receive(self) -> Any:
        """The next message. Raises EOFError if the other end is gone."""
        return self._connection.recv()

    def ask(self, name: str, method: str, *arguments: Any) -> Any:
        """Call a method of the supervisor's launcher; returns or raises as it does."""
        number = next(self._questions)
        answer = self._asked[number] = Future[Any]()
        self.send("call", number, name, method, arguments)
        return answer.result(_ANSWER_TIMEOUT_S)

    def answer(
        self, number: int, host: LauncherHost, method: str, arguments: Sequence[Any]
    ) -> None:
        """Make a call for the other end, and send the outcome."""
        try:
            self.send("answer", number, host.call(method, arguments), None)
        except Exception as error:
            self.send("answer", number, None, error)

    def run(self) -> None:
        """Take answers and exits, in a thread of the controller, until the pipe ends."""
        with suppress(EOFError, OSError):
            while True:
                self._take(self.receive())

    def _take(self, message: Any) -> None:
        match message:
            case ("answer", number, result, None):
                self._asked.pop(number).set_result(result)
            case ("answer", number, _, error):
                self._asked.pop(number).set_exception(error)
            case ("exited", *exit_):
                self._has_exited(*exit_)
            case ("spare ended", name, how, was_ready) if ended := self.on_spare_end.get(name):
                ended(how, was_ready)

    def _has_exited(self, name: str, member: Member, known_as: int, how: str) -> None:
        with self._listening:
            exited = self._on_exit.get(name)
            if exited is None:
                self._exits.append((name, member, known_as, how))
                return
        # It may take its time, and others must not wait for it.
        threading.Thread(target=exited, args=(member, known_as, how)).start()
