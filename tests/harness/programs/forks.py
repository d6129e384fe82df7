"""Processes that are forks of one that has imported what they run: most of a start is imports.

The suite starts some hundreds of processes that compute next to nothing. A fork costs a tenth of a
start, and has the same pipes, environment, session, signals and exit handlers. The starts of
service are proven in tests/control_plane/launchers and below `nanocp serve`, whose members are
never forks.
"""

import atexit
import gc
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, BinaryIO

from harness.paths import ROOT, TESTS

_IMPORTS = ("data_plane.programs.process", "harness.services.hash_members")
_ENVIRONMENT = {
    "PYTHONPATH": f"{TESTS}{os.pathsep}{ROOT}",
    # Read as the packages are imported; gRPC's are those of `nanocp serve`.
    "OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "NONE", "GRPC_ENABLE_FORK_SUPPORT": "0",
}  # fmt: skip
_STATUS = struct.Struct("i")
_MAX_REQUEST = 1 << 17


class Forked:
    """What a test needs of subprocess.Popen, of a fork."""

    def __init__(self, pid: int, status: int, pipes: Mapping[int, BinaryIO]) -> None:
        """Watch the process. status: a pipe with its exit status; pipes: by its file descriptor."""
        self.pid = pid
        self.returncode: int | None = None
        self.stdin, self.stdout, self.stderr = map(pipes.get, range(3))
        self._status = os.fdopen(status, "rb", buffering=0)
        self._lock = threading.Lock()

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, once it has ended. Raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self._ended(deadline)) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return status

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""
        return self._ended(time.monotonic())

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def _ended(self, deadline: float | None) -> int | None:
        if self.returncode is None:
            # Two threads may wait: both wake, and the first one reads.
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            select.select([self._status], [], [], left_s)
            with self._lock:
                is_there = select.select([self._status], [], [], 0)[0]
                if self.returncode is None and is_there:
                    status = self._status.read(_STATUS.size)
                    if not status:  # The process that forks is gone, and nobody else would end it.
                        os.kill(self.pid, signal.SIGKILL)
                    self.returncode = _STATUS.unpack(status)[0] if status else -signal.SIGKILL
        return self.returncode


class ForkServer:
    """Starts the process that forks, when it is first needed; it ends with this one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control: socket.socket | None = None

    def popen(
        self,
        function: str,
        arguments: Sequence[str] = (),
        imports: Sequence[str] = (),
        pipes: Sequence[int] = (),
        environment: Mapping[str, str] = os.environ,
        start_new_session: bool = False,
    ) -> Forked:
        """Fork a process that exits with what `function` ("module:name") returns.

        arguments: words of its command line. imports: modules to import before the fork; one that
        is missing is left to the fork. pipes: which of its descriptors 0, 1 and 2 are pipes to this
        process.
        """
        request = {
            "function": function,
            "arguments": [*arguments],
            "imports": [*imports],
            "pipes": [*pipes],
            "environment": {**environment},
            "start_new_session": start_new_session,
        }
        status, own_status = os.pipe()
        ends = {each: os.pipe() if each else os.pipe()[::-1] for each in pipes}
        with self._lock:
            control = self._control = self._control or _start()
            theirs = [own_status, *(end for _, end in ends.values())]
            socket.send_fds(control, [json.dumps(request).encode()], theirs)
            for end in theirs:
                os.close(end)
            pid = int(control.recv(32))
        files = {each: os.fdopen(end, "rb" if each else "wb") for each, (end, _) in ends.items()}
        return Forked(pid, status, files)


def _start() -> socket.socket:
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [sys.executable, "-m", "harness.programs.forks", str(other.fileno())],
        stdin=subprocess.DEVNULL, cwd=ROOT, env=os.environ | _ENVIRONMENT,
        pass_fds=[other.fileno()], start_new_session=True,
    )  # fmt: skip
    other.close()

    def end() -> None:
        own.shutdown(socket.SHUT_RDWR)  # Others may have inherited it.
        process.wait()

    atexit.register(end)
    return own


FORKS = ForkServer()


# --- in the process that forks ---


def _serve(control: socket.socket) -> dict[str, Any] | None:
    """Fork as asked, and say how forks end; returns the request in a fork, else None at the end."""
    children: dict[int, tuple[int, int]] = {}
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready != control.fileno():
                poll.unregister(ready)
                pid, status = children.pop(ready)
                exit_code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with suppress(BrokenPipeError):
                    os.write(status, _STATUS.pack(exit_code))
                os.close(status)
                os.close(ready)
                continue
            message, descriptors, _, _ = socket.recv_fds(control, _MAX_REQUEST, 4)
            if not message:
                return None
            status, *ends = descriptors
            request: dict[str, Any] = json.loads(message)
            for name in request["imports"]:
                with suppress(ImportError):
                    import_module(name)
            assert len(os.listdir("/proc/self/task")) == 1, "no import may start a thread"
            gc.freeze()
            if not (pid := os.fork()):
                for descriptor in (*children, *(each for _, each in children.values()), status):
                    os.close(descriptor)
                control.close()
                for number, end in zip(request["pipes"], ends, strict=True):
                    os.dup2(end, number)
                    os.close(end)
                return request
            control.send(str(pid).encode())
            for end in ends:
                os.close(end)
            pidfd = os.pidfd_open(pid)
            children[pidfd] = pid, status
            poll.register(pidfd, select.POLLIN)


def main() -> int:
    """Serve the socket whose number is the argument."""
    for name in _IMPORTS:
        import_module(name)
    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    if request is None:
        return 0
    if request["start_new_session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(request["environment"])
    module, _, name = request["function"].partition(":")
    sys.argv[:] = [module, *request["arguments"]]
    try:
        status = getattr(import_module(module), name)()
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
        status = 1
    # The interpreter's own end would copy every page that forks share, to take modules apart.
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status or 0)


if __name__ == "__main__":
    sys.exit(main())
