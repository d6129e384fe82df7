"""Front ends as processes of their own, restarted at the same addresses when lost."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from dataclasses import replace

from control_plane.frontend.front_end import await_drains
from control_plane.frontend.remote.port import FrontEndPort, MakePage
from control_plane.launchers.processes import ProcessLauncher
from control_plane.observe.observer import Observer
from control_plane.ports.controller_interface import ControllerEvents, ControllerInterface
from control_plane.ports.members_port import MemberSecrets
from nanocp.config.whole import Config
from nanocp.serve.front_end_process import FrontEndSpec
from nanocp.serve.launcher_pipe import PipedLauncher, living_of
from nanocp.serve.served import Served
from nanocp.values.members import Member
from nanocp.values.plan import ClusterLoad
from nanocp.values.restarts import Restarts

_PAUSES_S = (0.2, 0.4, 0.8, 1.6, 3.2)
_MAX_ENDS, _ENDS_S = 6, 60.0
"""A front end that ends this often within this time is not restarted."""
_DIAL_S = 15.0
"""Longest wait for a front end of an earlier controller to dial."""
_LAST_WORD_S = 2.0
"""Longest wait for a front end without a controller to end."""
_STOP_TIMEOUT_S = 10.0

logger = logging.getLogger(__name__)


class FrontEndProcesses:
    """service.front_ends processes, with the methods of one front end."""

    def __init__(
        self,
        config: Config,
        served: Served,
        member_secrets: MemberSecrets,
        observer: Observer,
        pages: Mapping[str, MakePage],
        failed: Callable[[str], None],
        launcher: ProcessLauncher | PipedLauncher,
        controller_number: int,
    ) -> None:
        """failed: called with a sentence when no front end is left.

        controller_number: see Attendance.
        """
        self._config = config
        self._served = served
        self._failed = failed
        self._port = FrontEndPort(
            config.service,
            config.scheduler.held_timeout_us,
            member_secrets,
            observer,
            pages,
            self._lost,
            controller_number,
        )
        self.events: ControllerEvents = self._port
        self._living: dict[Member, FrontEndSpec] = dict(living_of(launcher))
        """Front ends that lost their controller, and will dial this one unless they end."""
        self._is_first = controller_number == 1
        for spec in self._living.values():
            self._port.secrets.take(spec.name, spec.secret)
        self._launcher = launcher
        self._stopping = threading.Event()
        self._restarts = [
            Restarts(_PAUSES_S, _MAX_ENDS, _ENDS_S) for _ in range(config.service.front_ends)
        ]
        self._num_given_up = 0
        self._address = ""

    def start(self) -> None:
        """Start every process.

        Raises OSError, naming the port, if one cannot be bound, RuntimeError if a process ends.
        """
        self._address = self._port.start()
        members = [Member("front end", index) for index in range(len(self._restarts))]
        specs = {each: self._spec(each) for each in members if each not in self._living}
        self._launcher.start(specs, self._exited)
        for member, hello in zip(members, self._port.hellos, strict=True):
            if member not in self._living or not wait([hello], _DIAL_S).not_done:
                continue
            if member in self._living:  # else another process has taken its place meanwhile
                logger.warning("%s has not dialled in %.0f s; it may be stopped", member, _DIAL_S)
                self._launcher.kill(member)  # another process takes its place
        timeout_s = self._config.limits.start_timeout_ms / 1000
        self._hellos = [hello.result(timeout_s) for hello in self._port.hellos]
        if failure := next((hello.failure for hello in self._hellos if hello.failure), ""):
            raise OSError(failure)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses for gRPC clients, once started."""
        return tuple(hello.grpc_address for hello in self._hellos)

    @property
    def http_addresses(self) -> tuple[str, ...]:
        """Addresses of the HTTP API, once started."""
        return tuple(hello.http_address for hello in self._hellos)

    def open(
        self, controller: ControllerInterface, load: Callable[[], ClusterLoad] = ClusterLoad
    ) -> None:
        """Accept requests. load: decided for each instance."""
        accepts = self._port.open(controller, load)
        if wait(accepts, _DIAL_S).not_done:
            logger.warning("not all front ends accept requests after %.0f s", _DIAL_S)

    @property
    def num_open(self) -> int:
        """Choices that have not ended or are still read."""
        return self._port.num_open

    def drain(self, report: Callable[[int, float], None] = lambda num_open, left_s: None) -> bool:
        """Refuse new requests and wait for open ones; True if all ended in time."""
        timeout_s = self._config.limits.drain_timeout_ms / 1000
        drains = self._port.begin_drain()
        return await_drains(drains, timeout_s, lambda left_s: report(self.num_open, left_s))

    def stop(self, reason: str) -> None:
        """End open requests with UNAVAILABLE and the reason, and close the ports."""
        self._stopping.set()
        self._port.ask_to_stop(reason)
        self._launcher.stop(_STOP_TIMEOUT_S)
        self._port.stop()

    # --- processes ---

    def _spec(self, member: Member) -> FrontEndSpec:
        index = member.instance or 0
        config = self._config
        hello = self._port.hellos[index]
        if hello.done():
            # Clients find it again.
            grpc_port, http_port = (
                int(address.rpartition(":")[2]) - index
                for address in (hello.result().grpc_address, hello.result().http_address)
            )
            service = replace(config.service, grpc_port=grpc_port, http_port=http_port)
            config = replace(config, service=service)
        return FrontEndSpec(
            config,
            self._served.limits,
            self._served.checkpoint,
            self._served.tokenizer is not None,
            index,
            str(member),
            self._port.secrets.issue(str(member)),
            self._address,
        )

    def _lost(self, index: int, pid: int) -> None:
        """A stream ended: the process is gone, or is to be killed."""
        member = Member("front end", index)
        if not self._stopping.wait(_LAST_WORD_S) and self._launcher.pid(member) == pid:
            self._launcher.kill(member)

    def _exited(self, member: Member, number: int, how: str) -> None:
        index = member.instance or 0
        hello = self._port.hellos[index]
        if self._stopping.is_set() or (hello.done() and hello.result().failure):
            return
        if number == 0:
            self._living.pop(member, None)
        if self._is_first and not hello.done():
            hello.set_exception(RuntimeError(f"{member}: {how}"))
            return
        pause_s = self._restarts[index].pause_s(time.monotonic())
        if pause_s is None:
            self._num_given_up += 1
            logger.error(
                "%s: %s, for the %dth time in %.0f s; it is not started again",
                member, how, _MAX_ENDS, _ENDS_S,
            )  # fmt: skip
            if not hello.done():
                hello.set_exception(RuntimeError(f"{member}: {how}"))
            elif self._num_given_up == len(self._restarts):
                self._failed(f"no front end is left: {member}: {how}")
            return
        logger.warning(
            "%s: %s; another process takes its place%s in %.1f s",
            member, how, f" at {hello.result().grpc_address}" if hello.done() else "", pause_s,
        )  # fmt: skip
        if self._stopping.wait(pause_s):
            return
        try:
            self._launcher.start_one(member, number + 1, self._spec(member))
        except (OSError, RuntimeError) as error:
            logger.error("no process could take the place of %s: %s", member, error)
