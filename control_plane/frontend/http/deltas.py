"""The output of one call as it comes: all its prompts and their choices, in one stream.

Enters: ClientRequests. Leaves: what is new of each choice, numbered over all prompts. Does not
know: JSON, server-sent events.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Literal

from control_plane.frontend.client_request import ClientRequest
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
    """Log probabilities of the prompt from its second token on, in the choice's first delta, if the
    request asks for them."""
    token_ids: Sequence[int] = ()
    text: str = ""
    logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: FinishWord | None = None
    """Why the choice ended, in its last delta; else None."""
    stop_reason: int | str | None = None
    num_cached: int = 0
    """Tokens of the prompt whose KV was in the cluster."""
    finish: ChoiceFinish | None = None
    """How the choice ended, and its placement: in its last delta, unless it was aborted."""
    text_before: str = ""
    """The text that a client which resumes has already, in the choice's first delta."""


async def deltas(
    open_requests: OpenRequests, requests: Sequence[ClientRequest]
) -> AsyncGenerator[Delta, None]:
    """Submit the requests and yield what they generate.

    Closing the generator aborts what has not ended. Raises RequestError, before the first delta if
    a request cannot be served.
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
    """first: number of the prompt's first choice."""
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
    """All streams in one, as they come.

    Takes one delta at a time, so that every stream sees a slow reader as slow.
    """
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
