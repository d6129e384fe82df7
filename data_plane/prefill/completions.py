"""One prompt computed by a vLLM server: a POST to /v1/completions that can be cancelled."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from data_plane.prefill.connector.ticket import KEY, EngineTicket

_MAX_MESSAGE_CHARACTERS = 300


class EngineOutcome(Enum):
    """The end of a prompt at an engine."""

    SENT = "its pages are on their way"
    BUSY = "the engine takes no more now"
    RESTARTED = "the engine is another process than the one that was probed"
    REFUSED = "the engine refuses this prompt"
    MISMATCH = "the engine computes or writes other KV, or does not know our key"
    FAILED = "the engine failed"


class EngineAnswer(NamedTuple):
    """An outcome and its reason."""

    outcome: EngineOutcome
    message: str = ""
    engine: str = ""
    """The engine's process, if its pages are on their way."""


_REFUSALS = {
    "busy": EngineOutcome.BUSY,
    "restarted": EngineOutcome.RESTARTED,
    "refused": EngineOutcome.MISMATCH,
}


class EngineCompletion:
    """One POST; `run` blocks, `cancel` ends it from another thread."""

    def __init__(
        self,
        url: str,
        token_ids: Sequence[int],
        ticket: EngineTicket,
        *,
        api_key: str = "",
        salt: bytes = b"",
    ) -> None:
        """api_key: the engine's --api-key, if any. salt: see PrefillRequest."""
        self._url = urlsplit(url)
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        # No token is taken from the engine: it must sample one, which nobody reads.
        self._body = json.dumps(
            {
                "prompt": list(token_ids),
                "max_tokens": 1,
                "temperature": 0,
                "kv_transfer_params": ticket.to_params(),
                "cache_salt": salt.hex() or None,
            }
        )
        self._lock = threading.Lock()
        self._connection: HTTPConnection | None = None
        self._is_cancelled = False

    def run(self) -> EngineAnswer:
        """Send the prompt and wait until the engine has computed it, or `cancel`."""
        kind = HTTPSConnection if self._url.scheme == "https" else HTTPConnection
        assert self._url.hostname is not None
        connection = kind(self._url.hostname, self._url.port)
        try:
            connection.connect()
            with self._lock:
                self._connection = connection
                if self._is_cancelled:
                    return EngineAnswer(EngineOutcome.FAILED, "it was cancelled")
            connection.request("POST", "/v1/completions", self._body, self._headers)
            response = connection.getresponse()
            return _answer(response.status, response.read())
        except (OSError, HTTPException) as error:
            return EngineAnswer(EngineOutcome.FAILED, f"{type(error).__name__}: {error}")
        finally:
            with self._lock:
                self._connection = None
            connection.close()

    def cancel(self) -> None:
        """End the connection, so the engine aborts the prompt. Idempotent."""
        with self._lock:
            self._is_cancelled = True
            if self._connection is not None and self._connection.sock is not None:
                with suppress(OSError):
                    self._connection.sock.shutdown(socket.SHUT_RDWR)


def _answer(status: int, body: bytes) -> EngineAnswer:
    said = body.decode(errors="replace")[:_MAX_MESSAGE_CHARACTERS]
    if status in (429, 503):
        return EngineAnswer(EngineOutcome.BUSY, f"HTTP {status}: {said}")
    if status in (401, 403):
        return EngineAnswer(
            EngineOutcome.MISMATCH,
            f"HTTP {status}: it asks for its API key: set NANOCP_PREFILL__API_KEY to what vLLM has "
            "as --api-key",
        )
    if status == 404:
        sentence = "HTTP 404: what answers there has no /v1/completions, so it is no vLLM"
        return EngineAnswer(EngineOutcome.FAILED, sentence)
    if status == 400:
        return EngineAnswer(EngineOutcome.REFUSED, said)
    if status != 200:
        return EngineAnswer(EngineOutcome.FAILED, f"HTTP {status}: {said}")
    try:
        params: Any = json.loads(body).get("kv_transfer_params") or {}
    except (ValueError, AttributeError):
        return EngineAnswer(EngineOutcome.FAILED, f"it answered no JSON: {said}")
    answer = params.get(KEY)
    if not answer:
        return EngineAnswer(
            EngineOutcome.MISMATCH,
            "it computes prompts but sends no pages: start vLLM with the flags that "
            "`nanocp prefill-flags` prints",
        )
    for kind, outcome in _REFUSALS.items():
        if kind in answer:
            return EngineAnswer(outcome, str(answer[kind]))
    return EngineAnswer(EngineOutcome.SENT, engine=str(answer.get("engine", "")))
