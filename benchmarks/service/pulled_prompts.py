"""Prompts that a router's engine has computed and the puller reads, against prefill.engines.

    PYTHONPATH=.:tests python -m benchmarks.service.pulled_prompts [--quick] [--json PATH]

Enters: preset small, and one vLLM that has both connectors, its own for NIXL and NanoCP's. Leaves:
times to the first token both ways, and the time of a step while pages arrive over that without.
Does not know: how pages travel.

A prompt is `pulled`: vLLM computes it, and then the service reads it, both calls as a router sends
them, without the router. Or it is `sent`: the service asks vLLM itself. Ways take turns, and every
prompt is new.

For the steps prompts are computed before: pulled, their blocks wait; sent, vLLM finds them in its
prefix cache. The instance has a core of its own, and all else shares the others: vLLM, the puller,
the controller, the front end and the clients. A step counts as beside an arrival from the request
until the step before its first token; quiet ones are those before the next request.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import httpx
import psutil

from benchmarks.kit.bench import BenchRun, Claim, Interval, Result, bench
from benchmarks.kit.service import ROOT, checkpoint_of, random_prompts
from harness.vllm.nixl_engine import NixlEngine
from harness.vllm.vllm_server import NixlPrefill
from nanocp.serve.process import Serving, serving

MAX_TTFT, MAX_STEP = 1.1, 1.03
"""Claims: the time to the first token of a pulled prompt over that of a sent one; the time of a
step while pulled pages arrive over that without."""
WAYS = ("pulled", "sent")
LENGTHS = (200, 700, 2000)
MAX_MODEL_LEN = 2304
NUM_STREAMS, STREAM_LEN, NUM_WARM_TOKENS = 8, 64, 16
LEASE_S = 900
"""Blocks wait for their turn."""
QUIET_S = 0.3
"""Shortest time between two arrivals."""
MODEL = "m"

Compute = Callable[[Sequence[int], bool], Awaitable[dict[str, Any] | None]]
"""Lets an engine compute a prompt; True: for a reader, whose kv_transfer_params are returned."""


class VllmOfBoth(NixlPrefill):
    """A vLLM whose KV is read by NIXL, and which sends it by NanoCP's connector."""

    def __init__(self, checkpoint: Path, log: Path) -> None:
        python = os.environ.get("NANOCP_VLLM_PYTHON", str(ROOT / ".venv-vllm/bin/python"))
        more = ("--served-model-name", MODEL, "--max-model-len", str(MAX_MODEL_LEN))
        super().__init__(python, checkpoint, log, lease_s=LEASE_S, more=more)
        self._environment |= {"PYTHONPATH": str(ROOT), "VLLM_CPU_KVCACHE_SPACE": "2"}

    def _transfer(self, module: str) -> list[str]:
        flag, fields = super()._transfer(module)
        own = {
            "kv_connector": "NanocpConnector",
            "kv_connector_module_path": module,
            "kv_role": "kv_producer",
        }
        both = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"connectors": [json.loads(fields), own]},
        }
        return [flag, json.dumps(both)]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured, and of which model."""

    preset: str
    lengths: Sequence[int]
    rounds: int
    step_length: int
    """Tokens of each prompt whose pages arrive beside steps."""
    arrivals: int
    """Arrivals each way, for one set of streams."""
    sets: int


QUICK = Sizes("tiny", (65, 200), 2, 300, 2, 1)


@bench("Under a minute: preset tiny, a stand-in for vLLM and the embedded prefill; judges nothing.")
def main(
    run: BenchRun,
    rounds: Annotated[int, "Rounds of both ways at each length."] = 15,
    sets: Annotated[int, "Sets of streams, with 6 arrivals each way."] = 3,
) -> None:
    """Measure times to the first token, then steps beside arrivals."""
    sizes = QUICK if run.is_quick else Sizes("small", LENGTHS, rounds, 2000, 6, sets)
    checkpoint = checkpoint_of(sizes.preset)
    with engine_of(checkpoint, is_real=not run.is_quick) as (engine, compute):
        settings = {
            "data_plane.threads_per_instance": 1,
            "cluster.num_frames": 1024,
            "cluster.max_model_len": MAX_MODEL_LEN,
            "prefill.pull.allowed": ["127.0.0.0/8"],
            "prefill.pull.lease_s": LEASE_S,
        }
        flags = ["--served-model-name", MODEL]
        if isinstance(engine, VllmOfBoth):
            flags += ["--prefill", engine.url]
        with serving(
            checkpoint, 1, settings, *flags, ray=False, synthetic_kv=False, http=True
        ) as service:
            measured = PromptsBothWays(service, compute, checkpoint)
            give_cores(service, engine.process.pid, are_apart=False)
            results = asyncio.run(measured.first_tokens(sizes, run))
            run.table(f"{sizes.rounds} rounds: times to the first token", results)
            run.keep(*results, preset=sizes.preset)
            give_cores(service, engine.process.pid, are_apart=True)
            steps = asyncio.run(measured.steps(sizes, run))
            run.table(f"{NUM_STREAMS} streams: steps while pages arrive", steps)
            run.keep(*steps)
    run.judge(claims_of(run.results), run.too_quick)


@contextmanager
def engine_of(
    checkpoint: Path, *, is_real: bool
) -> Iterator[tuple[VllmOfBoth | NixlEngine, Compute]]:
    """An engine that computes prompts; a stand-in takes none for a connector."""
    if not is_real:
        with NixlEngine(checkpoint, num_blocks=1024, lease_s=LEASE_S) as engine:

            async def stand_in(ids: Sequence[int], is_read: bool) -> dict[str, Any] | None:
                return await asyncio.to_thread(engine.prefill, list(ids)) if is_read else None

            yield engine, stand_in
        return
    with TemporaryDirectory() as folder, VllmOfBoth(checkpoint, Path(folder) / "log") as vllm:
        vllm.wait()

        async def compute(ids: Sequence[int], is_read: bool) -> dict[str, Any] | None:
            params = {"do_remote_decode": True, "do_remote_prefill": False} if is_read else None
            async with httpx.AsyncClient(timeout=600) as client:
                answer = await client.post(
                    f"{vllm.url}/v1/completions", json=body_of(ids, 1, kv_transfer_params=params)
                )
                found: dict[str, Any] | None = answer.raise_for_status().json()[
                    "kv_transfer_params"
                ]
                return found

        yield vllm, compute


def body_of(ids: Sequence[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    """A request for greedy tokens; fields that are None are left out."""
    body = {"model": MODEL, "prompt": list(ids), "max_tokens": max_tokens, "temperature": 0}
    return body | {name: value for name, value in more.items() if value is not None}


class PromptsBothWays:
    """A service, and an engine that computes prompts for it."""

    def __init__(self, service: Serving, compute: Compute, checkpoint: Path) -> None:
        self._url = f"http://127.0.0.1:{service.http_port}/v1/completions"
        self._compute, self._checkpoint, self._seeds = compute, checkpoint, count()
        (self._instance,) = service.instance_pids()

    async def first_tokens(self, sizes: Sizes, run: BenchRun) -> list[Result]:
        """Milliseconds to the first token both ways, at each length."""
        ratios: dict[int, list[float]] = {length: [] for length in sizes.lengths}
        times_ms: dict[tuple[int, str], list[float]] = {
            (length, way): [] for length in sizes.lengths for way in (*WAYS, "read")
        }
        async with httpx.AsyncClient(timeout=600) as client:
            for number in run.track(range(-1, sizes.rounds), "rounds"):
                for length in sizes.lengths:
                    taken = {}
                    for way in WAYS[:: 1 if number % 2 else -1]:
                        (ids,) = self._prompts(1, length)
                        begin_s = time.perf_counter()
                        params = await self._compute(ids, True) if way == "pulled" else None
                        taken["computed"] = time.perf_counter() - begin_s
                        await self._first_token(client, ids, params)
                        taken[way] = time.perf_counter() - begin_s
                        if way == "pulled":
                            taken["read"] = taken[way] - taken["computed"]
                    if number >= 0:  # The first round pays for handshakes and compiling.
                        ratios[length].append(taken["pulled"] / taken["sent"])
                        for way in (*WAYS, "read"):
                            times_ms[length, way].append(1e3 * taken[way])
        return [
            {
                "what": "ttft", "tokens": length,
                **{f"{way}_ms": round(median(times_ms[length, way]), 1) for way in (*WAYS, "read")},
                **_ratio_of(ratios[length]),
            }
            for length in sizes.lengths
        ]  # fmt: skip

    async def steps(self, sizes: Sizes, run: BenchRun) -> list[Result]:
        """Milliseconds of a step while pages arrive, each way, and without."""
        found: dict[str, list[Beside]] = {way: [] for way in WAYS}
        for _ in run.track(range(sizes.sets), "sets of streams"):
            prompts = self._prompts(sizes.arrivals * len(WAYS), sizes.step_length)
            turns = [
                (way, ids, await self._compute(ids, way == "pulled"))
                for way, ids in zip(WAYS * sizes.arrivals, prompts, strict=True)
            ]
            async with httpx.AsyncClient(timeout=600) as client, self._streams() as arrivals:
                for way, ids, params in turns:
                    begin_s, begin_cpu_s = time.perf_counter(), self._cpu_s()
                    await self._first_token(client, ids, params if way == "pulled" else None)
                    end_s, end_cpu_s = time.perf_counter(), self._cpu_s()
                    await asyncio.sleep(max(QUIET_S, end_s - begin_s))
                    until_s, until_cpu_s = time.perf_counter(), self._cpu_s()
                    edges_s, cpu_s = (
                        (begin_s, end_s, until_s),
                        (begin_cpu_s, end_cpu_s, until_cpu_s),
                    )
                    if each := Beside.of(arrivals, edges_s, cpu_s):
                        found[way].append(each)
        return [
            {
                "what": "step", "way": way, "tokens": sizes.step_length,
                "arrival_ms": round(median(each.arrival_ms for each in found[way]), 1),
                "quiet_ms": round(median(each.quiet_ms for each in found[way]), 2),
                "beside_ms": round(median(each.beside_ms for each in found[way]), 2),
                "cpu_ratio": round(median(each.cpu_ratio for each in found[way]), 3),
                **_ratio_of([each.beside_ms / each.quiet_ms for each in found[way]]),
            }
            for way in WAYS
            if found[way]
        ]  # fmt: skip

    def _prompts(self, num_prompts: int, length: int) -> list[list[int]]:
        return random_prompts(self._checkpoint, num_prompts, length, next(self._seeds))

    async def _first_token(
        self, client: httpx.AsyncClient, ids: Sequence[int], params: dict[str, Any] | None
    ) -> None:
        body = body_of(ids, 1, kv_transfer_params=params, stream=True, ignore_eos=True)
        async with client.stream("POST", self._url, json=body) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"{answer.status_code}: {await answer.aread()!r}")
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    return
        raise RuntimeError("the answer has no token")

    @asynccontextmanager
    async def _streams(self) -> AsyncIterator[list[float]]:
        """Decode beside the block; the times at which the first stream's tokens came."""
        arrivals: list[list[float]] = [[] for _ in range(NUM_STREAMS)]

        async def follow(ids: Sequence[int], into: list[float]) -> None:
            body = body_of(ids, MAX_MODEL_LEN - len(ids), stream=True, ignore_eos=True)
            async with client.stream("POST", self._url, json=body) as answer:
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        into.append(time.perf_counter())
            raise RuntimeError("a stream has ended before its measurement")

        async with httpx.AsyncClient(timeout=600) as client, asyncio.TaskGroup() as group:
            prompts = self._prompts(NUM_STREAMS, STREAM_LEN)
            tasks = [
                group.create_task(follow(*each)) for each in zip(prompts, arrivals, strict=True)
            ]
            while min(map(len, arrivals)) < NUM_WARM_TOKENS:
                await asyncio.sleep(0.05)
            yield arrivals[0]
            for task in tasks:
                task.cancel()

    def _cpu_s(self) -> float:
        """Processor time of the instance, all its threads together."""
        tasks = Path(f"/proc/{self._instance}/task").glob("*/schedstat")
        return sum(int(each.read_text().split()[0]) for each in tasks) / 1e9


