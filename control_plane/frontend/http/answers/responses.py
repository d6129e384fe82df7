"""Responses to calls: one body, or server-sent events."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from control_plane.frontend.http.answers.deltas import Delta, UsageCount
from control_plane.frontend.http.answers.token_names import TokenNames
from control_plane.frontend.http.errors import FAILED, error_body
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


class Writer(ABC):
    """Makes an endpoint's response; one for each call."""

    def __init__(
        self, request: GenerationRequest, call_id: str, model: str, tokenizer: Tokenizer | None
    ) -> None:
        self._head: dict[str, Any] = {"id": call_id, "created": int(time.time()), "model": model}
        self._names = TokenNames(tokenizer, bool(request.return_tokens_as_token_ids))
        self._usage = UsageCount(request.stream_options, self._names.spelled)
        self._choices: dict[int, Any] = {}
        self._texts: dict[int, list[str]] = {}

    @abstractmethod
    def chunks(self, delta: Delta) -> list[BaseModel]:
        """Return the chunks for this delta."""

    def last_chunks(self) -> list[BaseModel]:
        """Return the chunks after the last delta."""
        return [
            self._chunk([], usage=usage, **self._usage.metrics)
            for usage in self._usage.in_last_chunk()
        ]

    @abstractmethod
    def add(self, delta: Delta) -> None:
        """Keep the delta for `body`."""

    @abstractmethod
    def body(self) -> BaseModel:
        """Return the response as one body."""

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
    """Return the response. Raises RequestError if the call fails before any output."""
    try:
        if is_stream:
            # The status waits for the first token: until then the request may be refused.
            first = await _unless_disconnected(request, anext(deltas))
            return _Events(first, deltas, writer)
        async with aclosing(deltas):
            body = await _unless_disconnected(request, _collected(deltas, writer))
            return Response(body.model_dump_json(exclude_unset=True), media_type="application/json")
    except _DisconnectedError:
        return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _collected(deltas: AsyncIterator[Delta], writer: Writer) -> BaseModel:
    async for delta in deltas:
        writer.add(delta)
    return writer.body()


async def _events(
    first: Delta, deltas: AsyncIterator[Delta], writer: Writer
) -> AsyncIterator[bytes]:
    try:
        for chunk in writer.chunks(first):
            yield _event(chunk)
        async for delta in deltas:
            for chunk in writer.chunks(delta):
                yield _event(chunk)
        for chunk in writer.last_chunks():
            yield _event(chunk)
    except RequestError as error:
        yield _event(error_body(error)[1])
    except Exception:
        logger.exception("a stream failed")
        yield _event(error_body(FAILED)[1])
    yield b"data: [DONE]\n\n"


def _event(chunk: BaseModel) -> bytes:
    data = chunk.model_dump_json(exclude_unset=True).translate(_LINE_BREAKS)
    return b"data: %b\n\n" % data.encode()


class _Events(StreamingResponse):
    """Aborts the requests of a stream at once when the client goes away."""

    def __init__(self, first: Delta, deltas: AsyncGenerator[Delta, None], writer: Writer) -> None:
        events = _events(first, deltas, writer)
        super().__init__(events, headers=_STREAM_HEADERS, media_type="text/event-stream")
        self._deltas = deltas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._deltas):
            await super().__call__(scope, receive, send)


class _DisconnectedError(Exception):
    pass


async def _unless_disconnected(request: Request, work: Any) -> Any:
    """Cancel the work when the client goes away. Raises _DisconnectedError."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise _DisconnectedError
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
