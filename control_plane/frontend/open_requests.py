"""The core of a front end: client requests from validation to the last token."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from control_plane.frontend.client_request import ClientRequest, Resume
from control_plane.frontend.client_stream import Choice, ClientStream, DraftCounts
from control_plane.frontend.streams import ClientStreams
from control_plane.frontend.text.long_texts import in_thread
from control_plane.frontend.text.tokenizer import OutputText, Tokenizer
from control_plane.frontend.validation import ModelLimits, ValidRequest, check_shape, validated
from control_plane.observe.request_log import log_refused
from nanocp.values.plan import FinishReason, Placement
from nanocp.values.remote_blocks import RemoteBlocks
from nanocp.values.sampling import TokenLogprobs
from nanocp.values.sampling_fields import CONSTRAINTS

_LATE_PROMPT_LOGPROBS_S = 10.0
"""Longest wait after the first token for the prompt's log probabilities."""
_MAX_LOST = 3
"""Request fails after this many losses of its prompt's log probabilities."""


class RequestError(Exception):
    """The request cannot be served, or ended early, with a sentence for the client."""

    def __init__(self, reason: FinishReason, message: str) -> None:
        """reason: INVALID, REFUSED (no room), FAILED (not now), FATAL, EXPIRED or ABORTED."""
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class ChoiceFinish:
    """The end of one choice, and its placement then."""

    reason: FinishReason
    """STOP or LENGTH."""
    stop_reason: int | str | None
    """The stop token's id or the stop string; None for other ends."""
    generated_tokens: int
    cp_degree: int
    moe_binding: int
    kv_split: tuple[tuple[int, int], ...]
    """(instance, pages), ascending by instance."""
    drafts: DraftCounts


@dataclass(frozen=True, slots=True)
class ChoiceOutput:
    """New output of one choice. A client that reads slowly gets fewer, longer ones."""

    index: int
    """The choice's number, from 0 to n - 1."""
    token_ids: Sequence[int]
    text: str
    """Empty without a tokenizer."""
    logprobs: Sequence[TokenLogprobs]
    """Log probabilities of token_ids, if the request asks for them."""
    finish: ChoiceFinish | None
    """How the choice ended, in its last output; else None."""


