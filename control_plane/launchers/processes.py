"""Members as plain subprocesses of this machine: started, watched and stopped."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from control_plane.launchers.launcher import KILL_TIMEOUT_S, Exited, Launcher, SpareEnded
from nanocp.parent import PARENT_VARIABLE
from nanocp.values.members import Member

_FROM_OTHERS = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT}
"""Signals from others: the process's last output does not explain its end."""


@dataclass(eq=False, slots=True)
class _Process:
    process: subprocess.Popen[bytes]
    ended: Callable[[str], None]
    """Called with the kind of its end. A spare that becomes a member's gets another one."""
    is_ready: bool = False

    def give(self, spec: object, is_last: bool = True) -> None:
        """Write a spec to its standard input."""
        stdin = self.process.stdin
        assert stdin is not None
        with suppress(BrokenPipeError):
            pickle.dump(spec, stdin)
            stdin.flush()
            if is_last:
                stdin.close()


class ProcessLauncher(Launcher):
    """Plain subprocesses of this machine: no Ray."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start processes of `command`, which reads a member's pickled spec from standard input.

        A spare first reads its own spec, and writes a line once it is ready.
        """
        self._command = command
        self._environment = {**os.environ, **environment, PARENT_VARIABLE: str(os.getpid())}
        self._processes: dict[Member, _Process] = {}
        """The latest of each member. Earlier ones were killed."""
        self._spares: list[_Process] = []
        self._watchers: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._is_stopped = False

    def start(self, specs: Mapping[Member, object], exited: Exited) -> None:
        self._exited = exited
        for member, spec in specs.items():
            self.start_one(member, 0, spec)

    def start_one(self, member: Member, number: int, spec: object) -> None:
        ended = partial(self._exited, member, number)
        with self._lock:
            self._check_running()
            process = self._take_spare() if member.kind == "instance" else None
            if process is None:
                process = self._spawn(str(member), ended)
            process.ended = ended
            self._processes[member] = process
        process.give(spec)

    def start_spare(self, name: str, spec: object, ended: SpareEnded) -> None:
        with self._lock:
            self._check_running()
            spare = self._spawn(name, lambda how: ended(how, spare.is_ready), subprocess.PIPE)
            self._spares.append(spare)
        spare.give(spec, is_last=False)

    @property
    def spares(self) -> Sequence[bool]:
        with self._lock:
            return [spare.is_ready for spare in self._spares]

    def end_spares(self) -> None:
        with self._lock:
            for spare in self._spares:
                spare.ended = lambda how: None
                spare.process.kill()
            self._spares.clear()

    def _take_spare(self) -> _Process | None:
        spare = max(self._spares, key=lambda each: each.is_ready, default=None)
        if spare is not None:
            self._spares.remove(spare)
            # One that somebody has stopped would take the seat and never dial.
            spare.process.send_signal(signal.SIGCONT)
        return spare

    def _check_running(self) -> None:
        if self._is_stopped:
            raise RuntimeError("the service is stopping")

    def _spawn(
        self, name: str, ended: Callable[[str], None], stdout: int | None = None
    ) -> _Process:
        spawned = _Process(self._open(name, stdout), ended)
        self._watchers = [each for each in self._watchers if each.is_alive()]
        for watch in (self._watch, self._await_ready) if stdout else (self._watch,):
            watcher = threading.Thread(
                target=watch, args=(spawned,), name=f"watch {name}", daemon=True
            )
            watcher.start()
            self._watchers.append(watcher)
        return spawned

    def _open(self, name: str, stdout: int | None) -> subprocess.Popen[bytes]:
        # A session of its own: a Ctrl-C in the terminal is for the service, which then drains.
        return subprocess.Popen(
            [*self._command, f"serve={os.getpid()}", name],
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=subprocess.PIPE,
            env=self._environment,
            start_new_session=True,
        )

    def stop(self, timeout_s: float) -> Sequence[Member]:
        with self._lock:
            self._is_stopped = True
        self.end_spares()
        deadline = time.monotonic() + timeout_s
        killed = []
        for member, each in self._processes.items():
            try:
                each.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                each.process.kill()
                killed.append(member)
        for watcher in self._watchers:
            watcher.join(KILL_TIMEOUT_S)
        return killed

    def kill(self, member: Member) -> None:
        self._processes[member].process.kill()

    def pid(self, member: Member) -> int:
        return self._processes[member].process.pid

    def _watch(self, watched: _Process) -> None:
        errors, last_line = watched.process.stderr, ""
        assert errors is not None
        with errors:
            for raw in errors:
                line = raw.decode(errors="replace").rstrip()
                last_line = line or last_line
                print(line, file=sys.stderr)
        status = watched.process.wait()
        how = f"its process ended with status {status}"
        if status < 0:
            how = f"its process was ended by {signal.Signals(-status).name}"
        if -status in _FROM_OTHERS:
            last_line = ""
        with self._lock:
            if watched in self._spares:
                self._spares.remove(watched)
        watched.ended(f"{how}: {last_line}" if last_line else how)

    def _await_ready(self, spare: _Process) -> None:
        assert spare.process.stdout is not None
        with spare.process.stdout as lines:
            for _ in lines:
                spare.is_ready = True
