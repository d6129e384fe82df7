"""Tokens on their way from an instance to the front ends, one stream to each.

A slow or lost front end never stalls the step: its tokens are dropped, and their requests named.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, Full, Queue

import grpc

from nanocp.config.limits import LimitsConfig
from nanocp.values.sampling import (
    PromptLogprobs,
    PromptPart,
    Token,
    TokenBatch,
    TokenLogprobs,
)
from nanocp.wire.keepalive import keepalive_options
from nanocp.wire.members import TOKEN_SINK, TOKENS

logger = logging.getLogger(__name__)

_CHANNEL_OPTIONS = (
    *keepalive_options(every_ms=10_000),
    ("grpc.http2.max_pings_without_data", 0),
)
_MAX_BATCHES = 4096
"""For one front end, in batches of a step."""
_MAX_UNSURE_TOKENS = 65_536
"""Tokens that may be on their way when a stream breaks."""
_LAST_WORD_S = 2.0


class TokenStreams:
    """The streams of one instance; only the decode thread uses them."""

    def __init__(
        self,
        instance: int,
        limits: LimitsConfig,
        metadata: Sequence[tuple[str, str]] = (),
        broke: Callable[[], None] = lambda: None,
    ) -> None:
        """metadata: each call's, with the member's name and secret.

        broke: called from any thread when a stream has ended, to cause a `send`.
        """
        self._instance = instance
        self._limits = limits
        self._metadata = metadata
        self._broke = broke
        self._streams: dict[str, _Stream] = {}
        self._lost: set[int] = set()

    def send(self, tokens: Sequence[Token]) -> set[int]:
        """Queue a step's tokens (or none), each for its front end. Never blocks, never raises.

        Returns the requests that may have lost tokens.
        """
        self._lost.update(*(stream.take_unsure() for stream in self._streams.values()))
        by_front_end: dict[str, list[Token]] = {}
        for token in tokens:
            by_front_end.setdefault(token.front_end, []).append(token)
        for front_end, batch in by_front_end.items():
            stream = self._stream(front_end)
            if not stream.put(TokenBatch(self._instance, tuple(batch))):
                if not stream.has_dropped:
                    logger.warning("%s takes no tokens; they are dropped", front_end)
                    stream.has_dropped = True
                self._lost |= stream.take_unsure() | {token.request_id for token in batch}
        lost, self._lost = self._lost, set()
        return lost

    def prompt_logprobs(
        self, request_id: int, num_top: int, front_end: str, lost: Callable[[str], None]
    ) -> PromptLogprobs:
        """Return a prompt's sink of log probabilities, which go to the front end; never blocks."""
        first = 1

        def report(logprobs: Sequence[TokenLogprobs]) -> None:
            nonlocal first
            prompt = PromptPart(request_id, first, tuple(logprobs))
            first += len(logprobs)
            if not self._stream(front_end).put(TokenBatch(prompts=(prompt,))):
                lost(f"{front_end} does not take the prompt's log probabilities")

        return PromptLogprobs(num_top, report)

    def close(self) -> None:
        """Send the queued tokens, for a bounded time, and end the streams. Idempotent."""
        while self._streams:
            self._streams.popitem()[1].close()

    def _stream(self, front_end: str) -> _Stream:
        stream = self._streams.get(front_end)
        if stream is not None and stream.may_be_replaced():
            self._lost |= stream.take_unsure()  # It may have broken just now.
            stream.abandon()
            stream = None
        if stream is None:
            stream = self._streams[front_end] = _Stream(
                front_end, self._limits, self._metadata, self._broke
            )
        return stream


class _Stream:
    def __init__(
        self,
        front_end: str,
        limits: LimitsConfig,
        metadata: Sequence[tuple[str, str]],
        broke: Callable[[], None],
    ) -> None:
        self.has_dropped = False
        self._unsure: deque[int] = deque(maxlen=_MAX_UNSURE_TOKENS)
        self._retry_s = limits.retry_ms / 1000
        self._opened_s = time.monotonic()
        self._batches: Queue[TokenBatch | None] = Queue(_MAX_BATCHES)
        self._channel = grpc.insecure_channel(front_end, options=_CHANNEL_OPTIONS)
        deliver = self._channel.stream_unary(f"/{TOKEN_SINK}/Deliver", TOKENS.encode)
        self._call = deliver.future(iter(self._batches.get, None), metadata=metadata)
        self._call.add_done_callback(lambda _: broke())

    def put(self, batch: TokenBatch) -> bool:
        """Queue the batch; False if the front end is gone or too slow."""
        if self._call.done():
            return False
        try:
            self._batches.put_nowait(batch)
        except Full:
            return False
        self._unsure.extend(token.request_id for token in batch.tokens)
        return True

    def take_unsure(self) -> set[int]:
        """Return the requests whose tokens a broken stream may have lost."""
        if not self._call.done():
            return set()
        unsure = set(self._unsure)
        self._unsure.clear()
        return unsure

    def may_be_replaced(self) -> bool:
        """True if another call may be tried."""
        return bool(self._call.done()) and time.monotonic() - self._opened_s > self._retry_s

    def abandon(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                self._batches.get_nowait()
        self._batches.put_nowait(None)
        self._channel.close()

    def close(self) -> None:
        try:
            self._batches.put_nowait(None)
            self._call.result(_LAST_WORD_S)
        except (Full, grpc.RpcError, grpc.FutureTimeoutError) as error:
            logger.debug("the last tokens were not taken: %s", error)
        self._channel.close()
