"""The controller's gRPC service: one stream for each instance and one for the prefill.

Enters: messages of members. Leaves: the same messages, in order, to a `MemberListener`; messages
down through each `MemberStream`. Does not know: windows, requests, what a message means beyond
hello and failure.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any, NamedTuple, Protocol

import grpc

from control_plane.members_port import MemberSecrets, bind, caller
from nanocp.config import ServiceConfig
from nanocp.wire.v1 import cluster_pb2 as pb
from nanocp.wire.v1 import cluster_pb2_grpc as rpc

logger = logging.getLogger(__name__)


class Member(NamedTuple):
    """A process that dials the controller: `Member("instance", 3)`, or the prefill."""

    kind: str
    """`instance` or `prefill`."""
    instance: int | None = None
    """The number of an instance; None for the prefill."""

    def __str__(self) -> str:
        return self.kind if self.instance is None else f"{self.kind} {self.instance}"


PREFILL = Member("prefill")

_MAX_MESSAGES = 16_384
"""Messages down that a member may leave unread: two plans, and a ticket and a fence for every
request it can hold."""

FromMember = pb.FromInstance | pb.FromPrefill
ToMember = pb.ToInstance | pb.ToPrefill


class MemberStream:
    """The stream down to one member. Used from the controller's event loop only."""

    def __init__(
        self, member: Member, max_messages: int = _MAX_MESSAGES, where: pb.Peer | None = None
    ) -> None:
        self.member = member
        self.where = where or pb.Peer()
        """Address where the peers of an instance find it."""
        self.max_messages = max_messages
        self._messages: asyncio.Queue[ToMember | None] = asyncio.Queue()
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def send(self, message: ToMember) -> bool:
        """Queue a message.

        False if it was dropped: the stream is closed, or the member left too much unread.
        """
        if self._closed or self._messages.qsize() >= self.max_messages:
            return False
        self._messages.put_nowait(message)
        return True

    def close(self) -> None:
        """End the stream after what is queued. Idempotent."""
        if not self._closed:
            self._closed = True
            self._messages.put_nowait(None)

    async def messages(self) -> AsyncIterator[ToMember]:
        """What is sent down, until close."""
        while (message := await self._messages.get()) is not None:
            yield message


class MemberListener(Protocol):
    """What takes the members' messages. Called from the event loop."""

    def attach(self, member: Member, where: pb.Peer | None) -> MemberStream:
        """A member dialled and said which it is and, if it is an instance, where its peers find it.

        Raises ValueError if there is no place for it."""

    def loading(self, member: Member, percent: int) -> None:
        """A member that has yet to say hello has loaded this percentage of its weights."""

    def received(self, member: Member, message: FromMember) -> None:
        """Take a message that came after hello.

        Raises ValueError if the member cannot have meant it: the stream then ends.
        """

    def failed(self, member: Member | None, message: str) -> None:
        """The member said that it cannot go on, or its stream broke: once for a stream.

        member: None if it never said hello. The message names the member."""


async def serve_members(
    listener: MemberListener, service: ServiceConfig, member_secrets: MemberSecrets
) -> tuple[grpc.aio.Server, str]:
    """Open the controller's port for members: the server, and the host:port to dial.

    Raises OSError, naming the port, if that is impossible.
    """
    server, address = bind(service, member_secrets, 0)
    rpc.add_ControllerServicer_to_server(MemberServicer(listener), server)
    await server.start()
    return server, address


class MemberServicer(rpc.ControllerServicer):
    """Carries messages between streams and the listener."""

    def __init__(self, listener: MemberListener) -> None:
        self._listener = listener

    async def AttachInstance(
        self, requests: AsyncIterator[pb.FromInstance], context: Any
    ) -> AsyncIterator[Any]:
        """See cluster.proto."""
        requests = _until_it_breaks(requests)
        async for first in requests:
            match first.WhichOneof("message"):
                case "loading":
                    member = Member("instance", first.loading.instance)
                    self._listener.loading(member, first.loading.percent)
                    continue
                case "hello":
                    member, where = Member("instance", first.hello.instance), first.hello.where
                    async for message in self._converse(member, requests, context, where):
                        yield message
                case "failure":
                    # A process that fails before its hello says why; a stream that just ends is no
                    # member's.
                    self._listener.failed(None, first.failure.message)
            return

    async def AttachPrefill(
        self, requests: AsyncIterator[pb.FromPrefill], context: Any
    ) -> AsyncIterator[Any]:
        """See cluster.proto."""
        async for message in self._converse(PREFILL, _until_it_breaks(requests), context):
            yield message

    async def _converse(
        self,
        member: Member,
        requests: AsyncIterator[Any],
        context: Any,
        where: pb.Peer | None = None,
    ) -> AsyncIterator[ToMember]:
        """Read in a task of its own, so that neither direction waits for the other."""
        if caller(context) != str(member):
            sentence = f"{caller(context)} cannot attach as {member}"
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, sentence)
        try:
            stream = self._listener.attach(member, where)
        except ValueError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        reader = asyncio.create_task(self._read(stream, requests))
        try:
            async for message in stream.messages():
                yield message
        finally:
            reader.cancel()
            self._end(stream, f"{stream.member}: its stream broke")

    async def _read(self, stream: MemberStream, requests: AsyncIterator[FromMember]) -> None:
        try:
            async for message in requests:
                if stream.closed:
                    return
                if message.WhichOneof("message") == "failure":
                    self._end(stream, message.failure.message)
                    return
                self._listener.received(stream.member, message)
        except ValueError as error:
            self._end(stream, str(error))
        except Exception as error:
            logger.exception("a message of %s could not be handled", stream.member)
            self._end(stream, f"{stream.member}: {type(error).__name__}: {error}")
        else:
            self._end(stream, f"{stream.member}: its stream ended")

    def _end(self, stream: MemberStream, message: str) -> None:
        if not stream.closed:
            stream.close()
            self._listener.failed(stream.member, message)


async def _until_it_breaks(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """The messages; a connection that is cut in the middle of one ends them as any other end."""
    try:
        async for message in requests:
            yield message
    except grpc.aio.InternalError as error:
        logger.debug("a member's connection was cut: %s", error)
