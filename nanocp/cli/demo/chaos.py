"""`nanocp chaos`: a local service under load, whose members are killed and stopped."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console


def chaos(
    checkpoint: Annotated[
        Path, typer.Argument(help="A checkpoint folder, as `nanocp make-checkpoint` writes it.")
    ],
    minutes: Annotated[float, typer.Option(help="Time in which members are lost.")] = 1.0,
    seed: Annotated[int, typer.Option(help="What is lost when, and what clients ask.")] = 0,
    instances: Annotated[int, typer.Option(help="Instances of the service.")] = 4,
    spares: Annotated[int, typer.Option(help="Processes that stand by for lost instances.")] = 0,
    processes: Annotated[
        bool,
        typer.Option(help="Run two front ends and the controller as processes, to be lost."),
    ] = False,
    json: Annotated[
        Path | None, typer.Option(help="Write the result to this file, as a JSON object.")
    ] = None,
) -> None:
    """Kill and stop members of a service under load, and judge every token of every request.

    Instances and the prefill are killed, or stopped, alone or several at once, also in a recovery.
    With --processes so are front ends and the controller; clients go on at another front end.
    Requests are of every kind, by gRPC and HTTP; `transformers` is the reference.
    """
    from data_plane.model.config import ModelConfig
    from nanocp.cli.demo.chaos_run import ChaosRun, play
    from nanocp.cli.demo.judge import ReferenceJudge
    from nanocp.cli.demo.report import claims_of
    from nanocp.cli.options.console import counted, output, print_claims, terminal

    said, console = terminal(), output()
    settings = {
        "cluster.num_frames": 128,
        "cluster.max_model_len": min(2048, ModelConfig.from_folder(checkpoint).max_len),
        "cluster.spares": spares,
        "data_plane.sampling": "inverse",  # as the judge draws
    }
    run = ChaosRun(
        checkpoint,
        instances=instances,
        seconds=60 * minutes,
        seed=seed,
        settings=settings,
        has_processes=processes,
    )
    try:
        with counted("judged") as judged:
            result = play(run, ReferenceJudge, said.print, judged)
    except RuntimeError as error:
        print(f"nanocp chaos: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    _show(result, console)
    if json is not None:
        from json import dumps

        json.write_text(dumps(result, indent=1) + "\n")
    raise typer.Exit(not print_claims(console, claims_of(result)))


def _show(result: dict[str, Any], console: Console) -> None:
    from rich.table import Table

    table = Table("loss", "times", "pause p50 s", "pause max s", title="Pauses by kind of loss")
    for kind, pauses in result["by_kind"].items():
        table.add_row(kind, *map(str, pauses.values()))
    console.print(table)
    for name, value in result.items():
        if name not in ("by_kind", "requests_by_kind") and value != []:
            console.print(f"{name.replace('_', ' ')}: {value}", highlight=False, markup=False)
