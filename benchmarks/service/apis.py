"""HTTP against gRPC, the same requests in turn; and one request's pauses of another's stream.

Enters: the tiny checkpoint, a real service of four instances with both APIs, the load of `nanocp
bench serve`; models/tale on two instances. Leaves: tables, and a list with an object for each API
and each kind of request. Does not know: how an API is served.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import httpx
import psutil

from benchmarks.kit.bench import BenchRun, Claim, at_least, at_most, bench
from benchmarks.kit.service import ROOT, checkpoint_of
from nanocp.bench.backends import Backend, GrpcBackend, OpenAIBackend
from nanocp.bench.dataset import DatasetOptions, SampleRequest, sample_requests
from nanocp.bench.load import send_all
from nanocp.bench.report import result
from nanocp.serve.process import Serving, serving

NUM_INSTANCES, CONCURRENCY = 4, 32
APIS = ("grpc", "http")
SAMPLING = {"temperature": 0.0, "ignore_eos": True}
MIN_RATIO = 0.8
"""Claim: output tokens a second over HTTP against gRPC."""
MAX_ADDED_S = 0.3
"""Claim: what any one request adds to the longest pause of a stream beside it."""
WINDOW_S = 1.5
"""Shortest time in which a pause is looked for."""
_TEXT = "a " * 2_000_000
INPUTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "text prompt of 4 MB": ("/v1/completions", {"prompt": _TEXT, "max_tokens": 3}),
    "chat of 4 MB": ("/v1/chat/completions", {"messages": [{"role": "user", "content": _TEXT}]}),
    "text of 4 MB to tokenize": ("/tokenize", {"prompt": _TEXT}),
    "500,000 token ids to text": ("/detokenize", {"tokens": [66, 1000] * 250_000}),
    "regex of a million characters": (
        "/v1/completions",
        {"prompt": "Q", "max_tokens": 20, "structured_outputs": {"regex": "[xy](a{1000}){1000}"}},
    ),
    "20,000 tools": (
        "/v1/messages",
        {
            "messages": [{"role": "user", "content": "Q"}],
            "max_tokens": 1,
            "tools": [{"name": f"t{n}", "input_schema": {}} for n in range(20_000)],
        },
    ),
    "multiples of 999,983": (
        "/v1/completions",
        {"prompt": "Q", "structured_outputs": {"json": {"type": "integer", "multipleOf": 999_983}}},
    ),
}
_STREAM = {"prompt": "Once upon a time", "max_tokens": 7000, "ignore_eos": True, "stream": True}
KEYS = (
    *("output_throughput", "request_throughput", "median_ttft_ms", "median_tpot_ms"),
    "cpu_ms_per_token",
)


@bench("Under a minute.")
def main(run: BenchRun) -> None:
    """Measure both APIs in turn, and compare."""
    rounds, num_prompts = (2, 32) if run.is_quick else (5, 256)
    requests = sample_requests(
        DatasetOptions(num_prompts=num_prompts, input_len=64, output_len=64), None
    )
    with serving(checkpoint_of("tiny"), NUM_INSTANCES, {}, ray=False, http=True) as service:
        measured = asyncio.run(measure(service, requests, run.track(range(rounds), "rounds")))
    results = [summary(api, measured[api]) for api in APIS]
    run.table(f"{CONCURRENCY} requests at a time", results)
    with serving(ROOT / "models/tale", 2, {}, ray=False, http=True) as service:
        pauses = measure_pauses(f"http://127.0.0.1:{service.http_port}", 1 if run.is_quick else 5)
    run.table("longest pause of a stream, idle and beside a request", [*map(asdict, pauses)])
    run.keep(*results, *map(asdict, pauses))
    run.judge([claim_of(results), claim_of_pauses(pauses)])


async def measure(
    service: Serving, requests: list[SampleRequest], rounds: Iterable[int]
) -> dict[str, list[dict[str, Any]]]:
    """Measure each API: API -> what each round's report says.

    A round also has the control plane's processor milliseconds a token.
    """
    process = psutil.Process(service.pid)
    backends = {
        "grpc": GrpcBackend(service.target, SAMPLING),
        "http": OpenAIBackend(
            f"http://127.0.0.1:{service.http_port}", "/v1/completions", None, False, SAMPLING, {}
        ),
    }
    measured: dict[str, list[dict[str, Any]]] = {api: [] for api in APIS}
    try:
        for api in APIS:
            await _send(backends[api], requests[:CONCURRENCY], f"warm-{api}-")
        for number in rounds:
            # Who is first changes, so that a drift of the machine meets both.
            for api in APIS if number % 2 else APIS[::-1]:
                began_s = sum(process.cpu_times()[:2])
                values = await _send(backends[api], requests, f"{api}-{number}-")
                busy_s = sum(process.cpu_times()[:2]) - began_s
                measured[api].append(
                    values | {"cpu_ms_per_token": 1e3 * busy_s / values["total_output_tokens"]}
                )
    finally:
        for backend in backends.values():
            await backend.close()
    return measured


async def _send(backend: Backend, requests: list[SampleRequest], prefix: str) -> dict[str, Any]:
    outputs, duration_s = await send_all(
        backend, requests, [0.0] * len(requests), CONCURRENCY, prefix
    )
    if failed := [output.error for output in outputs if not output.success]:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
    return result(outputs, duration_s, {}, ("ttft", "tpot"), (99,))


def summary(api: str, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """One object for the results: the median round of each number."""
    medians = {key: round(statistics.median(values[key] for values in rounds), 3) for key in KEYS}
    return {"api": api, "rounds": len(rounds), "requests": rounds[0]["completed"], **medians}


def claim_of(results: Sequence[dict[str, Any]]) -> Claim:
    """What is claimed of both APIs."""
    grpc, http = (entry["output_throughput"] for entry in results)
    return at_least("HTTP gives {} of gRPC's output tokens a second", http / grpc, MIN_RATIO)


# --- pauses


@dataclass(frozen=True, slots=True)
class AddedPause:
    """Longest pauses of a stream beside one kind of request, medians over the pairs."""

    request: str
    status: int
    """The answer's; 400 for what cannot be served."""
    answered_s: float
    idle_s: float
    beside_s: float
    added_s: float
    """Median of the pairs' differences."""
    num_pairs: int


