"""HTTP against gRPC, the same requests in turn; and one request's pauses of another's stream.

    python benchmarks/apis.py [--quick] [--json PATH]

Enters: the tiny checkpoint, a real service of four instances with both APIs, the load of `nanocp
bench serve`; models/tale on two instances. Leaves: tables, and a list with an object for each API
and each kind of request; exit status 1 if a claim does not hold. Does not know: how an API is
served.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import psutil
from kit import BenchRun, Claim, at_least, at_most, bench
from pauses import AddedPause, measure_pauses
from service import ROOT, checkpoint_of

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


def claim_of_pauses(pauses: Sequence[AddedPause]) -> Claim:
    """What is claimed of any one request, by the one that adds most."""
    worst = max(pauses, key=lambda each: each.added_s)
    what = f"{worst.request}, of all requests, adds most to a stream's longest pause: {{}} s"
    return at_most(what, worst.added_s, MAX_ADDED_S)


if __name__ == "__main__":
    main()
