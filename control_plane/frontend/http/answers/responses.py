"""Responses to calls: one body, or server-sent events."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel
from starlette.types import Message, Receive, Scope, Send

from control_plane.frontend.http.answers.deltas import Delta, UsageCount
from control_plane.frontend.http.answers.token_names import TokenNames
from control_plane.frontend.http.errors import FAILED, ApiError, error_body
from control_plane.frontend.http.protocol import GenerationRequest
from control_plane.frontend.open_requests import RequestError
from control_plane.frontend.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a request whose client has closed the connection."""


_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Proxies must pass on each event at once."""
_LINE_BREAKS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}
"""Line ends for some clients, as JSON escapes them."""
_PATIENCE_S = 20.0
"""Longest wait for the first output before a stream with pings begins."""
_PING_EVERY_S = 10.0


class Writer(ABC):
    """Makes an endpoint's response; one for each call."""

    end: bytes = b""
    """The last event of a stream."""
    ping: bytes = b""
    """The event of a stream in which nothing was written for a while; empty: none."""

    @abstractmethod
    def chunks(self, delta: Delta) -> list[BaseModel]:
        """Return the chunks for this delta."""

    @abstractmethod
    def last_chunks(self) -> list[BaseModel]:
        """Return the chunks after the last delta."""

    @abstractmethod
    def error_chunk(self, error: ApiError | RequestError) -> BaseModel:
        """Return the chunk that ends a stream which failed."""

    def event(self, chunk: BaseModel) -> bytes:
        """Return a chunk as a server-sent event."""
        data = chunk.model_dump_json(exclude_unset=True).translate(_LINE_BREAKS)
        return b"data: %b\n\n" % data.encode()

    @abstractmethod
    def add(self, delta: Delta) -> None:
        """Keep the delta for `body`."""

    @abstractmethod
    def body(self) -> BaseModel:
        """Return the response as one body."""

    def json(self) -> str:
        """Return the body as JSON."""
        return self.body().model_dump_json(exclude_unset=True)


class ChoicesWriter(Writer):
    """Makes a response of OpenAI's that has a list of choices."""

    end = b"data: [DONE]\n\n"

    def __init__(
        self, request: GenerationRequest, call_id: str, model: str, tokenizer: Tokenizer | None
    ) -> None:
        self._head: dict[str, Any] = {"id": call_id, "created": int(time.time()), "model": model}
        self._names = TokenNames(tokenizer, bool(request.return_tokens_as_token_ids))
        self._usage = UsageCount(request.stream_options, self._names.spelled)
        self._choices: dict[int, Any] = {}
        self._texts: dict[int, list[str]] = {}

    def last_chunks(self) -> list[BaseModel]:
        return [
            self._chunk([], usage=usage, **self._usage.metrics)
            for usage in self._usage.in_last_chunk()
        ]

    def error_chunk(self, error: ApiError | RequestError) -> BaseModel:
        return error_body(error)[1]

    @abstractmethod
    def _chunk(self, choices: list[Any], **more: Any) -> BaseModel:
        """Make a chunk with these choices."""

    def _keep(self, text: str, new: Any) -> None:
        self._texts.setdefault(new.index, []).append(text)
        whole = self._choices.setdefault(new.index, new)
        if whole is new:
            return
        whole.finish_reason, whole.stop_reason = new.finish_reason, new.stop_reason
        if new.placement is not None:
            whole.placement = new.placement
        if new.token_ids is not None:
            whole.token_ids += new.token_ids
        if new.logprobs is not None:
            for name in type(new.logprobs).model_fields:
                getattr(whole.logprobs, name).extend(getattr(new.logprobs, name))

    def _kept(self) -> list[Any]:
        return [choice for _, choice in sorted(self._choices.items())]


async def respond(
    request: Request, deltas: AsyncGenerator[Delta, None], writer: Writer, is_stream: bool | None
) -> Response:
    """Return the response. Raises RequestError if the call fails before any output.

    A stream with pings begins without output if that takes long; then the failure is an event.
    """
    try:
        if is_stream:
            # The status waits for the first token: until then the request may be refused.
            first = asyncio.ensure_future(anext(deltas))
            until_s = _PATIENCE_S if writer.ping else None
            await _unless_disconnected(request, first, until_s)
            return _Events(first, deltas, writer)
        async with aclosing(deltas):
            collected = asyncio.ensure_future(_collected(deltas, writer))
            await _unless_disconnected(request, collected)
            return Response(collected.result(), media_type="application/json")
    except _DisconnectedError:
        return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _collected(deltas: AsyncIterator[Delta], writer: Writer) -> str:
    async for delta in deltas:
        writer.add(delta)
    return writer.json()


async def _events(
    first: asyncio.Future[Delta], deltas: AsyncIterator[Delta], writer: Writer
) -> AsyncIterator[bytes]:
    try:
        for chunk in writer.chunks(await first):
            yield writer.event(chunk)
        async for delta in deltas:
            for chunk in writer.chunks(delta):
                yield writer.event(chunk)
        for chunk in writer.last_chunks():
            yield writer.event(chunk)
    except RequestError as error:
        yield writer.event(writer.error_chunk(error))
    except Exception:
        logger.exception("a stream failed")
        yield writer.event(writer.error_chunk(FAILED))
    if writer.end:
        yield writer.end


class _Events(StreamingResponse):
    """Aborts the requests of a stream at once when the client goes away."""

    def __init__(
        self, first: asyncio.Future[Delta], deltas: AsyncGenerator[Delta, None], writer: Writer
    ) -> None:
        events = _events(first, deltas, writer)
        super().__init__(events, headers=_STREAM_HEADERS, media_type="text/event-stream")
        self._first, self._deltas, self._ping = first, deltas, writer.ping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._deltas), _pinged(send, self._ping) as pinged:
            try:
                await super().__call__(scope, receive, pinged)
            finally:
                # A generator that still runs cannot be closed.
                self._first.cancel()
                await asyncio.gather(self._first, return_exceptions=True)


@asynccontextmanager
async def _pinged(send: Send, ping: bytes) -> AsyncIterator[Send]:
    """Send pings between the events of a response, when nothing was sent for a while."""
    if not ping:
        yield send
        return
    sent_s = time.monotonic()

    async def noted(message: Message) -> None:
        nonlocal sent_s
        sent_s = time.monotonic()
        if message["type"] == "http.response.body" and not message.get("more_body"):
            pinging.cancel()
        await send(message)

    async def send_pings() -> None:
        while True:
            await asyncio.sleep(max(0.0, sent_s + _PING_EVERY_S - time.monotonic()))
            if time.monotonic() - sent_s >= _PING_EVERY_S:
                await noted({"type": "http.response.body", "body": ping, "more_body": True})

    pinging = asyncio.create_task(send_pings())
    try:
        yield noted
    finally:
        pinging.cancel()
        await asyncio.gather(pinging, return_exceptions=True)


class _DisconnectedError(Exception):
    pass


async def _unless_disconnected(
    request: Request, work: asyncio.Future[Any], until_s: float | None = None
) -> None:
    """Wait until the work is done, at most until_s; raise what it raises.

    Cancels it and raises _DisconnectedError when the client goes away.
    """
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((work, gone), timeout=until_s, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
        elif gone.done():
            raise _DisconnectedError
    except BaseException:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        raise
    finally:
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
