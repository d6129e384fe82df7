"""A member of a cluster: what its process is told, how it comes and how it goes. Instance or
prefill alike.

Enters: a MemberSpec. Leaves: an open link to the controller, and the controller's knowledge of what
went wrong. Does not know: what the member does in between.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty
from typing import Any

from data_plane.member.controller_link import ControllerLink, ControllerLost
from data_plane.transport.nixl import NixlAgent
from data_plane.transport.segments import Peer, Segments
from data_plane.transport.tcp_server import TcpSegmentServer
from nanocp.config import Config
from nanocp.wire.member_metadata import member_metadata

logger = logging.getLogger(__name__)


class Left(Exception):
    """The controller said shutdown."""


class Told(Exception):
    """The member failed, and the controller was told why: nobody else need be."""


@dataclass(frozen=True, slots=True)
class MemberSpec:
    """All that a member's process needs to know; picklable."""

    factory: str
    """module:function that makes what the process drives, named because a launcher must not import
    it."""
    config: Config
    cluster_id: str
    """Prefix of every shared-memory name of this cluster."""
    controller: str
    """host:port to dial."""
    secret: str = field(repr=False)
    """What the member shows in the metadata of its calls; for nobody else."""
    checkpoint: Path
    instance: int | None = None
    """None: the prefill."""

    @property
    def name(self) -> str:
        """As the controller and an operator call it."""
        return "prefill" if self.instance is None else f"instance {self.instance}"

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What its calls carry, so that the controller and the front ends take them."""
        return member_metadata(self.name, self.secret)

    @property
    def make(self) -> Callable[..., Any]:
        """The factory itself; imports its module."""
        module, _, function = self.factory.partition(":")
        factory: Callable[..., Any] = getattr(importlib.import_module(module), function)
        return factory


@contextlib.contextmanager
def running(spec: MemberSpec) -> Iterator[tuple[ControllerLink, contextlib.ExitStack]]:
    """The open link to the controller, and what to close at the end, when all is said.

    `Left` inside ends it in peace; an error is told to the controller and becomes `Told`, unless it
    is that the controller is lost. It is told first: once this member's shared memory is released
    its peers fail too, and the first failure that is told is the cause.
    """
    link = ControllerLink(
        spec.controller, spec.config.limits, spec.metadata, is_prefill=spec.instance is None
    )
    with contextlib.closing(link), contextlib.ExitStack() as held:
        try:
            yield link, held
        except Left as left:
            logger.info("%s leaves: %s", spec.name, left)
        except ControllerLost:
            raise
        except Exception as error:
            link.fail(f"{spec.name}: {sentence(error)}")
            raise Told(f"{spec.name}: {sentence(error)}") from error


def segments_of(spec: MemberSpec) -> Segments:
    """What the member will own in shared memory, and reach of its peers'. Raises ValueError on an
    unusable address."""
    backend = spec.config.data_plane.exchange_backend
    door = None
    if spec.instance is not None and backend != "shm":
        host = _own_address(spec.controller)
        try:
            door = TcpSegmentServer(host)
        except OSError as error:
            raise ValueError(
                f"{spec.name} cannot listen on {host}, its address towards the controller: {error}"
            ) from error
    nixl = None
    if spec.config.data_plane.page_backend == "nixl":
        nixl = NixlAgent(f"{spec.cluster_id} {spec.name}", _frames_device(spec))
    return Segments(spec.cluster_id, door, is_always_tcp=backend == "tcp", nixl=nixl)


def _frames_device(spec: MemberSpec) -> str:
    if spec.instance is None or spec.config.data_plane.device == "cpu":
        return "cpu"
    from data_plane.startup.gpu_parts import device_of

    return str(device_of(spec.config.cluster, spec.instance))


def _own_address(controller: str) -> str:
    """The address of this machine that the controller's machine sees: what reaches one reaches the
    other."""
    host, _, port = controller.rpartition(":")
    host = host.strip("[]")
    family, kind, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        # Of a datagram socket this only looks the route up.
        probe.connect(address)
        return str(probe.getsockname()[0])


def connected(link: ControllerLink, spec: MemberSpec, segments: Segments) -> None:
    """Wait for Connect: all members have attached, and say where they are. Raises ControllerLost,
    or Left."""
    limit_ms = spec.config.limits.start_timeout_ms
    deadline = time.monotonic() + limit_ms / 1000
    while True:
        try:
            message = link.inbox.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            raise ControllerLost(f"no Connect within start_timeout_ms ({limit_ms} ms)") from None
        if message is None:
            raise Left("the controller ended the stream: the cluster does not start")
        match message.WhichOneof("message"):
            case "welcome":
                if message.welcome.cluster_id != spec.cluster_id:
                    raise ValueError(
                        f"the controller at {spec.controller} is of cluster {message.welcome.cluster_id}, not "
                        f"{spec.cluster_id}"
                    )
            case "connect":
                segments.meet([Peer(peer.node, peer.door) for peer in message.connect.peers])
                return
            case "shutdown":
                raise Left(message.shutdown.reason)


def percents(tell: Callable[[int], None]) -> Callable[[int, int], None]:
    """A callback of (done, total) that tells each whole percent once."""
    told = 0

    def progress(done: int, total: int) -> None:
        nonlocal told
        percent = 100 * done // total
        if percent > told:
            told = percent
            tell(percent)

    return progress


def sentence(error: BaseException) -> str:
    """The error as an operator reads it: a user's mistake by its own sentence, anything else with
    its type."""
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
