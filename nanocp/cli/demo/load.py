"""Clients of every kind: each asks, reads to the end, and asks again in time."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp

from nanocp.client import AsyncClient, ServiceError
from nanocp.values.sampling import SamplingParams

APIS = ("grpc", "http")
KINDS = ("greedy", "sampled", "penalised", "three", "shared", "long")
"""Kinds of requests: `three` has three choices, `shared` a common beginning, `long` nearly fills
the model's length."""
_MAX_SHORT_PROMPT = 300
_SHARED_LEN = 200
_OUTPUT_LENS = (32, 160)
_LONG_SHARE = 0.7
_NUM_CHOICES = 3
_RESUME_S = 0.3


class _TryAgain(ValueError):
    """The service asks for a retry."""


@dataclass(frozen=True, slots=True)
class Apis:
    """Both APIs of a service, and its properties."""

    client: AsyncClient
    http: aiohttp.ClientSession
    http_urls: Sequence[str]
    vocab_size: int
    max_model_len: int
    timeout_s: float
    default_sampling: Mapping[str, Any]
    """Default sampling options of the service."""


@dataclass(slots=True)
class Asked:
    """One request, and what came of it."""

    kind: str
    api: str
    prompt_ids: list[int]
    options: dict[str, Any]
    num_choices: int = 1
    outputs: list[list[int]] = field(default_factory=list)
    """The tokens of each choice."""
    arrivals_s: list[list[float]] = field(default_factory=list)
    """Arrival times of each choice's tokens, in seconds of time.monotonic."""
    error: str = ""
    """Empty if it did not fail."""
    default_sampling: Mapping[str, Any] = field(default_factory=dict)

    def params(self, choice: int) -> SamplingParams:
        """Sampling parameters of a choice."""
        seed = self.options["seed"] + choice
        return SamplingParams(**{**self.default_sampling, **self.options, "seed": seed})

    def gaps(self) -> Iterator[tuple[float, float]]:
        """(begin, end) between consecutive tokens, of every choice."""
        for arrivals in self.arrivals_s:
            yield from pairwise(arrivals)

    def take(self, choice: int, token_ids: Sequence[int]) -> None:
        """Note tokens that have just come."""
        self.outputs[choice] += token_ids
        self.arrivals_s[choice] += [time.monotonic()] * len(token_ids)


async def ask_for_ever(
    apis: Apis,
    number: int,
    seed: int,
    until_s: float,
    asked: list[Asked],
    ended: Callable[[Asked], None],
) -> None:
    """Ask until the time is over, and read the last answer to its end.

    number: of the client and its kind. asked: gets every request. ended: gets each finished one.
    """
    draw = random.Random(f"{seed} {number}")
    while time.monotonic() < until_s:
        request = _drawn(draw, apis, number, seed)
        asked.append(request)
        try:
            await _ask(apis, request)
        finally:
            ended(request)
        if request.error:
            await asyncio.sleep(1.0)  # a service that is gone must not be asked in a tight loop


def _drawn(draw: random.Random, apis: Apis, number: int, seed: int) -> Asked:
    kind = KINDS[number % len(KINDS)]
    name = APIS[(number + number // len(KINDS)) % len(APIS)]
    options: dict[str, Any] = {"max_tokens": draw.randint(*_OUTPUT_LENS), "ignore_eos": True}
    options |= {"temperature": 0.0, "seed": draw.getrandbits(31)}
    max_prompt = min(_MAX_SHORT_PROMPT, apis.max_model_len // 2)
    length = draw.randint(2, max_prompt)
    match kind:
        case "sampled" | "three":
            options["temperature"] = 0.9
        case "penalised":
            options["temperature"] = draw.choice([0.0, 0.7])
            options |= {"repetition_penalty": 1.1, "frequency_penalty": 0.4}
        case "long":
            length = draw.randint(max_prompt, int(_LONG_SHARE * apis.max_model_len))
    prompt_ids = _random_ids(draw, apis, length)
    if kind == "shared":
        prompt_ids = _random_ids(random.Random(seed), apis, _SHARED_LEN) + prompt_ids
    num_choices = _NUM_CHOICES if kind == "three" else 1
    request = Asked(kind, name, prompt_ids, options, num_choices)
    request.default_sampling = apis.default_sampling
    request.outputs = [[] for _ in range(num_choices)]
    request.arrivals_s = [[] for _ in range(num_choices)]
    return request


def _random_ids(draw: random.Random, apis: Apis, num: int) -> list[int]:
    return [draw.randrange(2, apis.vocab_size) for _ in range(num)]


async def _ask(apis: Apis, request: Asked) -> None:
    try:
        async with asyncio.timeout(apis.timeout_s):
            pieces = _by_grpc(apis, request) if request.api == "grpc" else _by_http(apis, request)
            async for choice, token_ids in pieces:
                request.take(choice, token_ids)
    except asyncio.CancelledError:
        request.error = "the service ended"
        raise
    except TimeoutError:
        request.error = f"it was not complete in {apis.timeout_s:.0f} s"
    except (ServiceError, aiohttp.ClientError, ValueError, LookupError) as error:
        request.error = f"{type(error).__name__}: {error}"
    counts, expected = [len(output) for output in request.outputs], request.options["max_tokens"]
    if not request.error and min(counts) < expected:
        request.error = f"{counts} tokens came of {expected}"


async def _by_grpc(apis: Apis, request: Asked) -> AsyncIterator[tuple[int, Sequence[int]]]:
    async for chunk in apis.client.generate(
        request.prompt_ids,
        n=request.num_choices,
        timeout_s=apis.timeout_s,
        **request.options,
    ):
        yield chunk.index, chunk.token_ids


async def _by_http(apis: Apis, request: Asked) -> AsyncIterator[tuple[int, Sequence[int]]]:
    body = {"prompt": request.prompt_ids, "n": request.num_choices, "stream": True}
    body |= {"return_token_ids": True, "request_id": uuid.uuid4().hex, **request.options}
    attempt = 0
    for url in itertools.cycle(apis.http_urls):
        try:
            async for piece in _one_call(apis, url, body):
                yield piece
            return
        except (aiohttp.ClientError, _TryAgain) as error:
            if len(apis.http_urls) == 1:
                raise
            attempt += not isinstance(error, aiohttp.ClientConnectorError)
        choices = [
            {"index": index, "output_ids": output}
            for index, output in enumerate(request.outputs)
            if len(output) < request.options["max_tokens"]
        ]
        if not choices:
            return
        if attempt:
            body["resume"] = {"attempt": attempt, "choices": choices}
        await asyncio.sleep(_RESUME_S)


async def _one_call(
    apis: Apis, url: str, body: Mapping[str, Any]
) -> AsyncIterator[tuple[int, Sequence[int]]]:
    """Tokens of one stream. Raises _TryAgain, as an error says that has status 503."""
    completions = f"{url}/v1/completions"
    async with apis.http.post(completions, json=body, read_bufsize=1 << 20) as answer:
        if answer.status != 200:
            kind = _TryAgain if answer.status == 503 else ValueError
            raise kind(f"status {answer.status}: {(await answer.text())[:300]}")
        async for line in answer.content:
            data = line.decode().removeprefix("data: ").strip()
            if not line.startswith(b"data: ") or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                kind = _TryAgain if event["error"]["code"] == 503 else ValueError
                raise kind(str(event["error"]))
            for choice in event["choices"]:
                yield choice["index"], choice["token_ids"] or ()
