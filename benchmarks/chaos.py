"""`nanocp chaos` on a service of four real instances, with the machine beside its result.

    python benchmarks/chaos.py [CHECKPOINT] [--quick] [--minutes M] [--seed S] [--spares N]
        [--processes] [--json PATH]

Enters: a checkpoint, by default the tiny one. Leaves: pauses by kind of loss, what was lost, wrong,
doubled or left; exit status 1 if a claim of `nanocp chaos` does not hold. Does not know: how a
service recovers.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from machine import describe, write_results
from service import checkpoint_of

from nanocp.chaos.judge import ReferenceJudge
from nanocp.chaos.report import claims_of
from nanocp.chaos.run import ChaosRun, play
from nanocp.cli.console import counted, output, print_claims

SETTINGS = {"cluster.num_frames": 128, "cluster.max_model_len": 2048}


def main(
    checkpoint: Annotated[Path | None, typer.Argument(help="A folder; by default tiny's.")] = None,
    quick: Annotated[bool, typer.Option(help="20 seconds of losses: about a minute.")] = False,
    minutes: Annotated[float, typer.Option(help="Time in which members are lost.")] = 30.0,
    seed: Annotated[int, typer.Option(help="Of the requests and the losses.")] = 0,
    spares: Annotated[int, typer.Option(help="Processes that stand by for lost instances.")] = 0,
    processes: Annotated[
        bool, typer.Option(help="Front ends and the controller are processes, which are lost too.")
    ] = False,
    json: Annotated[
        Path | None, typer.Option(help="Write the result here, the machine beside it.")
    ] = None,
) -> None:
    """Play chaos; the reference model judges every token."""
    load_before, console = os.getloadavg()[0], output()
    checkpoint = checkpoint or checkpoint_of("tiny")
    run = ChaosRun(
        checkpoint,
        seconds=20.0 if quick else 60 * minutes,
        seed=seed,
        settings={**SETTINGS, "cluster.spares": spares},
        has_processes=processes,
    )
    with counted("judged") as judged:
        result = play(run, ReferenceJudge, lambda step: print(step, file=sys.stderr), judged)
    result |= {"checkpoint": checkpoint.name, "spares": spares, "processes": processes}
    if json is not None:
        write_results(json, [result], describe(load_before))
    for name, value in result.items():
        console.print(f"{name}: {value}", highlight=False, markup=False)
    raise typer.Exit(not print_claims(console, claims_of(result)))


if __name__ == "__main__":
    typer.run(main)
