"""The controller's gRPC service: a stream for each instance or node, the prefill, the puller."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any, Protocol

import grpc

from control_plane.ports.members_port import MemberSecrets, bind, caller
from nanocp.config.service import ServiceConfig
from nanocp.values.members import PREFILL, Envelope, Failure, Hello, Loading, Member, Said
from nanocp.wire.member_metadata import NAME, SECRET
from nanocp.wire.members import (
    CONTROLLER,
    FROM_NODE,
    TO_INSTANCE,
    TO_NODE,
    TO_PREFILL,
    FromNode,
    FromStream,
    ToNode,
    ToStream,
    opened_said,
)

logger = logging.getLogger(__name__)


_MAX_MESSAGES = 16_384
"""Messages that a member may leave unread: two plans, and a ticket and a fence for each request."""

_LEAVING_POLL_S = 0.5
"""Longest time until a node without instances notices that the cluster leaves."""

_SILENT_TICKS = 6
"""Ticks without a message after which the stream of a node is lost."""


class MemberStream:
    """The stream down to one member. Used from the controller's event loop only."""

    def __init__(self, member: Member, max_messages: int = _MAX_MESSAGES) -> None:
        self.member = member
        self.max_messages = max_messages
        self._messages: asyncio.Queue[Envelope | None] = asyncio.Queue()
        self.closed = False
        self.is_filled: Callable[[], None] = lambda: None
        """Called when `take` has something to return."""

    def send(self, message: Envelope) -> bool:
        """Queue a message; False if the stream is closed, or the member left too much unread."""
        if self.closed or self._messages.qsize() >= self.max_messages:
            return False
        self._messages.put_nowait(message)
        self.is_filled()
        return True

    def close(self) -> None:
        """End the stream after all queued messages. Idempotent."""
        if not self.closed:
            self.closed = True
            self._messages.put_nowait(None)
            self.is_filled()

    async def messages(self) -> AsyncIterator[Envelope]:
        """Yield the messages down, until close."""
        while (message := await self._messages.get()) is not None:
            yield message

    def take(self) -> list[Envelope | None]:
        """Return the queued messages without a wait; None stands for the end."""
        return [self._messages.get_nowait() for _ in range(self._messages.qsize())]


class MemberListener(Protocol):
    """Takes the members' messages. Called from the event loop."""

    @property
    def leaving(self) -> str | None:
        """The reason for asking every member to leave; None until then."""

    def attach(self, member: Member, hello: Hello | None) -> MemberStream:
        """Attach a member that dialled.

        hello: of an instance. Raises ValueError if it has no place.
        """

    def loading(self, member: Member, percent: int) -> None:
        """Record the share of its weights that a member has loaded before its hello."""

    def received(self, member: Member, said: Said, term: int) -> None:
        """Take a member's message after hello, of this term.

        Raises ValueError if the member cannot have meant it: the stream then ends.
        """

    def failed(self, member: Member | None, message: str, says_why: bool = True) -> None:
        """Record that the member cannot continue, or its stream broke: once for a stream.

        member: None if it never said hello. says_why: False where the end of the process may say
        more.
        """


async def serve_members(
    listener: MemberListener,
    service: ServiceConfig,
    silent_s: float,
    member_secrets: MemberSecrets,
    node_lost: Callable[[Member], None],
) -> tuple[grpc.aio.Server, str]:
    """Open the controller's port for members; return the server, and the host:port to dial.

    node_lost: called in a thread with a node whose stream has ended; it may block. Raises OSError,
    naming the port.
    """
    server, address = bind(service, member_secrets, 0)
    servicer = MemberServicer(listener, member_secrets, node_lost, silent_s)
    server.add_generic_rpc_handlers((servicer.methods(),))
    await server.start()
    return server, address


