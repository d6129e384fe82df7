"""Messages and Responses against the same chat: times to the first token and between tokens.

Enters: models/tale on two instances. Leaves: a table, and an object for each endpoint. Does not
know: how an endpoint writes its events.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import httpx

from benchmarks.kit.bench import BenchRun, Claim, at_most, bench
from benchmarks.kit.service import ROOT
from nanocp.serve.process import serving

CONCURRENCY, NUM_TOKENS = 4, 64
MAX_RATIO = 1.05
"""Claim: a time of either endpoint over that of the same chat."""
TEXT = "Tell me a tale of a king and a frog. "
BODIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", "messages", {"max_tokens": NUM_TOKENS}),
    "messages": ("/v1/messages", "messages", {"max_tokens": NUM_TOKENS}),
    "responses": ("/v1/responses", "input", {"max_output_tokens": NUM_TOKENS, "store": False}),
}
"""By endpoint: path, the field of the messages, and other fields."""
_GREW = ('"content":"', "_delta", "output_text.delta")
"""Marks of an event that has text, in each endpoint's streams."""


@bench("Under a minute.")
def main(run: BenchRun) -> None:
    """Ask all endpoints in turn, and compare."""
    rounds, num_requests = (3, 16) if run.is_quick else (15, 48)
    with serving(ROOT / "models/tale", 2, {}, ray=False, http=True) as service:
        url = f"http://127.0.0.1:{service.http_port}"
        measured = asyncio.run(measure(url, run.track(range(rounds), "rounds"), num_requests))
    results = [summary(name, measured[name]) for name in BODIES]
    run.table(f"{CONCURRENCY} requests at a time, {NUM_TOKENS} tokens each", results)
    run.keep(*results)
    run.judge(claims_of(measured))


async def measure(
    url: str, rounds: Iterable[int], num_requests: int
) -> dict[str, list[dict[str, float]]]:
    """Return each round's medians of each endpoint, in milliseconds."""
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in BODIES}
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        for name in BODIES:
            await _round(client, name, -1, CONCURRENCY)
        for number in rounds:
            # Who is first changes, so that a drift of the machine meets all.
            names = [*BODIES][number % 3 :] + [*BODIES][: number % 3]
            for name in names:
                measured[name].append(await _round(client, name, number, num_requests))
    return measured


async def _round(
    client: httpx.AsyncClient, name: str, number: int, num_requests: int
) -> dict[str, float]:
    slots = asyncio.Semaphore(CONCURRENCY)

    async def one(index: int) -> list[float]:
        async with slots:
            return await _times(client, name, f"{number} {index}. {TEXT}")

    times = await asyncio.gather(*map(one, range(num_requests)))
    gaps = [after - before for each in times for before, after in pairwise(each[1:])]
    return {
        "ttft_ms": 1e3 * statistics.median(each[1] - each[0] for each in times),
        "itl_ms": 1e3 * statistics.mean(gaps),
    }


async def _times(client: httpx.AsyncClient, name: str, text: str) -> list[float]:
    """Return when the request was sent, and when each piece of text came."""
    path, field, fields = BODIES[name]
    message = {"role": "user", "content": text}
    body = {field: [message], "stream": True, "temperature": 0, **fields}
    times = [time.perf_counter()]
    async with client.stream("POST", path, content=json.dumps(body),
                             headers={"Content-Type": "application/json"}) as answer:  # fmt: skip
        if answer.status_code != 200:
            raise RuntimeError(f"{path} answers {answer.status_code}: {await answer.aread()!r}")
        async for line in answer.aiter_lines():
            is_opening = '"content":""' in line
            if line.startswith("data:") and any(m in line for m in _GREW) and not is_opening:
                times.append(time.perf_counter())
    return times


def summary(name: str, rounds: list[dict[str, float]]) -> dict[str, Any]:
    """One object for the results: the median round of each number."""
    times = {key: round(statistics.median(each[key] for each in rounds), 3) for key in rounds[0]}
    return {"endpoint": name, "rounds": len(rounds), **times}


def claims_of(measured: dict[str, list[dict[str, float]]]) -> list[Claim]:
    """What is claimed of both endpoints: medians of the rounds' ratios."""
    return [
        at_most(
            f"{name}: {key} is {{}} of the chat's",
            statistics.median(
                each[key] / chat[key]
                for each, chat in zip(measured[name], measured["chat"], strict=True)
            ),
            MAX_RATIO,
        )
        for name in ("messages", "responses")
        for key in ("ttft_ms", "itl_ms")
    ]


if __name__ == "__main__":
    main()
