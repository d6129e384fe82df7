"""One stream to the controller for all instances of a node, carried by a process of its own.

So an instance that dies takes no other stream with it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc

from data_plane.member.controller_link import await_controller, channel_options
from data_plane.member.lifetime import MemberSpec
from nanocp.parent import starter
from nanocp.values.plan import WindowDone
from nanocp.wire.member_metadata import NAME, SECRET
from nanocp.wire.members import (
    CONTROLLER,
    FROM_INSTANCE,
    FROM_NODE,
    TO_NODE,
    FromNode,
    FromStream,
    Opened,
    ToStream,
    why_broken,
)

logger = logging.getLogger(__name__)

_MAX_MESSAGES = 16_384
"""For one instance."""
_REPORT_WAIT_S = 0.002
"""Longest wait of a window's report for others."""
_BEATS = 4
"""In the time after which a silent node is lost."""


class NodeStreams:
    """The streams of a node's instances. Used from one event loop."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._down: dict[int, asyncio.Queue[bytes | None]] = {}
        """By open stream; None ends it."""
        self._up: list[FromStream] = []
        self._num_reports = 0
        self._may_send = asyncio.Event()

    async def attach(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        """Carry an instance's stream: a gRPC handler of Controller.AttachInstance."""
        metadata = dict(context.invocation_metadata())
        number = next(self._numbers)
        opened = Opened(metadata.get(NAME, ""), metadata.get(SECRET, ""))
        queue = self._down[number] = asyncio.Queue(_MAX_MESSAGES)
        self._send(FromStream(number, opened))
        reader = asyncio.create_task(self._read(number, requests))
        try:
            while (message := await queue.get()) is not None:
                yield message
        finally:
            reader.cancel()
            del self._down[number]
            self._send(FromStream(number))

    def deliver(self, item: ToStream) -> None:
        """Queue the controller's message for one stream, unless it has ended."""
        queue = self._down.get(item.stream)
        if queue is None:
            return
        try:
            queue.put_nowait(item.message)
        except asyncio.QueueFull:
            logger.error("an instance left %d messages unread; its stream ends", _MAX_MESSAGES)
            queue.get_nowait()
            queue.put_nowait(None)

    async def messages(self, beat_s: float) -> AsyncIterator[FromNode]:
        """Yield the messages up, those of a moment together; a heartbeat after beat_s."""
        while True:
            try:
                async with asyncio.timeout(beat_s):
                    await self._may_send.wait()
            except TimeoutError:
                yield FromNode()
            self._may_send.clear()
            items, self._up, self._num_reports = self._up, [], 0
            if items:
                yield FromNode(tuple(items))

    async def _read(self, number: int, requests: AsyncIterator[bytes]) -> None:
        queue = self._down[number]
        try:
            async for message in requests:
                is_report = FROM_INSTANCE.name(message) == WindowDone.__name__
                self._send(FromStream(number, message=message), is_report)
        except grpc.aio.InternalError as error:
            logger.debug("an instance's connection was cut: %s", error)
        finally:
            with suppress(asyncio.QueueFull):
                queue.put_nowait(None)

    def _send(self, item: FromStream, is_report: bool = False) -> None:
        self._up.append(item)
        self._num_reports += is_report
        if not is_report or self._num_reports >= len(self._down):
            self._may_send.set()
        elif self._num_reports == 1:
            asyncio.get_running_loop().call_later(_REPORT_WAIT_S, self._may_send.set)


def run_node_streams(spec: MemberSpec) -> None:
    """Carry the streams of a node's instances until the controller ends its stream.

    Raises ControllerLost if no controller answers, OSError if it cannot listen at the address.
    """
    limits = spec.config.limits
    limit_ms = limits.start_timeout_ms
    with grpc.insecure_channel(spec.controller, options=channel_options(limits)) as channel:
        limit = f"start_timeout_ms ({limit_ms} ms)"
        await_controller(channel, spec.controller, limit, limit_ms / 1000, starter())
    asyncio.run(_carry(spec))


async def _carry(spec: MemberSpec) -> None:
    limits = spec.config.limits
    options = channel_options(limits)
    streams = NodeStreams()
    async with grpc.aio.insecure_channel(spec.controller, options=options) as channel:
        attach = channel.stream_stream(
            f"/{CONTROLLER}/AttachNode", FROM_NODE.encode, TO_NODE.decode
        )
        call = attach(metadata=spec.metadata)
        server = await _serve(spec, streams)
        sender = asyncio.create_task(_send_up(call, streams, limits.suspect_ms / _BEATS / 1000))
        try:
            async for message in call:
                for item in message.items:
                    streams.deliver(item)
        except grpc.aio.AioRpcError as error:
            logger.info("the controller's stream broke: %s", why_broken(error))
        finally:
            sender.cancel()
            await server.stop(0)
            Path(spec.carrier.removeprefix("unix:")).unlink(missing_ok=True)


async def _serve(spec: MemberSpec, streams: NodeStreams) -> grpc.aio.Server:
    server = grpc.aio.server(options=channel_options(spec.config.limits))
    # Messages pass through as bytes.
    handler = grpc.stream_stream_rpc_method_handler(streams.attach)
    attach = {"AttachInstance": handler}
    service = grpc.method_handlers_generic_handler(CONTROLLER, attach)
    server.add_generic_rpc_handlers((service,))
    try:
        server.add_insecure_port(spec.carrier)
    except RuntimeError as error:
        raise OSError(f"{spec.name} cannot listen at {spec.carrier}: {error}") from error
    await server.start()
    return server


async def _send_up(call: Any, streams: NodeStreams, beat_s: float) -> None:
    async for message in streams.messages(beat_s):
        await call.write(message)
