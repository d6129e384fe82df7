"""HTTP connections with bounds on their number and on the time to send a request."""

from __future__ import annotations

from asyncio import TimerHandle
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from control_plane.frontend.http.errors import ApiError, error_response
from control_plane.frontend.http.middleware import PROBE_PATHS

_MAX_CROWDED = 32
"""Most connections beyond the limit."""


class Crowd:
    """The connections of a server beyond its limit."""

    def __init__(self, most: int, began: Callable[[int], None]) -> None:
        """most: the limit. began: called with the descriptor of each connection."""
        self._most = most
        self._began = began
        self._beyond: dict[BoundedProtocol, None] = {}
        """The oldest first."""
        crowded = ApiError(
            f"{most} connections are open, which is the limit (limits.max_http_connections, "
            "ulimit -n)",
            status=HTTPStatus.SERVICE_UNAVAILABLE,
        )
        self._refusal = error_response(crowded)

    def enter(self, connection: BoundedProtocol) -> None:
        """Refuse a connection's requests beyond the limit; close the oldest of many."""
        self._began(connection.transport.get_extra_info("socket").fileno())
        if len(connection.connections) > self._most:
            connection.app = partial(self._answer_probes, connection.app)
            self._beyond[connection] = None
            if len(self._beyond) > _MAX_CROWDED:
                oldest = next(iter(self._beyond))
                self.leave(oldest)
                oldest.transport.close()

    def leave(self, connection: BoundedProtocol) -> None:
        """Forget the connection, if it is here."""
        self._beyond.pop(connection, None)

    async def _answer_probes(
        self, app: ASGIApp, scope: Scope, receive: Receive, send: Send
    ) -> None:
        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        await (app if scope["path"] in PROBE_PATHS else self._refusal)(scope, receive, closing)


class BoundedProtocol(HttpToolsProtocol):
    """Cuts a client that takes too long to send its request; uvicorn would wait for ever.

    Beyond the limit a connection gets an error with Retry-After, except for health. An offer of
    another protocol (Upgrade) is ignored, as RFC 9110, 7.8 allows.
    """

    def __init__(self, *args: Any, request_timeout_s: float, crowd: Crowd, **more: Any) -> None:
        super().__init__(*args, **more)
        self._request_timeout_s = request_timeout_s
        self._crowd = crowd
        self._timer: TimerHandle | None = None
        self._earlier: RequestResponseCycle | None = None
        """Request before the one being read: its response may still run."""
        self._has_offer = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._crowd.enter(self)
        self._wait()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as end_of_head:
            if self._has_offer:
                self._read_again(data[end_of_head.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def _read_again(self, rest: bytes) -> None:
        """Read the head again without the Upgrade offer, which hides the body from this parser."""
        version = self.parser.get_http_version().encode()
        head = [self.parser.get_method(), b" ", self.url, b" HTTP/", version, b"\r\n"]
        for name, value in self.headers:
            if name != b"upgrade":
                head += name, b": ", value, b"\r\n"
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn
        self.data_received(b"".join((*head, b"\r\n", rest)))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._earlier = self.cycle
        self._wait()

    def on_headers_complete(self) -> None:
        is_connect = self.parser.get_method() == b"CONNECT"
        self._has_offer = self.parser.should_upgrade() and not is_connect
        if not self._has_offer:
            app = self.app
            if self.parser.get_http_version() == "1.0":
                self.app = partial(_until_closed, app)
            super().on_headers_complete()
            self.app = app

    def on_message_complete(self) -> None:
        if not self._has_offer:
            self._stop_waiting()
            super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._crowd.leave(self)
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(self._request_timeout_s, self._too_late)

    def _too_late(self) -> None:
        if self._earlier is None or self._earlier.response_complete:
            self.transport.close()
        else:
            self._wait()

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


async def _until_closed(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer HTTP/1.0: without a length, closing the connection ends a response."""
    cycle: RequestResponseCycle = send.__self__  # type: ignore[attr-defined]
    is_open = False

    async def unchunked(message: Message) -> None:
        nonlocal is_open
        if message["type"] == "http.response.start":
            is_open = all(name.lower() != b"content-length" for name, _ in message["headers"])
            cycle.chunked_encoding = False if is_open else None
        elif is_open:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    await app(scope, receive, unchunked)
