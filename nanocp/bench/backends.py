"""How one request is sent and timed: NanoCP's gRPC API, or any OpenAI endpoint.

Enters: a request. Leaves: what came back and when; a failure is a value with its sentence.
Does not know: rates, reports.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from ssl import SSLContext
from typing import Any, Protocol

import aiohttp

from nanocp.bench.dataset import SampleRequest
from nanocp.client import AsyncClient, ServiceError

_TIMEOUT_S = 6 * 60 * 60
_MAX_ERROR_CHARACTERS = 500


@dataclass(slots=True)
class RequestOutput:
    """What came back for one request; times are seconds of time.perf_counter."""

    prompt_len: int
    start_s: float
    success: bool = False
    output_len: int = 0
    """Tokens of the output."""
    text: str = ""
    latency_s: float = 0.0
    ttft_s: float = 0.0
    itl_s: list[float] = field(default_factory=list)
    """Times from message to message; a message may bring several tokens."""
    client_queue_s: float = 0.0
    """Time that the request waited in the client for others to end (--max-concurrency)."""
    error: str = ""
    is_whole: bool = False
    """The service said that this is the end, by a finish reason or otherwise."""
    _last_s: float = 0.0

    def message(self) -> None:
        """Note that another message with tokens has arrived."""
        now_s = time.perf_counter()
        if self._last_s:
            self.itl_s.append(now_s - self._last_s)
        else:
            self.ttft_s = now_s - self.start_s
        self._last_s = now_s

    def end(self) -> None:
        """Note that the request is complete; vLLM too counts to the last message with tokens."""
        if self.output_len and not self._last_s:
            self.message()  # All tokens came with the end.
        self.success = self.is_whole and bool(self._last_s)
        self.latency_s = (self._last_s or time.perf_counter()) - self.start_s
        if not self._last_s:
            self.error = "the request ended without a token"
        elif not self.is_whole:
            self.error = "the answer broke off: it has no finish reason"


class Backend(Protocol):
    """A connection to a service, for one event loop."""

    async def send(self, request: SampleRequest, request_id: str) -> RequestOutput:
        """Send a request and wait for its end; a failure is a value of the output."""

    async def close(self) -> None:
        """Drop the connection."""


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
                if chunk.token_ids:
                    output.message()
                    output.output_len += len(chunk.token_ids)
                    output.text += chunk.text
                output.is_whole |= chunk.finish is not None
            output.end()
        except (ServiceError, ValueError, TypeError) as error:
            output.error = str(error)
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

        Raises ValueError with a sentence if the server does not answer or lists none.
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
                    said = (await response.text())[:_MAX_ERROR_CHARACTERS]
                    output.error = f"status {response.status}: {said}"
                    return output
                num_messages = 0
                async for event in _events(response):
                    if event is None:
                        output.is_whole = True
                        break
                    # vLLM's earlier form of an error is the object itself.
                    if event.get("error") or event.get("object") == "error":
                        output.error = str(event.get("error") or event)[:_MAX_ERROR_CHARACTERS]
                        return output
                    num_messages += self._take(event, output)
                output.output_len = output.output_len or num_messages
                output.end()
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            output.error = f"{type(error).__name__}: {error}"
        except (AttributeError, LookupError, TypeError) as error:
            output.error = f"an event of the answer is no chunk ({type(error).__name__}: {error})"
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

    def _take(self, event: dict[str, Any], output: RequestOutput) -> int:
        """Note one event; returns 1 if it brought tokens, else 0."""
        if usage := event.get("usage"):
            output.output_len = int(usage.get("completion_tokens") or 0)
            output.prompt_len = int(usage.get("prompt_tokens") or output.prompt_len)
        choices = event.get("choices")
        if not choices:
            return 0
        output.is_whole |= bool(choices[0].get("finish_reason"))
        delta = choices[0].get("delta", {}) if self._is_chat else choices[0]
        text = (
            delta.get("content" if self._is_chat else "text")
            or delta.get("reasoning_content")
            or ""
        )
        # A token may have no text of its own yet. An event with only the role, or only the finish
        # reason, brings no token.
        if not text and (choices[0].get("finish_reason") or "role" in delta):
            return 0
        output.message()
        output.text += text
        return 1


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any] | None]:
    """The JSON objects of a server-sent event stream, and None for [DONE]."""
    async for line in response.content:
        if line.startswith(b"data:"):
            data = line[5:].strip()
            yield None if data == b"[DONE]" else json.loads(data)
