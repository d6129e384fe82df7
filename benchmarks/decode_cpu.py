"""Decode on the CPU, in tokens a second: the whole service beside `transformers` and vLLM.

    python benchmarks/decode_cpu.py [--quick] [--vllm] [--kernels NAME] [--beside-torch]
        [--preset NAME] [--dtype NAME] [--stored NAME] [--threads N] [--json PATH]

Enters: a preset's checkpoint. Leaves: a table, the ratios, and a list of {engine, instances,
threads, dtype, stored, batch, tokens_per_s}; exit status 1 if a claim does not hold. Does not know:
how any engine decodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import typer
from machine import describe, write_results
from peers import DEFAULT_VLLM_ENV, UP_TO_AVX2, PeerEngine, peer, vllm_python
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from service import checkpoint_of, decode, random_prompts

from nanocp.serve.process import Serving, serving

PROMPT_LEN = 200
MIN_OVER_TRANSFORMERS = 2.0
"""Claim: one instance over `transformers` with as many threads, at batch 32."""
MIN_FOUR_OVER_ONE = 0.85
"""Claim: four instances over one, each with one thread, on the same two cores, at batch 32."""
CLAIMED_BATCH = 32
MIN_OVER_VLLM = 0.9
"""Claim: one instance over vLLM with as many threads, at every batch, with the native kernels."""
MIN_OVER_TORCH = 1.4
"""Claim: one instance with native kernels over one with torch's, at the batches that it names."""
BATCHES_OVER_TORCH = (8, 32)
TORCH = "nanocp torch"
"""The engine's name of our service with torch's kernels."""


class MeasuredPoint(NamedTuple):
    """One line of the table."""

    engine: str
    instances: int
    threads: int
    """Threads of one instance."""
    dtype: str
    """What is computed in."""
    stored: str
    """The dtype of the checkpoint's weights: every engine has the same folder."""
    batch: int


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """What is measured."""

    preset: str
    dtypes: tuple[str, ...]
    batches: tuple[int, ...]
    layouts: tuple[tuple[int, int], ...]
    """(instances, threads of each) of our service."""
    peer_threads: tuple[int, ...]
    num_tokens: int
    """Tokens of each stream in the steady state."""
    num_peer_tokens: int
    rounds: int
    """Measurements of each point of our service; their median counts."""
    peer_rounds: int
    """Rounds of the peers, which take longer and are further from what is claimed."""
    stored: str = "bfloat16"
    """Dtype of the checkpoint's weights, by default that of nearly all published ones."""


FULL = DecodeShape(
    "small", ("float32", "bfloat16"), (1, 8, 32), ((1, 1), (4, 1)), (1,), 32, 8, 7, 2
)
QUICK = DecodeShape("tiny", ("float32",), (8, 32), ((1, 1), (4, 1)), (1,), 32, 8, 1, 1)

Rates = dict[MeasuredPoint, list[float]]


def main(
    quick: Annotated[
        bool, typer.Option(help="Under a minute: preset tiny, fp32, one round; judges no claim.")
    ] = False,
    vllm: Annotated[
        bool, typer.Option(help="Measure vLLM too; makes its environment if absent.")
    ] = False,
    vllm_env: Annotated[
        Path, typer.Option(help="Where vLLM's environment is or will be.")
    ] = DEFAULT_VLLM_ENV,
    kernels: Annotated[
        str,
        typer.Option(
            help="data_plane.cpu_kernels of our service. avx2 also keeps torch and the peers from "
            "using AVX-512."
        ),
    ] = "auto",
    beside_torch: Annotated[
        bool, typer.Option(help="Measure one instance with torch's kernels too.")
    ] = False,
    dtype: Annotated[
        str | None, typer.Option(help="Measure only this one: float32 or bfloat16.")
    ] = None,
    stored: Annotated[
        str, typer.Option(help="Dtype of the checkpoint's weights: bfloat16 or float32.")
    ] = FULL.stored,
    preset: Annotated[
        str | None, typer.Option(help="Measure a checkpoint of this preset, as small-llama.")
    ] = None,
    threads: Annotated[
        int,
        typer.Option(
            min=1,
            help="Threads of one instance and of each peer. More than 1: one instance only, and "
            "as many cores must be there.",
        ),
    ] = 1,
    json: Annotated[
        Path | None, typer.Option(help="Write the results here, the machine beside it.")
    ] = None,
) -> None:
    """Measure turn by turn, so that a drift of the machine meets all layouts alike."""
    if quick and vllm:
        raise typer.BadParameter(
            "vLLM's attention on the CPU does not take the widths of preset tiny",
            param_hint="--vllm",
        )
    console, load_before = Console(), os.getloadavg()[0]
    shape = replace(QUICK if quick else FULL, stored=stored)
    if preset is not None:
        shape = replace(shape, preset=preset)
    if dtype is not None:
        shape = replace(shape, dtypes=(dtype,))
    num_cores = len(os.sched_getaffinity(0))
    if threads > num_cores:
        raise typer.BadParameter(
            f"{threads} threads on {num_cores} cores would measure the operating system; at most "
            f"{num_cores}",
            param_hint="--threads",
        )
    if threads > 1:
        shape = replace(shape, layouts=((1, threads),), peer_threads=(threads,))
    if kernels == "avx2":
        os.environ.update(UP_TO_AVX2)
    python = _vllm_or_none(vllm_env, console) if vllm else None
    rates, versions = measure(shape, kernels, python, console, beside_torch)
    results = [
        point._asdict() | {"tokens_per_s": round(median(values), 1)}
        for point, values in rates.items()
    ]
    show(results, console)
    if json is not None:
        write_results(
            json,
            results,
            describe(load_before)
            | {"preset": shape.preset, "kernels": kernels, "engines": versions},
        )
    claims_hold = show_ratios(results, console)
    if quick:
        console.print("--quick: preset tiny, fp32, one round. The claims are about the full run.")
    elif not claims_hold:
        raise typer.Exit(1)


