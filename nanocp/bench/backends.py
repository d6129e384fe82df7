"""Backends that send and time one request: NanoCP's gRPC API, or any OpenAI endpoint."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from ssl import SSLContext
from typing import Any, NamedTuple, Protocol

import aiohttp

from nanocp.bench.dataset import SampleRequest
from nanocp.client import AsyncClient, ServiceError

_TIMEOUT_S = 6 * 60 * 60
_MAX_ERROR_CHARACTERS = 500
_NO_TEXT = ("role", "id", "type", "index", "format", "signature")
"""Keys of a delta whose values are no text of the model."""


class TokenMessage(NamedTuple):
    """One message of an answer that brought tokens, or may have."""

    at_s: float
    size: int
    """Characters; 0: it may be a token without text yet."""
    tokens: int | None = None
    """None: the message does not say."""
    total: int | None = None
    """Tokens of the answer so far; None: the message does not say."""


@dataclass(slots=True)
class RequestOutput:
    """Answer to one request; times are seconds of time.perf_counter."""

    prompt_len: int
    start_s: float
    success: bool = False
    output_len: int = 0
    text: str = ""
    latency_s: float = 0.0
    ttft_s: float = 0.0
    itl_s: list[float] = field(default_factory=list)
    """Times between messages."""
    tokens: list[float] = field(default_factory=list)
    """Tokens of each message, maybe estimated."""
    client_queue_s: float = 0.0
    error: str = ""
    is_whole: bool = False
    """The service has marked the end."""
    messages: list[TokenMessage] = field(default_factory=list)
    has_usage: bool = False

    def end(self) -> None:
        """Note that the request is complete; like vLLM, count to the last message with tokens."""
        if self.output_len and not self.messages:
            self.messages.append(
                TokenMessage(time.perf_counter(), 1)
            )  # All tokens came with the end.
        messages = self._with_tokens()
        self.output_len = self.output_len or sum(message.tokens or 1 for message in messages)
        times_s = [message.at_s for message in messages]
        if times_s:
            self.ttft_s, self.latency_s = times_s[0] - self.start_s, times_s[-1] - self.start_s
            self.itl_s = [after - before for before, after in pairwise(times_s)]
            self.tokens = _shares(messages, self.output_len)
        else:
            self.latency_s = time.perf_counter() - self.start_s
            self.error = self.error or "the request ended without a token"
        if not self.is_whole:
            self.error = self.error or "the answer broke off: it has no finish reason"
        self.success = not self.error

    def _with_tokens(self) -> list[TokenMessage]:
        sized = [number for number, message in enumerate(self.messages) if message.size]
        if not sized:
            return self.messages
        between = self.messages[sized[0] : sized[-1] + 1]
        if len(between) <= self.output_len:
            return between
        return [message for message in between if message.size]


def _shares(messages: Sequence[TokenMessage], output_len: int) -> list[float]:
    """Tokens of each message: as stated, else one each and the rest by characters."""
    said = [message.tokens or 0 for message in messages]
    totals = [0, *(message.total or 0 for message in messages)]
    grown = [after - before for before, after in pairwise(totals)]
    for counts in (said, grown):
        if min(counts) > 0 and sum(counts) == output_len:
            return list(map(float, counts))
    least, sizes = min(1.0, output_len / len(messages)), [max(1, each.size) for each in messages]
    more = (output_len - least * len(messages)) / sum(sizes)
    return [least + more * size for size in sizes]


class Backend(Protocol):
    """A connection to a service, for one event loop."""

    async def send(self, request: SampleRequest, request_id: str) -> RequestOutput:
        """Send a request and wait for its end; a failure is a value of the output."""

    async def close(self) -> None:
        """Close the connection."""


class GrpcBackend(Backend):
    """NanoCP's gRPC API."""

    def __init__(
        self, target: str, sampling: Mapping[str, Any], api_key: str = "", ca: Path | None = None
    ) -> None:
        """target: host:port; sampling: options of nanocp.client.Sampling; ca: see AsyncClient."""
        self._client = AsyncClient(target, api_key, ca=ca)
        self._sampling = dict(sampling)

    async def send(self, request: SampleRequest, request_id: str) -> RequestOutput:
        output = RequestOutput(request.prompt_len, time.perf_counter())
        try:
            chunks = self._client.generate(
                request.prompt,
                request_id=request_id,
                max_tokens=request.output_len,
                **self._sampling,
            )
            async for chunk in chunks:
                if num_tokens := len(chunk.token_ids):
                    output.messages.append(TokenMessage(time.perf_counter(), 1, num_tokens))
                    output.output_len += num_tokens
                    output.text += chunk.text
                output.is_whole |= chunk.finish is not None
        except (ServiceError, ValueError, TypeError) as error:
            output.error = str(error)
        except Exception as error:  # An odd answer is one failed request, whatever is odd.
            output.error = f"{type(error).__name__}: {error}"
        output.end()
        return output

    async def close(self) -> None:
        await self._client.close()


