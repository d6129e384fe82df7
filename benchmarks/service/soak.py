"""Half an hour of all at once: load, aborts, disconnects, slow readers and bad requests.

Enters: the tiny checkpoint, a real service with both APIs. Leaves: a table, and a list of one
object: requests by kind, errors, resident memory, TPOT of the first and the last third, frames not
back. Does not know: how the service works.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import psutil

from benchmarks.kit.bench import BenchRun, Claim, at_most, bench, none
from benchmarks.kit.service import checkpoint_of, random_prompts
from nanocp.client import Aborted, AsyncClient, InvalidArgument, ServiceError
from nanocp.serve.process import Serving, serving

NUM_INSTANCES = 4
NUM_STEADY_CLIENTS = 6
PROMPT_LENS, OUTPUT_LENS = (32, 1024), (32, 128)
SETTLED_SHARE = 1 / 6
"""Share of the time after which resident memory is looked at: minute 5 of 30."""
MAX_MEMORY_GROWTH, MAX_TPOT_GROWTH = 1.05, 1.10
"""Claims: resident memory at the end over that after SETTLED_SHARE; p99 TPOT of the last third over
the first's."""
BAD_BODIES = (
    b"{",
    b"[]",
    b'{"prompt": "a", "temperature": -1}',
    b'{"prompt": 7.5}',
    b'{"prompt": [99999999]}',
)
PAUSE_S = 0.25
"""How long a slow reader waits, and whoever asked badly."""


@dataclass(slots=True)
class Record:
    """What happened."""

    counts: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    """Sentences that are not the client's fault."""
    tpots: list[tuple[float, float]] = field(default_factory=list)
    """(share of the time at the request's end, ms)."""
    memory_mib: list[tuple[float, float]] = field(default_factory=list)
    """(share of the time, resident memory of the service and its members)."""


@dataclass(frozen=True, slots=True)
class Soak:
    """What every client of the load needs."""

    checkpoint: Path
    service: Serving
    client: AsyncClient
    http: aiohttp.ClientSession
    record: Record
    began_s: float
    seconds: float

    @property
    def share(self) -> float:
        """Share of the time that is over."""
        return (time.monotonic() - self.began_s) / self.seconds

    def prompt(self, draw: random.Random) -> list[int]:
        """Random ids."""
        length = draw.randint(*PROMPT_LENS)
        return random_prompts(self.checkpoint, 1, length, draw.getrandbits(32))[0]


@bench("20 seconds of load: under a minute.")
def main(run: BenchRun, minutes: Annotated[float, "Of load."] = 30.0) -> None:
    """Play every kind of client at once, then look at what is left."""
    seconds, checkpoint = 20.0 if run.is_quick else 60.0 * minutes, checkpoint_of("tiny")
    with serving(
        checkpoint, NUM_INSTANCES, {}, ray=False, synthetic_kv=False, http=True
    ) as service:
        record = asyncio.run(play(checkpoint, service, seconds))
        frames_not_back = service.frames_not_back()
    result = summary(record, seconds, frames_not_back)
    run.facts(result)
    run.keep(result)
    run.judge(claims_of(result), run.too_quick)


async def play(checkpoint: Path, service: Serving, seconds: float) -> Record:
    """All clients, until the time is over."""
    record = Record()
    members = [psutil.Process(service.pid), *psutil.Process(service.pid).children(recursive=True)]
    async with (
        AsyncClient(service.target) as client,
        aiohttp.ClientSession() as http,
        asyncio.TaskGroup() as group,
    ):
        soak = Soak(checkpoint, service, client, http, record, time.monotonic(), seconds)
        kinds = [*[("steady", steady)] * NUM_STEADY_CLIENTS, *KINDS.items()]
        for number, (kind, act) in enumerate(kinds):
            group.create_task(_repeat(soak, kind, act, random.Random(number)))
        while (share := soak.share) < 1:
            rss = sum(member.memory_info().rss for member in members)
            record.memory_mib.append((share, rss / 2**20))
            await asyncio.sleep(min(5.0, seconds / 20))
    return record


async def _repeat(
    soak: Soak, kind: str, act: Callable[[Soak, random.Random], Awaitable[None]], draw: Any
) -> None:
    while soak.share < 1:
        try:
            await act(soak, draw)
            soak.record.counts[kind] += 1
        except (ServiceError, aiohttp.ClientError, AssertionError) as error:
            soak.record.errors[f"{kind}: {type(error).__name__}: {error}"[:200]] += 1
            await asyncio.sleep(1.0)  # a service that is gone must not be asked in a tight loop