@dataclass(frozen=True, slots=True)
class Beside:
    """Steps while one prompt's pages arrived, and those after it."""

    arrival_ms: float
    """From the request to its first token."""
    beside_ms: float
    quiet_ms: float
    cpu_ratio: float
    """Processor time of the instance in a step, beside over quiet."""

    @classmethod
    def of(
        cls,
        arrivals_s: Sequence[float],
        edges_s: tuple[float, float, float],
        cpu_s: tuple[float, float, float],
    ) -> Beside | None:
        """arrivals_s: of a stream's tokens. edges_s: the request, its first token, the quiet's end.

        cpu_s: processor time of the instance up to each edge. None: one of both has no whole step.
        """
        begin_s, end_s, until_s = edges_s
        quiet_s = _gap_s(arrivals_s, end_s, until_s)
        # The step that gives the first token has a row more.
        beside_s = _gap_s(arrivals_s, begin_s, end_s - quiet_s / 2)
        share = [
            (after - before) / (right_s - left_s)
            for (before, after), (left_s, right_s) in zip(
                pairwise(cpu_s), pairwise(edges_s), strict=True
            )
        ]
        if not (quiet_s and beside_s and share[1]):
            return None
        cpu_ratio = share[0] * beside_s / (share[1] * quiet_s)
        return cls(1e3 * (end_s - begin_s), 1e3 * beside_s, 1e3 * quiet_s, cpu_ratio)


