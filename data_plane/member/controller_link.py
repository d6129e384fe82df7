"""A member's stream to the controller: one queue up, one queue down, which None ends."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Sequence
from queue import Full, Queue
from typing import Any

import grpc

from data_plane.transport.exchange import Term
from nanocp.config.limits import LimitsConfig
from nanocp.parent import GONE, starter
from nanocp.values.commands import Join, Leave, Shutdown
from nanocp.values.members import Envelope, Said
from nanocp.wire.keepalive import keepalive_options
from nanocp.wire.members import (
    CONTROLLER,
    FROM_INSTANCE,
    FROM_PREFILL,
    TO_INSTANCE,
    TO_PREFILL,
    why_broken,
)

logger = logging.getLogger(__name__)

_MAX_MESSAGES = 16_384
"""Longest queue; the controller allows as many messages under way to a member."""
_MAX_MESSAGE_BYTES = 256 << 20
_REDIAL_S = 0.2
SLICE_S = 1.0
"""Longest single wait for a controller; only slices count, so a stopped process has not waited."""
_LAST_WORD_S = 2.0


class ControllerLost(RuntimeError):
    """The stream to the controller cannot be opened, has ended, or is not read."""


class ControllerLink:
    """The open stream: `inbox` for the controller's messages; any thread may call `send`."""

    def __init__(
        self,
        controller: str,
        limits: LimitsConfig,
        metadata: Sequence[tuple[str, str]] = (),
        is_prefill: bool = False,
        term: Term | None = None,
    ) -> None:
        """Dial the controller at host:port and attach.

        metadata: with the member's name and secret. term: this member's, which the controller may
        end at once. Raises ControllerLost if no controller answers within start_timeout_ms.
        """
        self.term = term or Term()
        self._controller = controller
        self._limits = limits
        self._metadata = metadata
        self._is_prefill = is_prefill
        self._parent = starter()
        self._is_orphan = False
        self._left_s = limits.start_timeout_ms / 1000
        """Rest of the wait for a controller."""
        self._dial("start_timeout_ms")

    def _dial(self, limit: str) -> None:
        self.inbox: Queue[Any] = Queue(_MAX_MESSAGES)
        self._outbox: Queue[Any] = Queue(_MAX_MESSAGES)
        self._channel = grpc.insecure_channel(
            self._controller, options=channel_options(self._limits)
        )
        try:
            self._left_s = await_controller(
                self._channel,
                self._controller,
                f"{limit} ({getattr(self._limits, limit)} ms)",
                self._left_s,
                self._parent,
            )
        except ControllerLost:
            self._channel.close()
            raise
        name, up, down = "AttachInstance", FROM_INSTANCE, TO_INSTANCE
        if self._is_prefill:
            name, up, down = "AttachPrefill", FROM_PREFILL, TO_PREFILL
        attach = self._channel.stream_stream(f"/{CONTROLLER}/{name}", up.seal, down.open)
        self._call = attach(iter(self._outbox.get, None), metadata=self._metadata)
        self._reader = threading.Thread(
            target=self._read, args=(self.inbox,), name="from controller", daemon=True
        )
        self._reader.start()

    def redial(self) -> None:
        """Attach to the controller that replaces a lost one.

        Raises ControllerLost if there is none within orphan_ms, or nobody who could start one.
        """
        if not self._outbox.full():
            self._outbox.put_nowait(None)
        self._channel.close()
        if os.getppid() != self._parent:
            raise ControllerLost(GONE)
        if not self._is_orphan:
            self._is_orphan, self._left_s = True, self._limits.orphan_ms / 1000
        elif self._left_s <= 0:
            raise ControllerLost(
                f"no controller took this member within orphan_ms ({self._limits.orphan_ms} ms)"
            )
        else:
            time.sleep(_REDIAL_S)
            self._left_s -= _REDIAL_S
        self._dial("orphan_ms")
        self.term.go_on()

    def send(self, message: Said, term: int = 0) -> None:
        """Queue a message, of this term if it has one. Raises ControllerLost if too many wait."""
        try:
            self._outbox.put_nowait(Envelope(message, term))
        except Full:
            raise ControllerLost(f"the controller left {_MAX_MESSAGES} messages unread") from None

    def close(self) -> None:
        """Send the queued messages, end the stream, close the channel. Idempotent."""
        if not self._outbox.full():
            self._outbox.put_nowait(None)
        self._reader.join(_LAST_WORD_S)
        self._channel.close()

    def _read(self, inbox: Queue[Any]) -> None:
        try:
            for envelope in self._call:
                self._is_orphan = False
                self._note(envelope)
                inbox.put_nowait(envelope)
        except Full:
            logger.error("this process left %d of the controller's messages unread", _MAX_MESSAGES)
            self._call.cancel()
            inbox.get_nowait()
        except grpc.RpcError as error:
            logger.info("the controller's stream broke: %s", why_broken(error))
        self.term.end(math.inf)
        inbox.put(None)

    def _note(self, envelope: Envelope) -> None:
        match envelope.message:
            case Leave():
                self.term.end(envelope.term)
            case Join():
                self.term.end(envelope.term - 1)
            case Shutdown():
                self.term.end(math.inf)


def await_controller(
    channel: grpc.Channel, address: str, limit: str, left_s: float, parent: int
) -> float:
    """Wait until a controller answers; return the rest of the time.

    limit: the name of left_s, for people. parent: may start a controller. Raises ControllerLost if
    none answers in left_s, or the parent is gone.
    """
    ready = grpc.channel_ready_future(channel)
    while not _is_done(ready, min(SLICE_S, left_s)):
        left_s -= SLICE_S
        if os.getppid() != parent:
            raise ControllerLost(GONE)
        if left_s <= 0:
            raise ControllerLost(f"no controller answered at {address} within {limit}")
    return left_s


def _is_done(future: grpc.Future, timeout_s: float) -> bool:
    try:
        future.result(timeout_s)
    except grpc.FutureTimeoutError:
        return False
    return True


def channel_options(limits: LimitsConfig) -> tuple[tuple[str, int], ...]:
    """Return a channel's options, for large messages and dead networks."""
    return (
        ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
        ("grpc.initial_reconnect_backoff_ms", limits.retry_ms),
        ("grpc.max_reconnect_backoff_ms", limits.retry_ms),
        *keepalive_options(every_ms=10_000),
        # By default gRPC sends only one ping a minute once the stream is idle.
        ("grpc.http2.max_pings_without_data", 0),
        # Every heartbeat would bring pings that measure the bandwidth.
        ("grpc.http2.bdp_probe", 0),
    )
