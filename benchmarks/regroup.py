"""Terms end each second, then members are lost: exactness, and the pauses.

    python benchmarks/regroup.py [--quick] [--minutes M] [--seed S] [--json PATH]

Enters: the tiny checkpoint, a service of four real instances without Ray, the clients of `nanocp
chaos`. Leaves: tables, and a list of the two phases' results; exit status 1 if a claim does not
hold. Does not know: what a term is made of.

In the phase `regrouping` every instance survives; the phase `losing` is `nanocp chaos`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from machine import describe, write_results
from rich.console import Console
from service import checkpoint_of

from nanocp.chaos.in_process import Disturbed, play_in_process
from nanocp.chaos.judge import Judge, ReferenceJudge
from nanocp.chaos.report import claims_of
from nanocp.chaos.run import ChaosRun, play
from nanocp.cli.console import output, print_claims
from nanocp.config import ClusterConfig, Config, SchedulerConfig, ServiceConfig

NUM_INSTANCES = 4
PAUSE_S = 1.0
"""Time from one end of a term to the next."""
MAX_REGROUP_S = 1.0
JUDGED_S = 60.0
"""Times are judged in runs of this length or more."""
CONFIG = Config(
    cluster=ClusterConfig(num_instances=NUM_INSTANCES, num_frames=128, max_model_len=2048),
    scheduler=SchedulerConfig(policy="chaos"),
    service=ServiceConfig(grpc_port=0, metrics_port=0, http_port=0),
)


def main(
    quick: Annotated[bool, typer.Option(help="10 and 25 seconds: about a minute.")] = False,
    minutes: Annotated[float, typer.Option(help="Of each phase.")] = 5.0,
    seed: Annotated[int, typer.Option(help="Of the requests and the losses.")] = 0,
    json: Annotated[
        Path | None, typer.Option(help="Write the results here, the machine beside it.")
    ] = None,
) -> None:
    """Play both phases; the reference model judges every output."""
    load_before = os.getloadavg()[0]
    console = output()
    checkpoint = checkpoint_of("tiny")
    judge = ReferenceJudge(checkpoint)
    settings = {"cluster.num_frames": 128, "cluster.max_model_len": 2048}
    run = ChaosRun(
        checkpoint, NUM_INSTANCES, 25.0 if quick else 60 * minutes, seed, settings=settings
    )
    results = [
        {"phase": "regrouping", **regrouping(checkpoint, judge, 10.0 if quick else 60 * minutes)},
        {"phase": "losing", **play(run, lambda: judge, lambda step: print(step, file=sys.stderr))},
    ]
    if json is not None:
        write_results(json, results, describe(load_before))
    shown = [show(result, console) for result in results]
    raise typer.Exit(0 if all(shown) else 1)


def regrouping(checkpoint: Path, judge: Judge, seconds: float) -> dict[str, Any]:
    """The load on a service of its own, whose every term ends after a second."""

    async def regroup(disturbed: Disturbed, until_s: float) -> None:
        while time.monotonic() < until_s:
            await asyncio.sleep(PAUSE_S)
            disturbed.service.regroup()
            disturbed.note("a term ended")

    run = ChaosRun(checkpoint, seconds=seconds)
    result, disturbed = play_in_process(CONFIG, run, judge, regroup)
    num, sum_s = (disturbed.sample(f"nanocp:recovery_seconds_{each}") for each in ("count", "sum"))
    return result | {"losses": disturbed.service.term - 1, "regroup_s": round(sum_s / num, 3)}


def show(result: dict[str, Any], console: Console) -> bool:
    """Print a phase's numbers and claims; True if all claims hold."""
    for name, value in result.items():
        console.print(f"{name}: {value}", highlight=False, markup=False)
    claims = claims_of(result)
    mean_s = result.get("regroup_s")
    if mean_s is not None and result["seconds"] >= JUDGED_S:
        sentence = f"{mean_s} s from the end of a term to the next one, at most {MAX_REGROUP_S}"
        claims.append((sentence, mean_s <= MAX_REGROUP_S))
    return print_claims(console, claims)


if __name__ == "__main__":
    typer.run(main)
