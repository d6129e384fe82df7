"""The start and end of a cluster's member that is no node, with reports of failures."""

from __future__ import annotations

import contextlib
import importlib
import logging
import socket
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from data_plane.member.controller_link import ControllerLink, ControllerLost
from data_plane.native.receiver import receive_puts
from data_plane.transport.exchange import Term
from data_plane.transport.nixl.pages import NixlAgent
from data_plane.transport.segments import Segments
from data_plane.transport.tcp.server import TcpSegmentServer
from nanocp.config.whole import Config
from nanocp.values.commands import Join
from nanocp.values.members import Failure, Peer
from nanocp.wire.member_metadata import member_metadata

logger = logging.getLogger(__name__)


class ShutdownRequested(Exception):
    """The controller asked the member to end; the message is its reason."""


class FailureReported(Exception):
    """The member failed and has reported the reason to the controller."""


Make = Callable[..., Any]
"""Makes an instance, a stage or a probe."""


@dataclass(frozen=True, slots=True)
class SpareSpec:
    """A spare's data before it becomes an instance's process; picklable."""

    name: str
    factory: str
    """module:function of a configuration and a checkpoint folder; returns a maker as of
    MemberSpec.make.
    """
    config: Config
    checkpoint: Path

    def prepare(self) -> Make:
        """Load all that no instance owns. Raises as the factory does."""
        make: Make = _named(self.factory)(self.config, self.checkpoint)
        return make


@dataclass(frozen=True, slots=True)
class MemberSpec:
    """A member process's data; picklable."""

    factory: str
    """module:function that makes the member's part. Launchers must not import the module."""
    config: Config
    cluster_id: str
    """Prefix of the cluster's shared-memory names."""
    controller: str
    secret: str = field(repr=False)
    """For the metadata of the member's calls; clients must not know it."""
    checkpoint: Path
    instance: int | None = None
    term: int = 1
    """The probable first term, for segments made at start."""
    node: int | None = None
    """The node whose streams it carries, if it is no instance and no prefill."""
    carrier: str = ""
    """Local address of the process that carries an instance's stream; empty: it dials the
    controller.
    """
    planner: str = ""
    """module:function of a configuration; makes the planner of a prefill's passes."""
    is_puller: bool = False
    """If so, it is no instance and no prefill."""

    @property
    def name(self) -> str:
        """The member's name for the controller and for operators."""
        if self.node is not None:
            return f"node {self.node}"
        if self.instance is None:
            return "puller" if self.is_puller else "prefill"
        return f"instance {self.instance}"

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of the member's calls; calls without it are refused."""
        return member_metadata(self.name, self.secret)

    @property
    def make(self) -> Make:
        """The factory, whose module is imported here."""
        return _named(self.factory)

    @property
    def make_planner(self) -> Make:
        """The planner's factory, whose module is imported here."""
        return _named(self.planner)


def _named(factory: str) -> Make:
    module, _, function = factory.partition(":")
    found: Make = getattr(importlib.import_module(module), function)
    return found


@contextlib.contextmanager
def running(spec: MemberSpec) -> Iterator[tuple[ControllerLink, contextlib.ExitStack]]:
    """Open the link to the controller; yield it with a stack of closers.

    ShutdownRequested ends the block, ControllerLost passes. Any other error is reported, before
    anything is closed and peers fail too, then becomes FailureReported.
    """
    link = ControllerLink(
        spec.carrier or spec.controller,
        spec.config.limits,
        spec.metadata,
        is_prefill=spec.instance is None,
        term=Term(spec.term),
    )
    with contextlib.closing(link), contextlib.ExitStack() as held:
        try:
            yield link, held
        except ShutdownRequested as request:
            logger.debug("%s leaves: %s", spec.name, request)
        except ControllerLost:
            raise
        except Exception as error:
            reason = f"{spec.name}: {sentence(error)}"
            link.send(Failure(reason))
            raise FailureReported(reason) from error


def segments_of(spec: MemberSpec, term: Term) -> Segments:
    """Return the member's segments and its way to its peers', in its term.

    Raises ValueError if the member cannot listen on its own address.
    """
    backend = spec.config.data_plane.exchange_backend
    server = None
    # Instances are reached from other nodes, and the prefill by engines that it probes.
    is_prober = bool(spec.config.prefill.engines) and not spec.is_puller
    is_reached = spec.instance is not None or is_prober
    if is_reached and backend != "shm":
        host = _own_address(spec.controller)
        try:
            server = TcpSegmentServer(host, receive_puts)
        except OSError as error:
            raise ValueError(
                f"{spec.name} cannot listen on {host}, its address towards the controller: {error}"
            ) from error
    nixl = None
    if spec.config.data_plane.page_backend == "nixl":
        # Peers may know the agent of a process that was lost, which had this process's seat.
        name = f"{spec.cluster_id} {spec.name} {uuid.uuid4().hex}"
        nixl = NixlAgent(name, _frames_device(spec))
    return Segments(spec.cluster_id, server, backend == "tcp", nixl=nixl, term=term)


def _frames_device(spec: MemberSpec) -> str:
    if spec.instance is None or spec.config.data_plane.device == "cpu":
        return "cpu"
    from data_plane.startup.gpu_parts import device_of

    return str(device_of(spec.config.cluster, spec.instance))


def _own_address(controller: str) -> str:
    host, _, port = controller.rpartition(":")
    host = host.strip("[]")
    family, kind, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        # Connecting a datagram socket sends nothing: it only looks up the route.
        probe.connect(address)
        return str(probe.getsockname()[0])


def meet(segments: Segments, join: Join) -> None:
    """Take the places of all instances from the controller's message."""
    segments.meet(places_in(join))


def places_in(join: Join) -> list[Peer | None]:
    """Return the place of each instance; None outside the term."""
    seats = join.seats or range(len(join.peers))
    return [peer if seat in seats else None for seat, peer in enumerate(join.peers)]


def whole_percents(report: Callable[[int], None]) -> Callable[[int, int], None]:
    """Return a callback of (done, total) that reports each higher percentage."""
    reported = 0

    def progress(done: int, total: int) -> None:
        nonlocal reported
        percent = 100 * done // total
        if percent > reported:
            reported = percent
            report(percent)

    return progress


def sentence(error: BaseException) -> str:
    """Return the error for an operator: a user's mistake is a sentence, others have types."""
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


class MemberLoop(Protocol):
    """A member's work under a controller, term after term."""

    def run(self) -> None:
        """Run until the controller asks for a shutdown, which raises ShutdownRequested.

        Any other exception is a failure of the member, or ControllerLost.
        """

    def forget_term(self) -> None:
        """Drop all of a term that is over."""


def run_under_controllers(
    spec: MemberSpec,
    link: ControllerLink,
    loop: MemberLoop,
    greet: Callable[[], None] = lambda: None,
) -> None:
    """Run the loop under one controller after the other; greet: called after each new dial."""
    while True:
        try:
            loop.run()
        except ControllerLost as lost:
            if not spec.config.service.controller_process:
                raise
            logger.warning("%s; this member waits for another controller", lost)
            loop.forget_term()
            link.redial()
            greet()