class OpenAIBackend(Backend):
    """Completions or chat completions over HTTP, streamed."""

    def __init__(
        self,
        base_url: str,
        endpoint: str,
        model: str | None,
        is_chat: bool,
        body: Mapping[str, Any],
        headers: Mapping[str, str],
        ssl: SSLContext | None = None,
    ) -> None:
        """body: added to every request's; model: None takes the first that the server lists."""
        self._url = base_url.rstrip("/") + endpoint
        self._base_url = base_url.rstrip("/")
        self._model = model
        self._is_chat = is_chat
        self._body = dict(body)
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60, ssl=ssl or True)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, headers=dict(headers)
        )

    async def first_model(self) -> str:
        """The model that requests name.

        Raises ValueError if the server does not answer or lists none.
        """
        if self._model is not None:
            return self._model
        url, timeout = f"{self._base_url}/v1/models", aiohttp.ClientTimeout(total=30)
        try:
            async with self._session.get(url, timeout=timeout) as response:
                response.raise_for_status()
                self._model = str((await response.json())["data"][0]["id"])
        except aiohttp.ClientConnectionError as error:
            raise ValueError(f"no service answers at {self._base_url} ({error})") from error
        except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
            if isinstance(error, aiohttp.ClientResponseError) and error.status == 401:
                raise ValueError(
                    f"{self._base_url} asks for an API key: set OPENAI_API_KEY to one that it "
                    "accepts"
                ) from error
            raise ValueError(f"no model is listed at {url} ({error}); give --model") from error
        return self._model

    async def send(self, request: SampleRequest, request_id: str) -> RequestOutput:
        body = {
            "model": await self.first_model(),
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._prompt(request),
            **self._body,
        }
        output = RequestOutput(request.prompt_len, time.perf_counter())
        try:
            async with self._session.post(
                self._url, json=body, headers={"x-request-id": request_id}
            ) as response:
                if response.status != 200:
                    said = (await response.read()).decode("utf-8", "replace")
                    output.error = f"status {response.status}: {said[:_MAX_ERROR_CHARACTERS]}"
                    return output
                await self._take_all(response, output)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            output.error = f"{type(error).__name__}: {error}"
        except Exception as error:  # An odd answer is one failed request, whatever is odd.
            said = f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARACTERS]
            output.error = f"an event of the answer is no chunk ({said})"
        output.end()
        return output

    async def close(self) -> None:
        await self._session.close()

    def _prompt(self, request: SampleRequest) -> dict[str, Any]:
        if not self._is_chat:
            prompt = request.prompt if isinstance(request.prompt, str) else list(request.prompt)
            return {"prompt": prompt, "max_tokens": request.output_len}
        assert isinstance(request.prompt, str), (
            "chat completions take texts; the dataset's token ids must be decoded before"
        )
        messages = [{"role": "user", "content": request.prompt}]
        return {"messages": messages, "max_completion_tokens": request.output_len}

    async def _take_all(self, response: aiohttp.ClientResponse, output: RequestOutput) -> None:
        events = Events()
        async for event in events.of(response.content):
            if event is None:
                output.is_whole = True
                return
            # vLLM's earlier form of an error is the object itself.
            if event.get("error") or "error" in (event.get("object"), event.get("type")):
                output.error = str(event.get("error") or event)[:_MAX_ERROR_CHARACTERS]
                return
            self._take(event, output)
        if not output.is_whole and events.stray:
            said = events.stray[:_MAX_ERROR_CHARACTERS].decode("utf-8", "replace")
            output.error = f"the answer, of type {response.content_type}, is no stream: {said}"

    def _take(self, event: dict[str, Any], output: RequestOutput) -> None:
        total, before = None, output.output_len
        if usage := event.get("usage"):
            total = output.output_len = _count(usage.get("completion_tokens"))
            output.prompt_len = _count(usage.get("prompt_tokens")) or output.prompt_len
        counts = total is not None and output.has_usage
        output.has_usage |= total is not None
        for choice in event.get("choices") or ():
            is_last = bool(choice.get("finish_reason"))
            if error := choice.get("error") or choice.get("finish_reason") == "error":
                output.error = f"a choice ended in an error: {error}"[:_MAX_ERROR_CHARACTERS]
            output.is_whole |= is_last
            delta = (choice.get("delta") or {}) if self._is_chat else {"text": choice.get("text")}
            text, tokens = _text(delta), _num_tokens(choice)
            output.text += text
            # A token may have no text of its own yet. An event with only the role, or only the
            # finish reason, brings no token.
            grows = bool(tokens) or (counts and output.output_len > before)
            size = len(text) or int(grows)
            if size or not (is_last or "role" in delta or not delta):
                output.messages.append(TokenMessage(time.perf_counter(), size, tokens, total))