def _gap_s(arrivals_s: Sequence[float], begin_s: float, end_s: float) -> float:
    inside = [each for each in arrivals_s if begin_s <= each <= end_s]
    return (inside[-1] - inside[0]) / (len(inside) - 1) if len(inside) > 1 else 0.0


def _ratio_of(ratios: Sequence[float]) -> Result:
    interval = Interval.of(ratios)
    return {name: round(value, 3) for name, value in interval._asdict().items()} | {
        "measurements": len(ratios)
    }


def give_cores(service: Serving, engine: int, *, are_apart: bool) -> None:
    """Let all processes have all cores, or the instance the first and the others the rest.

    engine: a process. vLLM pins its processes to one core, also the thread of NIXL that never
    sleeps.
    """
    cores = sorted(os.sched_getaffinity(0))
    instances = set(service.instance_pids())
    trees = [psutil.Process(root) for root in (os.getpid(), service.pid, engine)]
    for process in {each for tree in trees for each in (tree, *tree.children(recursive=True))}:
        mine = cores[:1] if process.pid in instances else cores[1:]
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), mine if are_apart else cores)


def claims_of(results: Sequence[Result]) -> list[Claim]:
    """What is claimed of pulled prompts."""
    claims = []
    for each in results:
        interval = Interval(each["median"], each["low"], each["high"])
        if each["what"] == "ttft":
            what = (
                f"{each['tokens']} tokens: the time to the first token is {{}} of a sent prompt's"
            )
            claims.append(interval.at_most(what, MAX_TTFT))
        elif each["way"] == "pulled":
            what = "while pulled pages arrive a step takes {} of one without"
            claims.append(interval.at_most(what, MAX_STEP))
    return claims


if __name__ == "__main__":
    main()
