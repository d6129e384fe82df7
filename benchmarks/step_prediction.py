"""Whether the cost model that `nanocp profile` fits here predicts the steps of the real service.

    python benchmarks/step_prediction.py [--quick] [--json PATH]

Enters: a preset's checkpoint. Leaves: measured and predicted step times of a few batches, and their
ratios. No claim. Does not know: how a step is computed or a constant fitted.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from machine import describe, write_results
from rich.console import Console
from rich.table import Table
from service import NUM_WARM_TOKENS, checkpoint_of, decode, random_prompts

from data_plane.profiling.batch import BatchRequest
from nanocp.serve.process import Serving, serving
from nanocp.simulator.cluster_file import load_cluster_file
from nanocp.simulator.cost import CostModel
from nanocp.simulator.fit.fit import CONSTANTS, loads_of

NUM_INSTANCES = 2
NUM_TOKENS = 32
"""Steps of each measurement."""
ROUNDS = 3
"""Measurements of each batch; the shortest counts, as in a profile: others on the machine only make
steps longer."""
LONG_LEN = 5000
"""From here on a request is held by two instances."""


class Batch(NamedTuple):
    """So many requests of one length, one of the two sides of LONG_LEN."""

    rows: int
    prompt_len: int


BATCHES = (
    Batch(2, 200),
    Batch(32, 200),
    Batch(8, 2000),
    Batch(1, 4000),
    Batch(1, 7500),
    Batch(4, 7500),
)


def main(
    quick: Annotated[
        bool, typer.Option(help="Under a minute: preset tiny, a quick profile.")
    ] = False,
    json: Annotated[
        Path | None, typer.Option(help="Write the results here, the machine beside it.")
    ] = None,
) -> None:
    """Profile, serve, compare."""
    console, load_before = Console(), os.getloadavg()[0]
    preset = "tiny" if quick else "small"
    checkpoint = checkpoint_of(preset)
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "nanocp.cli.main",
            "profile",
            str(checkpoint),
            "--out",
            folder,
        ]
        command += ["--instances", str(NUM_INSTANCES), *(["--quick"] if quick else [])]
        subprocess.run(command, check=True)
        model = CostModel(load_cluster_file(f"{folder}/cluster.yaml"), CONSTANTS)
    results = measure(checkpoint, model, console)
    show(results, console)
    if json is not None:
        write_results(json, results, describe(load_before) | {"preset": preset})


def measure(checkpoint: Path, model: CostModel, console: Console) -> list[dict[str, Any]]:
    """One service, batch after batch, round after round."""
    settings = {
        "scheduler.policy": "dual_balanced",
        "scheduler.cp_degree_buckets": [[LONG_LEN, 1]],
        "scheduler.cp_degree_max": NUM_INSTANCES,
        "cluster.num_frames": 512,
    }
    measured_us: dict[Batch, float] = {}
    with (
        console.status("serving") as status,
        serving(checkpoint, NUM_INSTANCES, settings, ray=False) as service,
    ):
        for _, batch in itertools.product(range(ROUNDS), BATCHES):
            status.update(f"{batch.rows} x {batch.prompt_len} tokens")
            us = _step_us(service, checkpoint, batch)
            measured_us[batch] = min(us, measured_us.get(batch, us))
    return [_result(batch, us, model) for batch, us in measured_us.items()]


def _result(batch: Batch, measured_us: float, model: CostModel) -> dict[str, Any]:
    predicted_us = model.step(loads_of(placed(batch), NUM_INSTANCES)).step_us
    return {
        **batch._asdict(),
        "cp_degree": _degree(batch),
        "measured_ms": round(measured_us / 1e3, 2),
        "predicted_ms": round(predicted_us / 1e3, 2),
        "ratio": round(predicted_us / measured_us, 3),
    }


def placed(batch: Batch) -> list[BatchRequest]:
    """Where the service puts the batch, half-way through the measurement."""
    length = batch.prompt_len + NUM_WARM_TOKENS + NUM_TOKENS // 2
    bindings = [
        tuple((row + step) % NUM_INSTANCES for step in range(_degree(batch)))
        for row in range(batch.rows)
    ]
    return [BatchRequest(length, binding) for binding in bindings]


def _degree(batch: Batch) -> int:
    return NUM_INSTANCES if batch.prompt_len >= LONG_LEN else 1


def _step_us(service: Serving, checkpoint: Path, batch: Batch) -> float:
    """Mean step in the steady state, of the instance that is slower."""
    samples: list[dict[tuple[str, str], float]] = []
    prompts = random_prompts(checkpoint, batch.rows, batch.prompt_len)
    asyncio.run(
        decode(
            service.target, prompts, NUM_TOKENS, at_edge=lambda: samples.append(service.metrics())
        )
    )

    def spent(name: str, engine: int) -> float:
        key = (f"nanocp:{name}", str(engine))
        return samples[1][key] - samples[0][key]

    engines = range(NUM_INSTANCES)
    return 1e6 * max(
        spent("step_seconds_sum", one) / spent("step_seconds_count", one) for one in engines
    )


def show(results: Sequence[dict[str, Any]], console: Console) -> None:
    """One line for each batch."""
    table = Table(title=f"a step of {NUM_INSTANCES} instances")
    for column in (
        "requests",
        "tokens each",
        "CP degree",
        "measured ms",
        "predicted ms",
        "predicted / measured",
    ):
        table.add_column(column, justify="right")
    for result in results:
        table.add_row(*(str(value) for value in result.values()))
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
