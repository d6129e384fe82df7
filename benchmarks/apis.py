"""HTTP against gRPC, the same requests in turn; and one request's pauses of another's stream.

    python benchmarks/apis.py [--quick] [--json PATH]

Enters: the tiny checkpoint, a real service of four instances with both APIs, the load of `nanocp
bench serve`; models/tale on two instances. Leaves: tables, and a list with an object for each API
and each kind of request; exit status 1 if a claim does not hold. Does not know: how an API is
served.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from machine import describe, write_results
from pauses import MAX_ADDED_S, AddedPause, measure_pauses
from rich.console import Console
from rich.progress import track
from rich.table import Table
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


def main(
    quick: Annotated[bool, typer.Option(help="Under a minute.")] = False,
    json: Annotated[
        Path | None, typer.Option(help="Write the results here, the machine beside it.")
    ] = None,
) -> None:
    """Measure both APIs in turn, and compare."""
    load_before = os.getloadavg()[0]
    console = Console() if sys.stdout.isatty() else Console(width=110)
    rounds, num_prompts = (2, 32) if quick else (5, 256)
    requests = sample_requests(
        DatasetOptions(num_prompts=num_prompts, input_len=64, output_len=64), None
    )
    with serving(checkpoint_of("tiny"), NUM_INSTANCES, {}, ray=False, http=True) as service:
        measured = asyncio.run(measure(service, requests, rounds, console))
    results = [summary(api, measured[api]) for api in APIS]
    show(results, console)
    with serving(ROOT / "models/tale", 2, {}, ray=False, http=True) as service:
        pauses = measure_pauses(f"http://127.0.0.1:{service.http_port}", 1 if quick else 5)
    show_pauses(pauses, console)
    if json is not None:
        write_results(json, [*results, *map(asdict, pauses)], describe(load_before))
    if not show_claim(results, console) & show_pause_claim(pauses, console):
        raise typer.Exit(1)


async def measure(
    service: Serving, requests: list[SampleRequest], rounds: int, console: Console
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
        for number in track(range(rounds), "rounds", console=console, transient=True):
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
    keys = (
        "output_throughput",
        "request_throughput",
        "median_ttft_ms",
        "median_tpot_ms",
        "cpu_ms_per_token",
    )
    medians = {key: round(statistics.median(values[key] for values in rounds), 3) for key in keys}
    return {"api": api, "rounds": len(rounds), "requests": rounds[0]["completed"], **medians}


def show(results: list[dict[str, Any]], console: Console) -> None:
    """A column for each API."""
    table = Table(f"{CONCURRENCY} requests at a time", *(entry["api"] for entry in results))
    for key in list(results[0])[1:]:
        table.add_row(key, *(f"{entry[key]:g}" for entry in results))
    console.print(table)


def show_claim(results: list[dict[str, Any]], console: Console) -> bool:
    """Say whether it holds."""
    grpc, http = (entry["output_throughput"] for entry in results)
    holds = bool(http >= MIN_RATIO * grpc)
    sentence = (
        f"HTTP gives {http / grpc:.2f} of gRPC's output tokens a second, at least {MIN_RATIO}"
    )
    console.print(f"{'holds' if holds else 'DOES NOT HOLD'}: {sentence}")
    return holds


def show_pauses(pauses: list[AddedPause], console: Console) -> None:
    """A row for each kind of request."""
    table = Table("request beside a stream", "status", "answered in s", "longest pause, idle in s",
                  "beside it", "added")  # fmt: skip
    for each in pauses:
        numbers = (each.answered_s, each.idle_s, each.beside_s, each.added_s)
        table.add_row(each.request, str(each.status), *(f"{number:.3f}" for number in numbers))
    console.print(table)


def show_pause_claim(pauses: list[AddedPause], console: Console) -> bool:
    """Say whether it holds, and for what not."""
    worst = max(pauses, key=lambda each: each.added_s)
    sentence = (
        f"any one request adds at most {MAX_ADDED_S} s to the longest pause of a stream; most adds "
        f"{worst.request}: {worst.added_s:.3f} s"
    )
    console.print(f"{'holds' if worst.holds else 'DOES NOT HOLD'}: {sentence}")
    return worst.holds


if __name__ == "__main__":
    typer.run(main)