def _vllm_or_none(path: Path, console: Console) -> str | None:
    try:
        with console.status(f"making an environment for vLLM at {path}"):
            return vllm_python(path)
    except RuntimeError as error:
        console.print(f"going on without vLLM: {error}")
        return None


# --- measuring
# ------------------------------------------------------------------------------


def measure(
    shape: DecodeShape,
    kernels: str,
    vllm: str | None,
    console: Console,
    beside_torch: bool = False,
) -> tuple[Rates, dict[str, str]]:
    """tokens/s of every round at every point, and the peers' versions.

    Where no terminal shows how far it is, a line says so for each measurement.
    """
    checkpoint = checkpoint_of(shape.preset, shape.stored)
    rates: Rates = {}
    versions: dict[str, str] = {}
    num_peers = len(shape.peer_threads) * (2 if vllm else 1)
    layouts = [("nanocp", kernels, *layout) for layout in shape.layouts]
    if beside_torch:
        layouts.append((TORCH, "torch", 1, 1))
    rounds_each = len(layouts) * shape.rounds + num_peers * shape.peer_rounds
    total = len(shape.dtypes) * len(shape.batches) * rounds_each
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("starting", total=total)
        for dtype in shape.dtypes:
            with contextlib.ExitStack() as stack:
                peers = [stack.enter_context(one) for one in _peers(shape, checkpoint, dtype, vllm)]
                versions |= {one.engine: one.version for one in peers}
                services = {
                    (engine, *layout): stack.enter_context(
                        _service(checkpoint, dtype, name, *layout)
                    )
                    for engine, name, *layout in layouts
                }
                for point, rate in _in_turn(shape, checkpoint, dtype, services, peers, console):
                    rates.setdefault(point, []).append(rate)
                    where = f"{point.engine} {dtype} batch {point.batch}"
                    progress.update(task, advance=1, description=where)
                    if not console.is_terminal:
                        done = sum(map(len, rates.values()))
                        console.print(f"{done} of {total}: {where}, {rate:.1f} tokens/s")
    return rates, versions


def _peers(
    shape: DecodeShape, checkpoint: Path, dtype: str, vllm: str | None
) -> Iterator[contextlib.AbstractContextManager[PeerEngine]]:
    for threads in shape.peer_threads:
        yield peer("transformers", checkpoint, dtype, threads)
        if vllm is not None:
            yield peer("vllm", checkpoint, dtype, threads, vllm)


def _service(
    checkpoint: Path, dtype: str, kernels: str, instances: int, threads: int
) -> contextlib.AbstractContextManager[Serving]:
    """Start a service without Ray, which has no part in a step.

    With it, two services would share one machine's Ray.
    """
    settings = {
        "data_plane.dtype": dtype,
        "data_plane.cpu_kernels": kernels,
        "data_plane.threads_per_instance": threads,
    }
    return serving(checkpoint, instances, settings, ray=False)


def _in_turn(
    shape: DecodeShape,
    checkpoint: Path,
    dtype: str,
    services: dict[tuple[str, int, int], Serving],
    peers: list[PeerEngine],
    console: Console,
) -> Iterator[tuple[MeasuredPoint, float]]:
    """Measure batch by batch: our layouts turn by turn, and in some rounds the peers.

    What waits for its turn uses no core. A peer that fails or does not answer in time is left out
    from then on.
    """
    for batch in shape.batches:
        prompts = random_prompts(checkpoint, batch, PROMPT_LEN, seed=batch)
        for round_ in range(shape.rounds):
            for (engine, instances, threads), service in services.items():
                rate = _ours(service, prompts, shape.num_tokens, warm=round_ == 0)
                point = MeasuredPoint(engine, instances, threads, dtype, shape.stored, batch)
                yield point, rate
            if round_ * shape.peer_rounds % shape.rounds >= shape.peer_rounds:
                continue
            for one in list(peers):
                try:
                    answer = one.measure(prompts, shape.num_peer_tokens)
                except RuntimeError as error:
                    console.print(f"going on without {one.engine}: {error}")
                    peers.remove(one)
                    continue
                point = MeasuredPoint(one.engine, 1, one.threads, dtype, shape.stored, batch)
                yield point, float(answer["tokens_per_s"])