def _count(value: Any) -> int:
    if not isinstance(value or 0, int) or not 0 <= (value or 0) < 1 << 53:
        raise ValueError(f"usage has {str(value)[:40]} tokens")
    return value or 0


def _num_tokens(choice: Mapping[str, Any]) -> int | None:
    logprobs = choice.get("logprobs") or {}
    for named in (choice.get("token_ids"), logprobs.get("tokens"), logprobs.get("content")):
        if named:
            return len(named)
    return None


def _text(value: Any) -> str:
    """All text of a delta, also reasoning, refusals and calls."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(map(_text, value))
    if not isinstance(value, dict):
        return ""
    texts = {key: _text(inner) for key, inner in value.items() if key not in _NO_TEXT}
    # Some servers give their reasoning by several names.
    reasoning = [text for key, text in texts.items() if text and key.startswith("reasoning")]
    others = [text for key, text in texts.items() if not key.startswith("reasoning")]
    return "".join([*reasoning[:1], *others])


class Events:
    """Incremental parser of the JSON objects in a server-sent event stream."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._data: list[bytes] = []
        self._error: ValueError | None = None
        self.stray = b""
        """The last line that is not part of such a stream."""

    async def of(self, content: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any] | None]:
        """The events in order; None for [DONE].

        Raises ValueError, TypeError or RecursionError for one that is no JSON object.
        """
        async for chunk in content.iter_any():
            for event in self._add(chunk):
                yield event
        for event in self._add(b"\n\n"):  # The last line may have no end.
            yield event

    def _add(self, chunk: bytes) -> Iterator[dict[str, Any] | None]:
        *lines, rest = chunk.split(b"\n")
        for line in lines:
            whole, self._pieces = b"".join([*self._pieces, line]), []
            yield from self._line(whole.rstrip(b"\r"))
        self._pieces.append(rest)

    def _line(self, line: bytes) -> Iterator[dict[str, Any] | None]:
        if line.startswith(b"data:"):
            self._data.append(line[5:].strip())
            data = b"\n".join(self._data)
            try:
                event = {} if data == b"[DONE]" else json.loads(data)
            except ValueError as error:  # An event may have several lines.
                self._error = error
                return
            if not isinstance(event, dict):
                raise TypeError(f"it is {str(event)[:40]}")
            self._data, self._error = [], None
            yield event if data != b"[DONE]" else None
        elif not line and self._error is not None:
            raise self._error
        elif line and line.partition(b":")[0] not in (b"", b"event", b"id", b"retry"):
            self.stray = line