class _Stream:
    """One stream in a thread, until it is closed; when its events came."""

    def __init__(self, url: str) -> None:
        self.arrivals_s: list[float] = []
        self._begun, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._read, args=(url,))
        self._thread.start()

    def _read(self, url: str) -> None:
        with httpx.stream("POST", f"{url}/v1/completions", json=_STREAM, timeout=300) as answer:
            for line in answer.iter_lines():
                if line:
                    self.arrivals_s.append(time.perf_counter())
                    if len(self.arrivals_s) > 20:
                        self._begun.set()
                if self._closed.is_set():
                    return
        self._begun.set()

    def __enter__(self) -> _Stream:
        if not self._begun.wait(300):
            raise RuntimeError("the stream does not begin")
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    def longest_pause_s(self, work: Callable[[], None]) -> float:
        """The longest time between two events while `work` runs, at least for WINDOW_S."""
        begin_s = time.perf_counter()
        work()
        time.sleep(max(0.2, begin_s + WINDOW_S - time.perf_counter()))
        end_s = time.perf_counter()
        inside = [begin_s, *(each for each in self.arrivals_s if begin_s < each < end_s), end_s]
        if not self._thread.is_alive():
            raise RuntimeError("the stream ended within the measurement")
        return max(after - before for before, after in pairwise(inside))


def measure_pauses(url: str, num_pairs: int) -> list[AddedPause]:
    """Pairs for each of INPUTS: first idle, then beside the request, in one stream."""
    results = []
    for name, (path, body) in INPUTS.items():
        content, answers, pairs = json.dumps(body), [], []

        def post(path: str = path, content: str = content, answers: list[Any] = answers) -> None:
            begin_s = time.perf_counter()
            headers = {"Content-Type": "application/json"}
            answer = httpx.post(f"{url}{path}", content=content, headers=headers, timeout=300)
            answers.append((answer.status_code, time.perf_counter() - begin_s))

        for _ in range(num_pairs):
            with _Stream(url) as stream:
                idle_s = stream.longest_pause_s(lambda: None)
                pairs.append((idle_s, stream.longest_pause_s(post)))
        results.append(
            AddedPause(
                name,
                answers[0][0],
                round(statistics.median(took_s for _, took_s in answers), 3),
                round(statistics.median(idle_s for idle_s, _ in pairs), 3),
                round(statistics.median(beside_s for _, beside_s in pairs), 3),
                round(statistics.median(beside_s - idle_s for idle_s, beside_s in pairs), 3),
                num_pairs,
            )
        )
    return results


def claim_of_pauses(pauses: Sequence[AddedPause]) -> Claim:
    """What is claimed of any one request, by the one that adds most."""
    worst = max(pauses, key=lambda each: each.added_s)
    what = f"{worst.request}, of all requests, adds most to a stream's longest pause: {{}} s"
    return at_most(what, worst.added_s, MAX_ADDED_S)


if __name__ == "__main__":
    main()
