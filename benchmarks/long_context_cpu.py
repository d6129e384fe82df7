"""What a CP degree of 2 does to one long request beside short rows: step time on two instances.

    python benchmarks/long_context_cpu.py [--quick] [--json PATH]

Enters: a preset's checkpoint, its context length lifted. Leaves: step time and exchange share at
degree 1 and 2, and their ratio; exit status 1 if the claim does not hold. Does not know: how a step
is computed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json as json_format
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from machine import describe, write_results
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from service import checkpoint_of, decode, random_prompts

from nanocp.serve.process import Serving, serving

NUM_INSTANCES = 2
NUM_SHORT_ROWS = 8
SHORT_LEN = 200
MAX_TOKENS = 512
"""Limit of every request: the short rows run while the long one's KV is filled."""
MAX_RATIO = 0.65
"""Claim: step time at degree 2 over that at degree 1."""


@dataclass(frozen=True, slots=True)
class ContextShape:
    """What is measured."""

    preset: str
    long_len: int
    num_tokens: int
    """Steps of each measurement."""
    rounds: int
    """Measurements at each degree, in turn; their median counts."""


FULL = ContextShape("small", 128 * 1024, 16, 3)
QUICK = ContextShape("tiny", 16 * 1024, 16, 1)


@dataclass(frozen=True, slots=True)
class ContextStep:
    """The mean step of a measurement, of the instance that is slower."""

    step_ms: float
    exchange_share: float
    """Waiting for the exchange, mean over the instances."""
    tpot_ms: float
    """The long request's, as its client sees it."""


def main(
    quick: Annotated[
        bool, typer.Option(help="Under a minute: preset tiny, 16k tokens, one round; no claim.")
    ] = False,
    kv_tokens: Annotated[int | None, typer.Option(help="KV tokens of the long request.")] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write the results here, the machine beside it.")
    ] = None,
) -> None:
    """Measure degree 1 and degree 2 in turn, so that a drift of the machine meets both."""
    console, load_before = Console(), os.getloadavg()[0]
    shape = QUICK if quick else FULL
    if kv_tokens is not None:
        shape = ContextShape(shape.preset, kv_tokens, shape.num_tokens, shape.rounds)
    steps = measure(shape, console)
    results = [_result(shape, degree, steps[degree]) for degree in sorted(steps)]
    ratio = results[1]["step_ms"] / results[0]["step_ms"]
    show(results, ratio, console)
    if json is not None:
        write_results(
            json,
            results,
            describe(load_before) | {"preset": shape.preset, "ratio": round(ratio, 3)},
        )
    if quick:
        console.print(
            "--quick: preset tiny, 16k tokens, one round. The claim is about the full run."
        )
    elif ratio > MAX_RATIO:
        raise typer.Exit(1)


def measure(shape: ContextShape, console: Console) -> dict[int, list[ContextStep]]:
    """By degree, one ContextStep a round."""
    checkpoint = long_checkpoint(shape.preset, shape.long_len)
    steps: dict[int, list[ContextStep]] = {1: [], 2: []}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("starting", total=2 * shape.rounds)
        for _, degree in itertools.product(range(shape.rounds), steps):
            progress.update(task, description=f"degree {degree}")
            with _serving(checkpoint, shape, degree) as service:
                steps[degree].append(_measure(service, checkpoint, shape))
            progress.advance(task)
    return steps


def long_checkpoint(preset: str, long_len: int) -> Path:
    """The preset's checkpoint with room for the long request: the same files but for config.json.

    With synthetic KV nothing was trained on any length, and rope stretches to every position.
    """
    source = checkpoint_of(preset)
    path = source.with_name(f"{preset}-long")
    path.mkdir(exist_ok=True)
    for file in source.iterdir():
        if file.name != "config.json" and not (path / file.name).is_symlink():
            (path / file.name).symlink_to(file)
    config = json_format.loads((source / "config.json").read_text())
    config["max_position_embeddings"] = _max_model_len(long_len)
    (path / "config.json").write_text(json_format.dumps(config, indent=2))
    return path