async def steady(soak: Soak, draw: random.Random) -> None:
    """Asks over gRPC and reads to the end."""
    max_tokens = draw.randint(*OUTPUT_LENS)
    arrivals_s: list[float] = []
    async for chunk in soak.client.generate(
        soak.prompt(draw), max_tokens=max_tokens, ignore_eos=True, temperature=1.0
    ):
        arrivals_s += [time.monotonic()] * len(chunk.token_ids)
    assert len(arrivals_s) == max_tokens, f"{len(arrivals_s)} tokens came of {max_tokens}"
    soak.record.tpots.append(
        (soak.share, 1e3 * (arrivals_s[-1] - arrivals_s[0]) / (max_tokens - 1))
    )


async def aborting(soak: Soak, draw: random.Random) -> None:
    """Aborts by name after some tokens."""
    name = f"abort-{draw.getrandbits(64)}"
    num_tokens, enough = 0, draw.randint(1, 32)
    stream = soak.client.generate(
        soak.prompt(draw), max_tokens=512, ignore_eos=True, request_id=name
    )
    with contextlib.suppress(Aborted):
        async for chunk in stream:
            num_tokens += len(chunk.token_ids)
            if num_tokens >= enough:
                await soak.client.abort(name)
                enough = 1 << 30
    assert num_tokens < 512, "an aborted request ran to its end"


async def leaving(soak: Soak, draw: random.Random) -> None:
    """Streams over HTTP and goes away after some events."""
    body = {"prompt": soak.prompt(draw), "max_tokens": 512, "ignore_eos": True, "stream": True}
    async with soak.http.post(_url(soak, "/v1/completions"), json=body) as answer:
        assert answer.status == 200, await answer.text()
        for _ in range(draw.randint(1, 20)):
            await answer.content.readline()
        answer.close()


async def slow(soak: Soak, draw: random.Random) -> None:
    """Reads a chunk now and then."""
    async for _ in soak.client.generate(soak.prompt(draw), max_tokens=64, ignore_eos=True):
        await asyncio.sleep(PAUSE_S)


async def bad(soak: Soak, draw: random.Random) -> None:
    """Asks for what nobody can do, over either API."""
    try:
        async for _ in soak.client.generate(soak.prompt(draw), max_tokens=-draw.randint(1, 9)):
            raise AssertionError("a request for less than no token was served")
    except InvalidArgument:
        pass
    async with soak.http.post(
        _url(soak, "/v1/completions"), data=draw.choice(BAD_BODIES)
    ) as answer:
        assert 400 <= answer.status < 500, f"a bad body got {answer.status}"
        await answer.read()
    await asyncio.sleep(PAUSE_S)


KINDS = {"aborting": aborting, "leaving": leaving, "slow": slow, "bad": bad}
"""Who else is there, one of each."""


def _url(soak: Soak, path: str) -> str:
    return f"http://127.0.0.1:{soak.service.http_port}{path}"


def summary(record: Record, seconds: float, frames_not_back: int) -> dict[str, Any]:
    """One object for the results."""
    settled = [mib for share, mib in record.memory_mib if share >= SETTLED_SHARE]
    first = [ms for share, ms in record.tpots if share < 1 / 3]
    last = [ms for share, ms in record.tpots if share >= 2 / 3]
    return {
        "seconds": round(seconds),
        "requests": dict(record.counts),
        "errors": dict(record.errors),
        "memory_settled_mib": round(settled[0]),
        "memory_end_mib": round(settled[-1]),
        "tpot_ms_p99_first": round(_p99(first), 2),
        "tpot_ms_p99_last": round(_p99(last), 2),
        "frames_not_back": frames_not_back,
    }


def _p99(values: list[float]) -> float:
    return sorted(values)[len(values) * 99 // 100] if values else float("nan")


def claims_of(result: dict[str, Any]) -> Iterator[Claim]:
    """What is claimed of a run."""
    yield none("error that is not the client's", result["errors"])
    memory = result["memory_end_mib"] / result["memory_settled_mib"]
    yield at_most("resident memory grows {}x", memory, MAX_MEMORY_GROWTH)
    tpot = result["tpot_ms_p99_last"] / result["tpot_ms_p99_first"]
    yield at_most("p99 TPOT grows {}x", tpot, MAX_TPOT_GROWTH)
    yield none("frame is left", result["frames_not_back"])


if __name__ == "__main__":
    main()