class OpenRequest:
    """A submitted request. Iterate once over its outputs.

    Raises RequestError behind the last one if it fails.
    """

    def __init__(
        self,
        request_id: str,
        choices: Sequence[ClientStream],
        silent_eos_id: int | None,
        streams: ClientStreams,
        constraint_field: str = "",
    ) -> None:
        """silent_eos_id: the end of sequence that is no stop_reason.

        constraint_field: the endpoint's name, for errors.
        """
        self._streams = streams
        self.request_id = request_id
        """The id that the client gave, or that was made."""
        self.prompt_ids = choices[0].prompt_ids
        self.texts_before = {stream.choice.index: stream.choice.text_before for stream in choices}
        """Text that a resuming client has, by choice."""
        self._first = choices[0]
        self._open = {stream.choice.index: stream for stream in choices}
        self._changed = choices[0].changed
        self._silent_eos_id = silent_eos_id
        self._constraint_field = constraint_field
        self._outputs: deque[ChoiceOutput] = deque()
        self._error: RequestError | None = None

    def __aiter__(self) -> AsyncIterator[ChoiceOutput]:
        return self

    async def __anext__(self) -> ChoiceOutput:
        while not self._outputs:
            self._collect()
            if self._outputs:
                break
            if self._error is not None:
                raise self._error
            if not self._open:
                raise StopAsyncIteration
            await self._changed.wait()
        return self._outputs.popleft()

    @property
    def num_cached(self) -> int:
        """Cached prompt tokens, known after the first output."""
        return self._first.num_cached

    async def prompt_logprobs(self) -> Sequence[TokenLogprobs]:
        """Return the prompt's log probabilities, one for each token but the first, if requested.

        Call it before the first output. Raises RequestError if the request ends before.
        """
        received, asking, num_lost = self._first.prompt_logprobs, self._first, 0
        with ExitStack() as asked_again:
            while received is not None and len(received) < len(self.prompt_ids) - 1:
                streams = (*self._open.values(), asking)
                if ended := next((each.ended for each in streams if each.ended), None):
                    raise RequestError(ended.reason, ended.message)
                self._changed.clear()
                left_s = None
                if asking.times.first_token_s is not None:
                    left_s = asking.times.first_token_s + _LATE_PROMPT_LOGPROBS_S - time.monotonic()
                try:
                    async with asyncio.timeout(left_s):
                        await self._changed.wait()
                except TimeoutError:
                    num_lost += 1
                    if num_lost == _MAX_LOST:
                        sentence = "the log probabilities of the prompt were lost on their way"
                        raise RequestError(FinishReason.FAILED, sentence) from None
                    asking = self._streams.ask_again(self._first)
                    asked_again.callback(self._streams.give_up, asking)
        return received or ()

    def _collect(self) -> None:
        for index, stream in list(self._open.items()):
            token_ids, output = stream.take_new(), stream.output
            text = stream.choice.text.take_new() if stream.choice.text else ""
            finish = None
            if output.finish_reason is FinishReason.INVALID:
                sentence = (
                    f"{self._constraint_field} cannot be followed further than "
                    f"{len(output.ids) - 1} tokens: nothing may come next, or it costs too "
                    "much to find what may"
                )
                self._error = RequestError(FinishReason.INVALID, sentence)
                del self._open[index]
                continue
            if output.finish_reason is not None:
                text += stream.choice.text.flush() if stream.choice.text else ""
                finish = _finish(stream, output.finish_reason, self._silent_eos_id)
                del self._open[index]
            if token_ids or finish:
                self._outputs.append(
                    ChoiceOutput(index, token_ids, text, output.take_new_logprobs(), finish)
                )
            if stream.ended is not None:
                self._error = RequestError(stream.ended.reason, stream.ended.message)


