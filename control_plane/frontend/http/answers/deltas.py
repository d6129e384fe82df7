"""The output of one call as it comes, with all prompts and choices in one stream, and its usage."""

from __future__ import annotations

import asyncio
import codecs
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

from control_plane.frontend.client_request import ClientRequest
from control_plane.frontend.client_stream import DraftCounts
from control_plane.frontend.http.answers.response_bodies import (
    CallMetrics,
    CompletionTokensDetails,
    PromptTokensDetails,
    SpeculativeDecoding,
    Usage,
)
from control_plane.frontend.http.protocol import StreamOptions
from control_plane.frontend.http.tools.forced_calls import Parser
from control_plane.frontend.open_requests import (
    ChoiceFinish,
    OpenRequest,
    OpenRequests,
    RequestError,
)
from nanocp.values.plan import FinishReason
from nanocp.values.sampling import TokenLogprobs

FinishWord = Literal["stop", "length", "abort"]
_WORDS: dict[FinishReason, FinishWord] = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class Delta:
    """New output of one choice."""

    index: int
    """Number of the choice: prompt * n + its number among the prompt's choices."""
    prompt: int
    """Number of the prompt among the call's prompts."""
    prompt_ids: Sequence[int]
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    """Log probabilities of the prompt from token 2 on, in the choice's first delta."""
    token_ids: Sequence[int] = ()
    text: str = ""
    logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: FinishWord | None = None
    """In the choice's last delta: the reason for its end."""
    stop_reason: int | str | None = None
    num_cached: int = 0
    """Prompt tokens whose KV was in the cluster."""
    finish: ChoiceFinish | None = None
    """In the choice's last delta, unless aborted: its end and placement."""
    text_before: str = ""
    """In the choice's first delta: the text that a resuming client already has."""


async def deltas(
    open_requests: OpenRequests, requests: Sequence[ClientRequest]
) -> AsyncGenerator[Delta, None]:
    """Submit the requests and yield their output; closing the generator aborts them.

    Raises RequestError, before the first delta if a request cannot be served.
    """
    open_requests.check_number(len(requests), requests[0].n)
    async with AsyncExitStack() as stack:
        begun = [
            await stack.enter_async_context(open_requests.begin(request)) for request in requests
        ]
        async for delta in _merged(
            [
                _of_prompt(open_request, prompt, prompt * requests[0].n)
                for prompt, open_request in enumerate(begun)
            ]
        ):
            yield delta


async def _of_prompt(open_request: OpenRequest, prompt: int, first: int) -> AsyncIterator[Delta]:
    unfinished = dict.fromkeys(open_request.texts_before)
    silent = dict(unfinished)
    try:
        prompt_logprobs = await open_request.prompt_logprobs()
        async for output in open_request:
            finish = output.finish
            if finish:
                del unfinished[output.index]
            is_first = silent.pop(output.index, output) is None
            yield Delta(
                first + output.index,
                prompt,
                open_request.prompt_ids,
                prompt_logprobs if is_first else (),
                output.token_ids,
                output.text,
                output.logprobs,
                _WORDS[finish.reason] if finish else None,
                finish.stop_reason if finish else None,
                open_request.num_cached,
                finish,
                open_request.texts_before[output.index] if is_first else "",
            )
    except RequestError as error:
        if error.reason is not FinishReason.ABORTED:
            raise
        # As in vLLM: it was ended on purpose, and its output so far is a response.
        for choice in unfinished:
            yield Delta(first + choice, prompt, open_request.prompt_ids, finish_reason="abort")


