"""`nanocp overlap search`: the best schedule, and a bound for all.

Exit status: with --paper 1 if the schedule is too far from the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nanocp.cli.overlap.model import Iteration
from nanocp.config.choices import Positive

if TYPE_CHECKING:
    from rich.table import Table

    from nanocp.overlap.interference import Interference
    from nanocp.overlap.operations import Operation
    from nanocp.overlap.schedule import Schedule
    from nanocp.overlap.search import BestSchedule

LEAST_SHARE_OF_BOUND = 0.95
_TILE = 128
"""Tokens of a GEMM's tile, as in the paper."""
_KV_TOKENS, _LINKS = 300_000, 4
"""With --cluster: KV tokens that each instance reads, and rows that it sends."""


@dataclass(frozen=True)
class _Case:
    title: str
    forms: Sequence[Sequence[Operation]]
    step: float
    interference: Interference
    tokens_per_layer: float
    write: Callable[[Path, Schedule], None] | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of an instance of a cluster."""

    constants: str = ""
    """With --cluster: a set of its file. Default: operators, or fitted."""
    rows: Positive = 64
    """With --cluster: rows of each instance."""


def search(
    iteration: Iteration,
    layer: Layer,
    paper: Annotated[
        bool, typer.Option("--paper", help="LLaMA-2 70B on 8 A100 by the paper's measured times.")
    ] = False,
    model: Annotated[
        str, typer.Option(help="A dense model, by the data sheet of --gpu; see overlap model.")
    ] = "",
    gpu: Annotated[str, typer.Option(help="With --model.")] = "H200",
    cluster: Annotated[
        str,
        typer.Option(
            help="An MoE layer of a simulated cluster, for nanocp simulate --set schedule=FILE."
        ),
    ] = "",
    seconds: Annotated[float, typer.Option(min=1, help="Search for about as long.")] = 60.0,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --cluster: write it there, YAML.", dir_okay=False),
    ] = None,
) -> None:
    """Search for the best order and division of the GPU (NanoFlow, 4.1)."""
    from nanocp.cli.options.console import output as standard_output
    from nanocp.cli.options.console import progress
    from nanocp.overlap.search import search as find

    if paper + bool(model) + bool(cluster) != 1:
        raise ValueError("give one of --paper, --model and --cluster")
    if out is not None and not cluster:
        raise ValueError("--out is for --cluster: nothing reads the schedule of a dense model")
    if cluster:
        case = _of_cluster(cluster, layer.constants, layer.rows)
    else:
        case = _of_paper() if paper else _of_model(model, gpu, iteration)
    console = standard_output()
    with progress() as bar:
        task = bar.add_task("searching", total=None)

        def better(found: BestSchedule) -> None:
            bar.update(task, description=f"searching: {found.gain:.3f} x so far")

        found = find(case.forms, case.step, case.interference, seconds, better)
    console.print(_table(case, found))
    share = found.fluid_us / found.schedule.period_us
    console.print(f"{share:.1%} of what any schedule could reach")
    console.print(f"Parts of the GPU cost what they do {case.interference.source}.")
    if out is not None and case.write is not None:
        case.write(out, found.schedule)
    if paper and share < LEAST_SHARE_OF_BOUND:
        raise typer.Exit(1)


def _of_paper() -> _Case:
    from nanocp.overlap import paper
    from nanocp.overlap.layers import collective_forms

    return _Case(
        "A layer of LLaMA-2 70B, 2,048 tokens, 8 A100",
        collective_forms(paper.layer()),
        _TILE / paper.BATCH,
        paper.TABLE_3,
        paper.BATCH / paper.LLAMA_2_70B.num_layers / paper.MACHINE.num_gpus,
    )


def _of_model(model: str, gpu: str, iteration: Iteration) -> _Case:
    from nanocp.cli.overlap.model import machine_of, model_of
    from nanocp.overlap import paper
    from nanocp.overlap.layers import collective_forms, roofline_layer
    from nanocp.overlap.roofline import Requests

    dense, gpus, batch = model_of(model), iteration.gpus, iteration.batch
    requests = Requests(iteration.prompt, iteration.output)
    operations = roofline_layer(machine_of(gpu, gpus), dense, requests, batch)
    return _Case(
        f"A layer of {model}, {batch:,} tokens, {gpus} {gpu}, by the data sheet",
        collective_forms(operations),
        _TILE / batch,
        paper.TABLE_3,
        batch / dense.num_layers / gpus,
    )


def _of_cluster(cluster: str, constants: str, rows: int) -> _Case:
    from nanocp.simulator.costs import nano_batches
    from nanocp.simulator.costs.cluster_file import load_cluster_file
    from nanocp.simulator.costs.cost import CostModel

    file = load_cluster_file(cluster)
    constants = constants or file.default_constants
    model = CostModel(file, constants)
    case = nano_batches.Case(cluster, constants, rows, _KV_TOKENS, _LINKS)
    return _Case(
        f"An MoE layer of {cluster}, {rows} rows and {_KV_TOKENS:,} KV tokens an instance",
        [nano_batches.layer_operations(model, case.loads)],
        1 / rows,
        model.interference,
        rows / file.model.num_layers,
        lambda path, found: nano_batches.write(path, found, case, model),
    )


def _table(case: _Case, found: BestSchedule) -> Table:
    from rich.table import Table

    table = Table(title=case.title)
    for column in ("schedule", "us a layer", "gain", "tokens a second and GPU"):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    lines = (
        ("sequential, whole operations", found.sequential_us),
        ("stage I, before the GPU is divided", found.structure_us),
        ("stage II: the schedule", found.schedule.period_us),
        ("fluid bound: any mix at any time", found.fluid_us),
    )
    for name, us in lines:
        tokens = 1e6 * case.tokens_per_layer / us
        table.add_row(name, f"{us:,.0f}", f"{found.sequential_us / us:.3f}", f"{tokens:,.0f}")
    return table
