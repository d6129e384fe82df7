"""The members of a cluster: who has dialled, who is ready, who was lost.

Enters: what members say on their streams, and how their processes ended. Leaves: messages down the
streams; reports of members, and which member was lost, to `MemberEvents`. Does not know: plans,
tickets, how a member's process was started.

A cluster needs every member: it has started when the last is ready, and fails when one is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from control_plane.member_streams import PREFILL, FromMember, Member, MemberStream, ToMember
from nanocp.config import Config
from nanocp.wire.v1 import cluster_pb2 as pb

logger = logging.getLogger(__name__)


class StartError(RuntimeError):
    """The cluster cannot start; the message says which member and why."""


class MemberEvents(Protocol):
    """What is done about the members' words. Called from the controller's event loop."""

    def reported(self, member: Member, message: FromMember) -> None:
        """Take a member's report on its work.

        Raises ValueError if the member cannot have meant it: its stream then ends.
        """

    def lost(self, member: Member) -> None:
        """The member is gone for good."""


class Members:
    """Every member of one cluster, ready or not.

    It is used from the controller's event loop, except `wait_ready` and the properties.
    """

    def __init__(self, config: Config, cluster_id: str, events: MemberEvents) -> None:
        num = config.cluster.num_instances
        self._num_instances = num
        self._start_timeout_ms = config.limits.start_timeout_ms
        self._cluster_id = cluster_id
        self._events = events
        instances = [Member("instance", instance) for instance in range(num)]
        self.expected = tuple(instances if config.prefill.synthetic_kv else [*instances, PREFILL])
        """Every member that must be ready; with synthetic KV there is no prefill."""
        self._streams: dict[Member, MemberStream] = {}
        self._ready: dict[Member, tuple[str, ...]] = {}
        """What each member that is ready has chosen."""
        self.all_lost: set[Member] = set()
        self.leaving: str | None = None
        """Why every member is asked to leave; None until then."""
        self._started: Future[None] = Future()
        self.failure: Future[str] = Future()
        """Done when a running cluster can no longer serve: the sentence that says why."""

    def watch(
        self, progress: Callable[[str], None], loading: Callable[[Member, int], None]
    ) -> None:
        """Set what is called as members start.

        progress: for each member that becomes ready. loading: for each percent of its weights that
        a member has loaded.
        """
        self._progress = progress
        self._loading = loading

    def wait_ready(self) -> dict[Member, tuple[str, ...]]:
        """Wait for every member, from any thread; returns what each chose at start-up.

        Raises StartError naming the members that failed or are late.
        """
        try:
            self._started.result(self._start_timeout_ms / 1000)
        except TimeoutError:
            absent = ", ".join(str(member) for member in self.expected if member not in self._ready)
            limit = f"start_timeout_ms ({self._start_timeout_ms} ms)"
            raise StartError(f"not ready after {limit}: {absent}") from None
        return {member: self._ready[member] for member in self.expected}

    def send(self, member: Member, message: ToMember) -> None:
        """Queue a message down. A member that leaves too many unread is lost."""
        stream = self._streams[member]
        if not stream.send(message) and not stream.closed:
            stream.close()
            self.lose(member, f"{member} left {stream.max_messages} messages unread")

    def leave(self, reason: str) -> None:
        """Ask every member to leave, also those that attach from now on. Idempotent."""
        if self.leaving is None:
            self.leaving = reason
            for stream in self._streams.values():
                self._shut_down(stream, reason)

    def lose(self, member: Member, message: str) -> None:
        """Take note that a member is gone for good, and the cluster ends with it.

        A member that was asked to leave is not lost.
        """
        if self.leaving is None and member not in self.all_lost:
            self.all_lost.add(member)
            self.fail(message)
            self._events.lost(member)

    def fail(self, message: str) -> None:
        """End the cluster, or its start, for this reason; the first reason counts."""
        if self.leaving is not None:
            return
        if not self._started.done():
            self._started.set_exception(StartError(message))
        elif not self.failure.done():
            logger.info("%s", message)
            self.failure.set_result(message)

    # --- member_streams.MemberListener

    def attach(self, member: Member, where: pb.Peer | None = None) -> MemberStream:
        """See member_streams.MemberListener."""
        if member not in self.expected:
            expected = ", ".join(map(str, self.expected))
            raise ValueError(f"this cluster has no {member}; it has {expected}")
        if member in self._streams:
            raise ValueError(f"{member} is attached already")
        stream = self._streams[member] = MemberStream(member, where=where)
        welcome = pb.Welcome(num_instances=self._num_instances, cluster_id=self._cluster_id)
        self.send(member, _to(member)(welcome=welcome))
        if self.leaving is not None:
            self._shut_down(stream, self.leaving)
        elif len(self._streams) == len(self.expected):
            instances = [each for each in self.expected if each != PREFILL]
            connect = pb.Connect(peers=[self._streams[instance].where for instance in instances])
            for each in self.expected:
                self.send(each, _to(each)(connect=connect))
        return stream

    def loading(self, member: Member, percent: int) -> None:
        """See member_streams.MemberListener."""
        if member in self.expected:
            self._loading(member, percent)

    def received(self, member: Member, message: FromMember) -> None:
        """See member_streams.MemberListener."""
        kind = message.WhichOneof("message")
        if isinstance(message, pb.FromPrefill) and kind == "loading_percent":
            self.loading(member, message.loading_percent)
        elif kind != "ready":
            self._events.reported(member, message)
        elif isinstance(message, pb.FromPrefill):
            self._is_ready(member, (f"process {message.ready.pid}",))
        else:
            graphs = f"graphs: {message.ready.num_graphs} prepared"
            self._is_ready(member, (*message.ready.selected, graphs))

    def failed(self, member: Member | None, message: str) -> None:
        """See member_streams.MemberListener."""
        if member is None:
            self.fail(message)
        else:
            self.lose(member, message)

    def _is_ready(self, member: Member, choices: tuple[str, ...]) -> None:
        self._ready[member] = choices
        self._progress(f"{len(self._ready)} of {len(self.expected)} processes are ready")
        if len(self._ready) == len(self.expected) and not self._started.done():
            self._started.set_result(None)

    def _shut_down(self, stream: MemberStream, reason: str) -> None:
        self.send(stream.member, _to(stream.member)(shutdown=pb.Shutdown(reason=reason)))
        stream.close()


def _to(member: Member) -> type[pb.ToInstance] | type[pb.ToPrefill]:
    """The class of messages to this member."""
    return pb.ToPrefill if member == PREFILL else pb.ToInstance
