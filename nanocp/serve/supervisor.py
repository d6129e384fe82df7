"""The supervisor: it starts a controller, and another one when that is killed, crashes or hangs.

Members and front ends are its children, so they outlive a controller.
"""

from __future__ import annotations

import logging
import os
import pickle
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Pipe as new_pipe
from typing import Any

from control_plane.launchers.launcher import Launcher
from control_plane.launchers.processes import ProcessLauncher
from nanocp.config.service import ServiceConfig
from nanocp.config.whole import Config
from nanocp.serve.free_ports import free_ports
from nanocp.serve.front_end_process import FRONT_END_COMMAND
from nanocp.serve.launcher_pipe import LauncherHost, Pipe
from nanocp.serve.service import Served, member_environment
from nanocp.values.members import Member
from nanocp.values.restarts import Restarts

logger = logging.getLogger(__name__)

MEMBERS, FRONT_ENDS = "members", "front ends"
MEMBER_COMMAND = (sys.executable, "-m", "data_plane.programs.process")
CONTROLLER_COMMAND = (sys.executable, "-m", "nanocp.cli.serve.controller_process")
HUNG_S = 15.0
"""A controller silent for this long is killed."""
_FORCED_S = 5.0
"""After a second stop signal, a silent controller is killed after this time."""
_WATCH_S = 1.0
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class ControllerSpec:
    """The data of a controller's process."""

    config: Config
    served: Served
    """Without its tokenizer."""
    has_tokenizer: bool
    number: int
    """Counts a service's controllers from 1; terms of a later one are later."""
    cluster_id: str
    living: Mapping[str, Mapping[Member, Any]]
    """Specs of an earlier controller's processes, by launcher name."""
    seats: tuple[int, ...] | None = None
    """Seats that an operator wanted; None: all."""


