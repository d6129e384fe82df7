"""A member's stream to the controller: one queue up, one queue down.

Enters: messages to send. Leaves: messages that arrived, and None when the stream has ended; a term
that is over, at once. Does not know: what other messages mean.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator, Sequence
from queue import Full, Queue
from typing import Any

import grpc

from data_plane.transport.exchange import Term
from nanocp.config import LimitsConfig
from nanocp.wire.v1 import cluster_pb2 as pb
from nanocp.wire.v1 import cluster_pb2_grpc as rpc

logger = logging.getLogger(__name__)

_MAX_MESSAGES = 16_384
"""Longest queue; the controller keeps at most as many messages under way to one member."""
_MAX_MESSAGE_BYTES = 256 << 20
_LAST_WORD_S = 2.0
"""Longest wait for the controller to take the last message."""


class ControllerLost(RuntimeError):
    """The stream to the controller cannot be opened, has ended, or is not read."""


class ControllerLink:
    """The open stream: `inbox` gets the controller's messages, any thread may call `send`."""

    def __init__(
        self,
        controller: str,
        limits: LimitsConfig,
        metadata: Sequence[tuple[str, str]] = (),
        is_prefill: bool = False,
        term: Term | None = None,
    ) -> None:
        """Dial the controller at host:port and attach.

        metadata: the call's, with the member's name and secret, without which the controller
        refuses it. term: this member's, which ends as soon as the controller says so, before the
        message is taken. Raises ControllerLost if no controller answers within start_timeout_ms.
        """
        self.term = term or Term()
        self.inbox: Queue[Any] = Queue(_MAX_MESSAGES)
        self._is_prefill = is_prefill
        self._outbox: Queue[Any] = Queue(_MAX_MESSAGES)
        self._channel = grpc.insecure_channel(controller, options=channel_options(limits))
        try:
            grpc.channel_ready_future(self._channel).result(limits.start_timeout_ms / 1000)
        except grpc.FutureTimeoutError:
            self._channel.close()
            raise ControllerLost(
                f"no controller answered at {controller} within start_timeout_ms "
                f"({limits.start_timeout_ms} ms)"
            ) from None
        stub = rpc.ControllerStub(self._channel)
        attach = stub.AttachPrefill if is_prefill else stub.AttachInstance
        self._call = attach(self._outgoing(), metadata=metadata)
        self._reader = threading.Thread(target=self._read, name="from controller", daemon=True)
        self._reader.start()

    def send(self, message: pb.FromInstance | pb.FromPrefill) -> None:
        """Queue a message to the controller. Raises ControllerLost if it leaves too many unread."""
        try:
            self._outbox.put_nowait(message)
        except Full:
            raise ControllerLost(f"the controller left {_MAX_MESSAGES} messages unread") from None

    def fail(self, message: str) -> None:
        """Report to the controller why this member fails."""
        failure = pb.Failure(message=message)
        self.send(
            pb.FromPrefill(failure=failure)
            if self._is_prefill
            else pb.FromInstance(failure=failure)
        )

    def close(self) -> None:
        """Send what is queued, end the stream, close the channel. Idempotent."""
        if not self._outbox.full():
            self._outbox.put_nowait(None)
        self._reader.join(_LAST_WORD_S)
        self._channel.close()

    def _outgoing(self) -> Iterator[Any]:
        while (message := self._outbox.get()) is not None:
            yield message

    def _read(self) -> None:
        try:
            for message in self._call:
                self._note(message)
                self.inbox.put_nowait(message)
        except Full:
            logger.error("this process left %d of the controller's messages unread", _MAX_MESSAGES)
            self._call.cancel()
            self.inbox.get_nowait()
        except grpc.RpcError as error:
            logger.debug("the controller's stream broke: %s", error)
        self.term.end(math.inf)
        self.inbox.put(None)

    def _note(self, message: Any) -> None:
        """End the term for a thread that waits for a peer, and takes no message meanwhile."""
        match message.WhichOneof("message"):
            case "leave":
                self.term.end(message.term)
            case "join":
                self.term.end(message.term - 1)
            case "shutdown":
                self.term.end(math.inf)


def channel_options(limits: LimitsConfig) -> tuple[tuple[str, int], ...]:
    """Options of a channel to the controller: large messages, and a dead network is noticed."""
    return (
        ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
        ("grpc.initial_reconnect_backoff_ms", limits.retry_ms),
        ("grpc.max_reconnect_backoff_ms", limits.retry_ms),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),
        # By default gRPC sends only one ping a minute once the stream is idle.
        ("grpc.http2.max_pings_without_data", 0),
        # Every heartbeat would bring pings that measure the bandwidth.
        ("grpc.http2.bdp_probe", 0),
    )