class MemberServicer:
    """Carries messages between streams and the listener."""

    def __init__(
        self,
        listener: MemberListener,
        member_secrets: MemberSecrets,
        node_lost: Callable[[Member], None],
        silent_s: float,
    ) -> None:
        """silent_s: seconds without a message after which the stream of a node is lost."""
        self._listener = listener
        self._secrets = member_secrets
        self._node_lost = node_lost
        self._silent_s = silent_s

    def methods(self) -> grpc.GenericRpcHandler:
        """Return the methods that members dial, which decode messages."""
        stream = grpc.stream_stream_rpc_method_handler
        return grpc.method_handlers_generic_handler(
            CONTROLLER,
            {
                "AttachInstance": stream(
                    self._attach_instance, response_serializer=TO_INSTANCE.seal
                ),
                "AttachPrefill": stream(self._attach_prefill, response_serializer=TO_PREFILL.seal),
                "AttachNode": stream(
                    self._attach_node, FROM_NODE.decode, response_serializer=TO_NODE.encode
                ),
            },
        )

    async def _attach_instance(
        self, requests: AsyncIterator[bytes], context: Any
    ) -> AsyncIterator[Any]:
        requests = _until_it_breaks(requests)
        member = await _caller_of_kind("instance", context)
        async for first in requests:
            match self.before_hello(member, first):
                case Hello() as hello:
                    member = Member("instance", hello.instance)
                    async for message in self._converse(member, requests, context, hello):
                        yield message
                    return
                case Failure():
                    return

    def before_hello(self, member: Member, message: bytes) -> Hello | Failure | None:
        """Take an instance's message before its stream has a place; hello is for the caller.

        A process that fails before its hello says why.
        """
        try:
            said = opened_said(member, message).message
        except ValueError as error:
            logger.warning("%s: %s", member, error)
            return Failure(str(error))
        match said:
            case Loading():
                self._listener.loading(member, said.percent)
            case Failure():
                self._listener.failed(None, said.message)
                return said
            case Hello():
                return said
        return None  # A heartbeat: the member was of another controller, and beats on.

    async def _attach_prefill(
        self, requests: AsyncIterator[bytes], context: Any
    ) -> AsyncIterator[Any]:
        member = Member.named(caller(context))
        if member.instance is not None:
            member = PREFILL  # Which it is not: it is refused.
        async for message in self._converse(member, _until_it_breaks(requests), context):
            yield message

    async def _converse(
        self,
        member: Member,
        requests: AsyncIterator[bytes],
        context: Any,
        hello: Hello | None = None,
    ) -> AsyncIterator[Envelope]:
        """Read in a separate task, so that neither direction waits for the other."""
        if caller(context) != str(member):
            sentence = f"{caller(context)} cannot attach as {member}"
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, sentence)
        try:
            stream = self._listener.attach(member, hello)
        except ValueError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        reader = asyncio.create_task(self._read(stream, requests))
        try:
            async for message in stream.messages():
                yield message
        finally:
            reader.cancel()
            self.end(stream, f"{stream.member}: its stream broke", says_why=False)

    async def _read(self, stream: MemberStream, requests: AsyncIterator[bytes]) -> None:
        try:
            async for message in requests:
                if not self.take(stream, message):
                    return
        except Exception as error:
            logger.exception("the stream of %s cannot be read", stream.member)
            self.end(stream, f"{stream.member}: {type(error).__name__}: {error}")
        self.end(stream, f"{stream.member}: its stream ended", says_why=False)

    def take(self, stream: MemberStream, message: bytes) -> bool:
        """Pass on a message after hello; False: the stream is over."""
        try:
            said, term = opened_said(stream.member, message)
        except ValueError as error:
            self.end(stream, f"{stream.member}: {error}")
            return False
        try:
            if isinstance(said, Failure):
                self.end(stream, said.message)
            elif not stream.closed:
                self._listener.received(stream.member, said, term)
        except ValueError as error:
            self.end(stream, str(error))
        except Exception as error:
            logger.exception("a message of %s could not be handled", stream.member)
            self.end(stream, f"{stream.member}: {type(error).__name__}: {error}")
        return not stream.closed

    def end(self, stream: MemberStream, message: str, says_why: bool = True) -> None:
        """End the stream; says_why: the message has the reason. Idempotent."""
        if not stream.closed:
            stream.close()
            self._listener.failed(stream.member, message, says_why)

    async def _attach_node(
        self, requests: AsyncIterator[FromNode], context: Any
    ) -> AsyncIterator[Any]:
        member = await _caller_of_kind("node", context)
        node = _NodeStream(self, self._listener, self._secrets)
        reader = asyncio.create_task(node.read(_until_it_breaks(requests), self._silent_s))
        try:
            async for message in node.messages():
                yield message
        finally:
            reader.cancel()
            node.end(f"the process that carries the streams of {member} is lost")
            # It may be stopped, and would keep the place of the next one.
            await asyncio.to_thread(self._node_lost, member)