def _ours(service: Serving, prompts: list[list[int]], num_tokens: int, warm: bool) -> float:
    """`warm`: decode a little first, uncounted; the peers do so too."""
    if warm:
        asyncio.run(decode(service.target, prompts, 2))
    return asyncio.run(decode(service.target, prompts, num_tokens)).tokens_per_s


# --- showing
# ------------------------------------------------------------------------------


def show(results: Sequence[dict[str, Any]], console: Console) -> None:
    """One line for each engine, dtype and stored dtype, one column for each batch."""
    batches = sorted({result["batch"] for result in results})
    table = Table(title="decode, tokens/s (median)", padding=0)
    words = ("engine", "dtype", "stored")
    for column in ("engine", "instances", "threads each", "dtype", "stored"):
        table.add_column(column, justify="left" if column in words else "right")
    for batch in batches:
        table.add_column(f"batch {batch}", justify="right")
    for name in dict.fromkeys(
        (r["dtype"], r["stored"], r["engine"], r["instances"], r["threads"]) for r in results
    ):
        dtype, stored, engine, instances, threads = name
        rates = [
            rate_of(results, MeasuredPoint(engine, instances, threads, dtype, stored, batch))
            for batch in batches
        ]
        cells = ["" if rate is None else f"{rate:.1f}" for rate in rates]
        table.add_row(engine, str(instances), str(threads), dtype, stored, *cells)
    console.print(table)


def show_ratios(results: Sequence[dict[str, Any]], console: Console) -> bool:
    """The ratios; returns whether every claim holds."""
    table = Table(title="ratios", padding=0)
    words = ("dtype", "stored", "ratio")
    for column in (*words, "threads", "batch", "measured", "claimed", "holds"):
        table.add_column(column, justify="left" if column in words else "right")
    all_hold = True
    for dtype, stored, name, threads, batch, ratio, claimed in ratios(results):
        holds = claimed is None or ratio >= claimed
        all_hold &= holds
        claim = ("", "") if claimed is None else (f">= {claimed}", "yes" if holds else "NO")
        table.add_row(dtype, stored, name, threads, str(batch), f"{ratio:.2f}", *claim)
    console.print(table)
    return all_hold


def ratios(
    results: Sequence[dict[str, Any]],
) -> Iterator[tuple[str, str, str, str, int, float, float | None]]:
    """List (dtype, stored, name, threads, batch, ratio, least that is claimed) of measured pairs.

    Both of a pair had the same folder.
    """
    pairs = [
        (
            "one instance / transformers",
            "1 / 1",
            ("nanocp", 1, 1),
            ("transformers", 1, 1),
            MIN_OVER_TRANSFORMERS,
        ),
        (
            "one instance / transformers",
            "2 / 2",
            ("nanocp", 1, 2),
            ("transformers", 1, 2),
            MIN_OVER_TRANSFORMERS,
        ),
        ("four instances / one", "4x1 / 1", ("nanocp", 4, 1), ("nanocp", 1, 1), MIN_FOUR_OVER_ONE),
        ("four instances / one", "4x1 / 2", ("nanocp", 4, 1), ("nanocp", 1, 2), None),
        ("one instance / vLLM", "1 / 1", ("nanocp", 1, 1), ("vllm", 1, 1), MIN_OVER_VLLM),
        ("one instance / vLLM", "2 / 2", ("nanocp", 1, 2), ("vllm", 1, 2), None),
        (
            "native / torch's kernels",
            "1 / 1",
            ("nanocp", 1, 1),
            (TORCH, 1, 1),
            MIN_OVER_TORCH,
        ),
    ]
    for dtype, stored in dict.fromkeys((result["dtype"], result["stored"]) for result in results):
        for name, threads, ours, other, claimed in pairs:
            for batch in sorted({result["batch"] for result in results}):
                rates = [
                    rate_of(results, MeasuredPoint(*engine, dtype, stored, batch))
                    for engine in (ours, other)
                ]
                is_asked = batch == CLAIMED_BATCH or "vLLM" in name
                if other[0] == TORCH:
                    is_asked = batch in BATCHES_OVER_TORCH
                if is_asked and rates[0] is not None and rates[1] is not None:
                    yield dtype, stored, name, threads, batch, rates[0] / rates[1], claimed


def rate_of(results: Sequence[dict[str, Any]], point: MeasuredPoint) -> float | None:
    """The measured rate of a point, if it was measured."""
    wanted = point._asdict()
    return next(
        (r["tokens_per_s"] for r in results if all(r[key] == wanted[key] for key in wanted)), None
    )


if __name__ == "__main__":
    typer.run(main)