class OpenRequests:
    """Every open request of this front end."""

    def __init__(
        self,
        streams: ClientStreams,
        limits: ModelLimits,
        tokenizer: Tokenizer | None,
        max_open: int,
    ) -> None:
        """max_open: most choices, with those that their clients stopped reading."""
        self.limits = limits
        self.tokenizer = tokenizer
        self._streams = streams
        self._max_open = max_open
        self.num_open = 0
        """Choices that have not ended, or that a client still reads."""
        self.closed_because = "the cluster is starting"
        """Reason for refusing requests; empty: none is refused."""
        self.idle = asyncio.Event()
        """Set while no request is open."""
        self.idle.set()

    @asynccontextmanager
    async def begin(self, request: ClientRequest) -> AsyncIterator[OpenRequest]:
        """Submit a request; leaving the context aborts it. Raises RequestError."""
        client_id = request.request_id or uuid.uuid4().hex
        try:
            self._check(request)
        except RequestError as error:
            log_refused(client_id, request.origin.endpoint, error.reason, str(error))
            raise
        self.num_open += request.n
        self.idle.clear()
        choices: Sequence[ClientStream] = ()
        try:
            try:
                choices = await self._submit(client_id, request)
            except RequestError as error:
                log_refused(client_id, request.origin.endpoint, error.reason, str(error))
                raise
            silent_eos_id = None if request.ignore_eos else self.limits.tokenizer_eos_id
            given = [name for name in CONSTRAINTS if getattr(request, name)]
            field = request.constraint_field or "".join(given)
            yield OpenRequest(client_id, choices, silent_eos_id, self._streams, field)
        finally:
            if choices:
                self._streams.client_gone(choices)
            self.num_open -= request.n
            if self.num_open == 0:
                self.idle.set()

    def refuse_blocks(self, blocks: RemoteBlocks) -> None:
        """Let an engine free blocks that no request reads; ignored before the first request."""
        if not self.closed_because or self.num_open:
            self._streams.refuse_blocks(blocks)

    def check_number(self, num_prompts: int, n: int) -> None:
        """Raise RequestError for a call with too many choices."""
        if num_prompts * n > self._max_open:
            prompts = f"prompt has {num_prompts} prompts, and " if num_prompts > 1 else ""
            raise RequestError(
                FinishReason.INVALID,
                f"{prompts}n is {n}; this cluster can hold and queue {self._max_open} choices, so "
                "there must be at most as many together",
            )

    def _check(self, request: ClientRequest) -> None:
        try:
            check_shape(request)
        except ValueError as error:
            raise RequestError(FinishReason.INVALID, str(error)) from error
        self.check_number(1, request.n)
        if self.num_open + request.n > self._max_open:
            sentence = (
                f"{self.num_open} requests are open; this cluster can hold and queue "
                f"{self._max_open}"
            )
            raise RequestError(FinishReason.REFUSED, sentence)

    async def _submit(self, client_id: str, request: ClientRequest) -> Sequence[ClientStream]:
        if not self.closed_because:
            try:
                # A text takes long to tokenize, which the streams of others would feel.
                text_len = len(request.prompt) if isinstance(request.prompt, str) else 0
                text_len += sum(map(len, request.bad_words))
                has_grammar = any(getattr(request, name) for name in CONSTRAINTS)
                joins = request.prompt_number > 0
                prompt_ids, choices = await in_thread(
                    text_len, has_grammar, self._validated, request
                )
                if not self.closed_because:  # It may have closed meanwhile.
                    timeout_ms = request.queue_timeout_ms
                    timeout_us = None if timeout_ms is None else timeout_ms * 1000
                    return self._streams.submit(
                        client_id, prompt_ids, choices, request.origin, timeout_us, joins
                    )
            except ValueError as error:
                raise RequestError(FinishReason.INVALID, str(error)) from error
        raise RequestError(FinishReason.FAILED, self.closed_because)

    def _validated(self, request: ClientRequest) -> tuple[Sequence[int], Sequence[Choice]]:
        valid = validated(request, self.limits, self.tokenizer)
        if request.resume is None:
            choices = [
                Choice(params, self._text(valid, request), index=index)
                for index, params in enumerate(valid.params)
            ]
        else:
            choices = list(self._resumed(request, request.resume, valid))
        # The choices share their prompt: one of them asks.
        choices[0] = replace(choices[0], prompt_logprobs=request.prompt_logprobs)
        return valid.prompt_ids, choices

    def _resumed(
        self, request: ClientRequest, resume: Resume, valid: ValidRequest
    ) -> Iterator[Choice]:
        for number, choice in enumerate(resume.choices):
            index, output_ids = choice.index, choice.output_ids
            text, before = self._text(valid, request), ""
            if text is not None:
                if any(map(text.feed, output_ids)):
                    raise ValueError(
                        f"resume.choices.{number}.output_ids has the stop string "
                        f"{text.stop_string!r}, so the choice has ended"
                    )
                before = text.take_new()
            yield Choice(valid.params[index], text, None, index, output_ids, before, resume.attempt)

    def _text(self, valid: ValidRequest, request: ClientRequest) -> OutputText | None:
        if self.tokenizer is None:
            return None
        contents = request.new_contents() if request.new_contents and request.stop else None
        least, skips = valid.params[0].min_tokens, request.skip_special_tokens
        return OutputText(self.tokenizer, valid.stop, least, skips, contents)


def _finish(stream: ClientStream, reason: FinishReason, silent_eos_id: int | None) -> ChoiceFinish:
    text, output = stream.choice.text, stream.output
    placement = stream.placement or Placement(stream.request_id, 0, 0, ())
    # The last generated token has no KV.
    kv_split = placement.kv_split(stream.prompt_len + max(len(output.ids) - 1, 0))
    stop_reason: int | str | None = text.stop_string if text else None
    if reason is FinishReason.STOP and stop_reason is None and output.ids[-1] != silent_eos_id:
        stop_reason = output.ids[-1]
    return ChoiceFinish(
        reason,
        stop_reason,
        len(output.ids),
        len(kv_split),
        placement.moe_binding,
        kv_split,
        output.drafts,
    )