class _NodeStream:
    """One node's stream: the streams of its instances, by the node's numbers."""

    def __init__(
        self, servicer: MemberServicer, listener: MemberListener, member_secrets: MemberSecrets
    ) -> None:
        self._servicer = servicer
        self._listener = listener
        self._secrets = member_secrets
        self._members: dict[int, Member] = {}
        """Whose the open streams are."""
        self._streams: dict[int, MemberStream] = {}
        """Streams that have said hello."""
        self._over: list[int] = []
        """Streams that end before they said hello."""
        self._num_silent_ticks = 0
        self._is_broken = False
        self._wake = asyncio.Event()

    async def read(self, requests: AsyncIterator[FromNode], silent_s: float) -> None:
        """Silence is counted in ticks that this process has lived through, as for members."""
        reader = asyncio.create_task(self._read(requests))
        try:
            while not reader.done() and self._num_silent_ticks < _SILENT_TICKS:
                self._num_silent_ticks += 1
                await asyncio.wait({reader}, timeout=silent_s / _SILENT_TICKS)
        finally:
            reader.cancel()
            self._is_broken = True
            self._wake.set()

    async def _read(self, requests: AsyncIterator[FromNode]) -> None:
        try:
            async for message in requests:
                self._num_silent_ticks = 0
                for item in message.items:
                    self._take(item)
        except Exception:
            logger.exception("the stream of a node cannot be read")

    async def messages(self) -> AsyncIterator[ToNode]:
        while not self._is_broken:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LEAVING_POLL_S):
                    await self._wake.wait()
            self._wake.clear()
            items = [ToStream(number) for number in self._over]
            self._over = []
            for number, stream in self._streams.items():
                for message in stream.take():
                    sealed = None if message is None else TO_INSTANCE.seal(message)
                    items.append(ToStream(number, sealed))
            if items:
                yield ToNode(tuple(items))
            if self._listener.leaving is not None and not self._members:
                return

    def end(self, message: str) -> None:
        for stream in list(self._streams.values()):
            self._servicer.end(stream, f"{stream.member}: {message}")

    def _take(self, item: FromStream) -> None:
        number, opened, message = item
        if opened is not None:
            if not self._secrets.admit({NAME: opened.name, SECRET: opened.secret}):
                self._end_early(number, f"{opened.name} has no valid secret")
            else:
                self._members[number] = Member.named(opened.name)
        elif message is None:
            self._members.pop(number, None)
            if stream := self._streams.pop(number, None):
                broke = f"{stream.member}: its stream broke"
                self._servicer.end(stream, broke, says_why=False)
        elif stream := self._streams.get(number):
            self._servicer.take(stream, message)
        elif number in self._members:
            self._before_hello(number, message)

    def _before_hello(self, number: int, message: bytes) -> None:
        opener = self._members[number]
        match self._servicer.before_hello(opener, message):
            case Hello() as hello:
                member = Member("instance", hello.instance)
                if opener != member:
                    self._end_early(number, f"{opener} cannot attach as {member}")
                    return
                try:
                    stream = self._listener.attach(member, hello)
                except ValueError as error:
                    self._end_early(number, str(error))
                    return
                self._streams[number] = stream
                stream.is_filled = self._wake.set
                self._wake.set()
            case Failure(reason):
                self._end_early(number, reason)

    def _end_early(self, number: int, reason: str) -> None:
        logger.warning("a stream is refused: %s", reason)
        self._members.pop(number, None)
        self._over.append(number)
        self._wake.set()


async def _caller_of_kind(kind: str, context: Any) -> Member:
    member = Member.named(caller(context))
    if member.kind != kind:
        sentence = f"{member} cannot attach as a stream of kind {kind}"
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, sentence)
    return member


async def _until_it_breaks(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    try:
        async for message in requests:
            yield message
    except grpc.aio.InternalError as error:
        logger.debug("a member's connection was cut: %s", error)