class Supervisor:
    """One service with its processes, from start to end. Used from one thread."""

    def __init__(
        self,
        config: Config,
        served: Served,
        environment: Mapping[str, str] | None = None,
        launcher: Launcher | None = None,
    ) -> None:
        """Prepare a service; `environment` is added to its processes' own.

        launcher: of members, by default plain processes. From the main thread. Raises RuntimeError
        if the launcher does not start.
        """
        more = dict(environment or {})
        self.config = replace(config, service=with_ports(config.service))
        self._spec = ControllerSpec(
            self.config,
            replace(served, tokenizer=None),
            served.tokenizer is not None,
            0,
            secrets.token_hex(4),
            {},
        )
        members = launcher or ProcessLauncher(MEMBER_COMMAND, member_environment(config) | more)
        self.hosts = {
            MEMBERS: LauncherHost(MEMBERS, members),
            FRONT_ENDS: LauncherHost(FRONT_ENDS, ProcessLauncher(FRONT_END_COMMAND, more)),
        }
        self._environment = more
        self._restarts = Restarts((0.0,), max_ends=5, within_s=120.0)
        """Restarts of the controller; too many end the service."""
        self._silent_s = 0.0
        """Time that this process has lived since the controller's last message."""
        self._is_serving = self._is_stopping = self._is_forced = False
        """The present controller serves; a signal came; a second one came."""
        self._undelivered: deque[int] = deque()
        self.process: subprocess.Popen[bytes] | None = None
        self.has_served = threading.Event()
        """Set when the first controller has opened."""

    def run(self) -> int:
        """Supervise until a controller ends by itself; returns its exit status."""
        try:
            while True:
                status = self._run_controller()
                was_serving, self._is_serving = self._is_serving, False
                cuts_off = self.has_served.is_set() and not was_serving
                if status >= 0:
                    return status or int(cuts_off)
                how = f"ended by {signal.Signals(-status).name}"
                if self._ends_at_once:
                    # It may have been starting, and knew no signal yet.
                    logger.info("the controller was %s as the service was asked to stop", how)
                    return int(cuts_off or -status not in _STOP_SIGNALS)
                if not self.has_served.is_set():
                    logger.error("the controller was %s before it served", how)
                    return 2
                if self._restarts.pause_s(time.monotonic()) is None:
                    logger.error(
                        "the controller was %s, for the %dth time in %.0f s; the service ends",
                        how, self._restarts.max_ends, self._restarts.within_s,
                    )  # fmt: skip
                    return 1
                logger.warning(
                    "the controller was %s; another one takes its place. Instances keep their "
                    "weights and front ends their clients; every stream goes on after a pause",
                    how,
                )
        finally:
            for host in self.hosts.values():
                host.stop(0.0)

    def signal(self, number: int) -> None:
        """End the service: the controller that serves gets the signal.

        During a restart the first signal waits until the new one serves and can end open streams. A
        second one ends it at once.
        """
        self._is_stopping, self._is_forced = True, self._is_stopping
        if self._is_forced:
            self._silent_s = max(self._silent_s, 0.0)
        self._undelivered.append(number)
        self._deliver()
        self._say_that_it_waits()

    def _say_that_it_waits(self) -> None:
        if self._undelivered:
            logger.info(
                "asked to stop while a controller starts: requests go on and end once it serves; "
                "Ctrl-C again to stop now"
            )

    @property
    def _ends_at_once(self) -> bool:
        return self._is_stopping and (self._is_forced or not self.has_served.is_set())

    def _deliver(self) -> None:
        """Pass each signal on once: this may interrupt itself."""
        if self.process is not None and (self._is_serving or self._ends_at_once):
            with suppress(IndexError):
                while True:
                    self.process.send_signal(self._undelivered.popleft())

    def _run_controller(self) -> int:
        own, others = new_pipe()
        pipe = Pipe(own)
        living = {name: host.attach(pipe) for name, host in self.hosts.items()}
        self._spec = replace(self._spec, number=self._spec.number + 1, living=living)
        with ExitStack() as stack:
            stack.callback(own.close)
            self.process = subprocess.Popen(
                [*CONTROLLER_COMMAND, str(others.fileno()), "controller"],
                stdin=subprocess.PIPE,
                pass_fds=[others.fileno()],
                env={**os.environ, **self._environment},
                start_new_session=True,
            )
            others.close()
            if self._is_stopping:  # The signal was for an earlier controller, or for none.
                self._undelivered = deque([signal.SIGTERM])
                self._deliver()
                self._say_that_it_waits()
            assert self.process.stdin is not None
            with suppress(BrokenPipeError), self.process.stdin:
                pickle.dump(self._spec, self.process.stdin)
            # Its first word takes as long as its imports.
            self._silent_s = -self.config.limits.start_timeout_ms / 1000
            over = threading.Event()
            stack.callback(over.set)
            watch = threading.Thread(target=self._watch, args=(self.process, over), daemon=True)
            watch.start()
            self._serve(pipe)
            return self.process.wait()

    def _serve(self, pipe: Pipe) -> None:
        with suppress(EOFError, OSError):
            while True:
                message = pipe.receive()
                self._silent_s = 0.0
                match message:
                    case ("serving",):
                        self._is_serving = True
                        if self.has_served.is_set():
                            logger.info("the controller serves again")
                        self.has_served.set()
                        self._deliver()
                    case ("seats", seats):
                        self._spec = replace(self._spec, seats=seats)
                    case ("call", number, name, method, arguments):
                        # Stopping takes long, and the controller beats meanwhile.
                        threading.Thread(
                            target=pipe.answer, args=(number, self.hosts[name], method, arguments)
                        ).start()

    def _watch(self, process: subprocess.Popen[bytes], over: threading.Event) -> None:
        while not over.wait(_WATCH_S):
            self._silent_s += _WATCH_S
            limit_s = _FORCED_S if self._is_forced else HUNG_S
            if self._silent_s > limit_s:
                logger.warning("the controller has said nothing for %.0f s; it is killed", limit_s)
                process.kill()
                return


def with_ports(service: ServiceConfig) -> ServiceConfig:
    """Replace ports of 0: a later controller must use the same ones."""
    num = service.front_ends
    return replace(
        service,
        members_port=service.members_port or free_ports(2 + num, service.host),
        metrics_port=service.metrics_port or free_ports(1, service.host),
    )