def _max_model_len(long_len: int) -> int:
    return long_len + MAX_TOKENS


@contextlib.contextmanager
def _serving(checkpoint: Path, shape: ContextShape, degree: int) -> Iterator[Serving]:
    """Serve on two instances of one thread, each alone on its core.

    The long request is over `degree` of them, the short ones are on one.
    """
    settings = {
        "cluster.max_model_len": _max_model_len(shape.long_len),
        # All of it on one instance, and the short rows.
        "cluster.num_frames": (shape.long_len + (1 + NUM_SHORT_ROWS) * (SHORT_LEN + MAX_TOKENS))
        // 64
        + 2 * 9,
        "cluster.bounds.max_rows": 16,
        "scheduler.cp_degree_buckets": [[shape.long_len, 1]],
        "scheduler.cp_degree_max": degree,
        "data_plane.threads_per_instance": 1,
    }
    with serving(
        checkpoint, NUM_INSTANCES, settings, "--policy", "dual_balanced", ray=False
    ) as service:
        cores = sorted(os.sched_getaffinity(0))
        for pid, core in zip(service.instance_pids(), itertools.cycle(cores), strict=False):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), {core})
        yield service


def _measure(service: Serving, checkpoint: Path, shape: ContextShape) -> ContextStep:
    prompts = random_prompts(checkpoint, 1, shape.long_len) + random_prompts(
        checkpoint, NUM_SHORT_ROWS, SHORT_LEN
    )
    samples: list[dict[tuple[str, str], float]] = []
    state = asyncio.run(
        decode(
            service.target,
            prompts,
            shape.num_tokens,
            MAX_TOKENS,
            lambda: samples.append(service.metrics()),
        )
    )

    def spent(name: str, engine: str) -> float:
        key = (f"nanocp:{name}", engine)
        return samples[1][key] - samples[0][key]

    engines = [str(engine) for engine in range(NUM_INSTANCES)]
    step_s = [
        spent("step_seconds_sum", engine) / spent("step_seconds_count", engine)
        for engine in engines
    ]
    waited_s = [spent("step_exchange_seconds_sum", engine) for engine in engines]
    share = sum(waited_s) / sum(spent("step_seconds_sum", engine) for engine in engines)
    inside = [at for at in state.arrivals_s[0] if state.begin_s <= at <= state.end_s]
    return ContextStep(
        1000 * max(step_s), share, 1000 * (inside[-1] - inside[0]) / (len(inside) - 1)
    )


def _result(shape: ContextShape, degree: int, steps: list[ContextStep]) -> dict[str, Any]:
    return {
        "instances": NUM_INSTANCES,
        "cp_degree": degree,
        "kv_tokens": shape.long_len,
        "short_rows": NUM_SHORT_ROWS,
        "step_ms": round(median(step.step_ms for step in steps), 2),
        "exchange_share": round(median(step.exchange_share for step in steps), 3),
        "tpot_ms": round(median(step.tpot_ms for step in steps), 2),
    }


def show(results: list[dict[str, Any]], ratio: float, console: Console) -> None:
    """One line for each degree, and the ratio."""
    table = Table(
        title=f"one request of {results[0]['kv_tokens']} tokens beside {NUM_SHORT_ROWS} short rows"
    )
    for column in (
        "CP degree",
        "step ms",
        "waiting for the exchange",
        "TPOT ms of the long request",
    ):
        table.add_column(column, justify="right")
    for result in results:
        step_ms, share = f"{result['step_ms']:.1f}", f"{result['exchange_share']:.1%}"
        table.add_row(str(result["cp_degree"]), step_ms, share, f"{result['tpot_ms']:.1f}")
    console.print(table)
    console.print(f"step time at degree 2 / degree 1: {ratio:.3f} (claimed: at most {MAX_RATIO})")


if __name__ == "__main__":
    typer.run(main)
