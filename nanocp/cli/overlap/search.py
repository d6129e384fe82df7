"""`nanocp overlap search`: the best schedule of nano-operations, and how good any could be.

Enters: --paper, the only case with measured times; a bound of time. Leaves: a table, a schedule
file; exit status 1 if the schedule is further from the bound than it should be. Does not know: how
a schedule is found.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from nanocp.overlap.search import BestSchedule

LEAST_SHARE_OF_BOUND = 0.95


def search(
    paper: Annotated[
        bool, typer.Option("--paper", help="LLaMA-2 70B on 8 A100 by the paper's measured times.")
    ] = False,
    seconds: Annotated[float, typer.Option(min=1, help="Search for about as long.")] = 60.0,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the schedule there, as YAML.", dir_okay=False),
    ] = None,
) -> None:
    """Search for the best order and division of the GPU (NanoFlow, 4.1)."""
    from nanocp.cli.console import output, progress
    from nanocp.overlap import paper as nanoflow
    from nanocp.overlap import schedule
    from nanocp.overlap.search import search as find

    if not paper:
        raise typer.BadParameter("measured times are needed: today --paper is the only set of them")
    operations, interference = nanoflow.layer(), nanoflow.TABLE_3
    console = output()
    with progress() as bar:
        task = bar.add_task("searching", total=None)

        def better(found: BestSchedule) -> None:
            bar.update(task, description=f"searching: {found.gain:.3f} x so far")

        found = find(operations, interference, seconds, better)
    console.print(_table(found))
    share = found.fluid_us / found.schedule.period_us
    console.print(f"{share:.1%} of what any schedule could reach")
    if out is not None:
        schedule.write(out, found.schedule, operations, interference)
    if share < LEAST_SHARE_OF_BOUND:
        raise typer.Exit(1)


def _table(found: BestSchedule) -> Table:
    from rich.table import Table

    from nanocp.overlap import paper as nanoflow
    from nanocp.overlap.comparison import machine_seconds

    table = Table(title="A layer of LLaMA-2 70B, 2,048 tokens, 8 A100")
    for column in ("schedule", "us a layer", "gain", "tokens a second and GPU"):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    lines = (
        ("sequential, whole operations", found.sequential_us),
        ("stage I, before the GPU is divided", found.structure_us),
        ("stage II: the schedule", found.schedule.period_us),
        ("fluid bound: any mix at any time", found.fluid_us),
    )
    for name, us in lines:
        tokens = nanoflow.BATCH / machine_seconds(us) / nanoflow.MACHINE.num_gpus
        table.add_row(name, f"{us:,.0f}", f"{found.sequential_us / us:.3f}", f"{tokens:,.0f}")
    return table