async def _merged(streams: Sequence[AsyncIterator[Delta]]) -> AsyncIterator[Delta]:
    """Take one delta at a time, so that every stream sees a slow reader as slow."""
    if len(streams) == 1:
        async for delta in streams[0]:
            yield delta
        return
    queue: asyncio.Queue[Delta | Exception | None] = asyncio.Queue(maxsize=1)

    async def pump(stream: AsyncIterator[Delta]) -> None:
        try:
            async for delta in stream:
                await queue.put(delta)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class UsageCount:
    """The usage of one call."""

    def __init__(self, options: StreamOptions | None, token_name: Callable[[int], bytes]) -> None:
        """token_name: returns the UTF-8 of a token, for a special one that of its name."""
        self._token_name = token_name
        self._reasoning: dict[int, ReasoningCount] = {}
        self._options = options or StreamOptions()
        self._prompts: dict[int, tuple[int, int]] = {}
        """(tokens, cached tokens) of each prompt."""
        self._choices: dict[int, int] = {}
        self._drafts: dict[int, DraftCounts] = {}

    def begin_reasoning(self, index: int, parser: Parser, num_before: int) -> None:
        """Count the choice's reasoning tokens from now on.

        parser: takes its text before the delta is added. num_before: its earlier characters.
        """
        self._reasoning[index] = ReasoningCount(parser, num_before, self._token_name)

    def add(self, delta: Delta) -> bool:
        """Count the delta; True if it is its choice's first."""
        is_first = delta.index not in self._choices
        self._prompts[delta.prompt] = len(delta.prompt_ids), delta.num_cached
        self._choices[delta.index] = self._choices.get(delta.index, 0) + len(delta.token_ids)
        if reasoning := self._reasoning.get(delta.index):
            reasoning.add(delta.token_ids)
        if delta.finish and delta.finish.drafts.num_drafts:
            self._drafts[delta.index] = delta.finish.drafts
        return is_first

    @property
    def metrics(self) -> dict[str, Any]:
        """The field `metrics`; empty if no step had drafts."""
        if not self._drafts:
            return {}
        counts = [each.num_steps_by_accepted for each in self._drafts.values()]
        steps = [sum(of_choices) for of_choices in zip_longest(*counts, fillvalue=0)]
        num_drafts = sum(each.num_drafts for each in self._drafts.values())
        num_accepted = sum(index * count for index, count in enumerate(steps))
        found = SpeculativeDecoding(
            mean_acceptance_length=1 + num_accepted / sum(steps),
            draft_acceptance_rate=num_accepted / num_drafts,
            acceptance_histogram=steps,
            num_spec_steps=sum(steps),
            num_accepted_draft_tokens=num_accepted,
            num_draft_tokens=num_drafts,
            num_spec_tokens=len(steps) - 1,
        )
        return {"metrics": CallMetrics(speculative_decoding=found)}

    @property
    def total(self) -> Usage:
        """The usage of all choices, and of each prompt once."""
        prompts = self._prompts.values()
        return _usage(
            sum(tokens for tokens, _ in prompts),
            sum(cached for _, cached in prompts),
            sum(self._choices.values()),
            sum(one.num_tokens for one in self._reasoning.values()) if self._reasoning else None,
        )

    def in_chunk(self, delta: Delta) -> dict[str, Any]:
        """Return the field `usage` of a chunk: that of the delta's choice.

        Null, as at OpenAI, if only the last chunk has the usage; empty if none has.
        """
        if not self._options.include_usage:
            return {}
        if not self._options.continuous_usage_stats:
            return {"usage": None}
        reasoning = self._reasoning.get(delta.index)
        usage = _usage(
            len(delta.prompt_ids),
            delta.num_cached,
            self._choices[delta.index],
            reasoning.num_tokens if reasoning else None,
        )
        return {"usage": usage}

    def in_last_chunk(self) -> list[Usage]:
        """Return the usage for a last chunk, if requested."""
        return [self.total] if self._options.include_usage else []


class ReasoningCount:
    """Counts one choice's reasoning tokens, with the end marker."""

    def __init__(self, parser: Parser, num_before: int, token_name: Callable[[int], bytes]) -> None:
        self._parser = parser
        self._token_name = token_name
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_chars = num_before
        self._open: deque[int] = deque()
        """Offsets of tokens whose text the parser may not have classified."""
        self.num_tokens = 0

    def add(self, token_ids: Iterable[int]) -> None:
        """Add generated tokens, before or after the parser takes their text."""
        for token_id in token_ids:
            self._open.append(self._num_chars)
            self._num_chars += len(self._decoder.decode(self._token_name(token_id)))
        begin, end = self._parser.reasoning
        while self._open and self._open[0] < end:
            self.num_tokens += self._open.popleft() >= begin


def _usage(
    prompt_tokens: int, cached_tokens: int, completion_tokens: int, reasoning_tokens: int | None
) -> Usage:
    details: dict[str, Any] = {}
    if reasoning_tokens is not None:
        of_reasoning = CompletionTokensDetails(reasoning_tokens=reasoning_tokens)
        details = {"completion_tokens_details": of_reasoning}
    return Usage(
        **details,
        prompt_tokens=prompt_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        completion_tokens=completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
    )
