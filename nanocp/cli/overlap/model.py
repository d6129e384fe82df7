"""`nanocp overlap model`: equations 1 to 5 of NanoFlow.

Exit status: 1 if the KV does not fit, or with --paper if a number differs too much.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanocp.config.choices import Positive

if TYPE_CHECKING:
    from rich.table import Table

    from nanocp.overlap.comparison import Comparison
    from nanocp.overlap.roofline import DenseModel, Machine, Requests


@dataclass(frozen=True, slots=True)
class Iteration:
    """An iteration on GPUs."""

    gpus: Positive = 8
    """How many GPUs, with tensor parallelism."""
    prompt: Positive = 512
    """Mean prompt, in tokens."""
    output: Positive = 1024
    """Mean output, in tokens."""
    batch: Positive = 2048
    """Tokens of an iteration."""


def model(
    iteration: Iteration,
    paper: Annotated[
        bool, typer.Option("--paper", help="The paper's case, beside what the paper prints.")
    ] = False,
    gpu: Annotated[str, typer.Option(help="A GPU of the paper's Table 1.")] = "A100-80",
    name: Annotated[str, typer.Option("--model", help="A dense model.")] = "LLaMA-2 70B",
) -> None:
    """Print which resource bounds an iteration, and the best throughput."""
    from nanocp.cli.options.console import output as standard_output
    from nanocp.overlap.comparison import compare
    from nanocp.overlap.interference import RESOURCES
    from nanocp.overlap.roofline import Requests, demands, kv_gb

    console = standard_output()
    if paper:
        compared = compare()
        for title in dict.fromkeys(each.table for each in compared):
            console.print(_compared(title, [each for each in compared if each.table == title]))
        if wrong := [each for each in compared if each.holds is False]:
            console.print(f"{len(wrong)} of {len(compared)} numbers differ by more than they may")
            raise typer.Exit(1)
        judged = sum(each.holds is not None for each in compared)
        console.print(f"All {judged} numbers that are judged are the paper's")
        return
    gpus, batch = iteration.gpus, iteration.batch
    machine, dense = machine_of(gpu, gpus), model_of(name)
    requests = Requests(iteration.prompt, iteration.output)
    console.print(_demands(machine, dense, requests, batch))
    total_ms = machine.total_ms(demands(dense, requests, batch, gpus))
    slowest = max(total_ms)
    console.print(
        f"{RESOURCES[total_ms.index(slowest)]}-bound: the columns add up to "
        + ", ".join(f"{ms:,.1f} ms of {name}" for ms, name in zip(total_ms, RESOURCES, strict=True))
        + f". At most {1e3 * batch / slowest / gpus:,.0f} tokens a second and GPU; equation 5, for "
        f"compute alone, says {machine.optimal_tokens_per_s(dense):,.0f}."
    )
    times = machine.iteration(dense, batch)
    console.print(
        f"Equations 1 to 3, where all memory is read: {times.memory_ms:,.1f} ms of memory, "
        f"{times.compute_ms:,.1f} ms of compute, {times.network_ms:,.1f} ms of network. Over "
        f"compute, memory is {times.memory_of_compute:.2f} (equation 4, Figure 3) and the network "
        f"{times.network_ms / times.compute_ms:.2f} (Figure 2)."
    )
    needed, room = kv_gb(dense, requests, batch), machine.kv_room_gb(dense)
    if needed > room:
        console.print(
            f"Does not fit: KV of {needed:,.0f} GB, where the weights leave {max(room, 0):,.0f} GB "
            f"of {gpus} {gpu}. Give more gpus, or a smaller batch."
        )
        raise typer.Exit(1)


def machine_of(gpu: str, num_gpus: int) -> Machine:
    """GPUs by name in the paper's Table 1. Raises ValueError."""
    from nanocp.overlap.paper import TABLE_1
    from nanocp.overlap.roofline import Machine

    return Machine(_named({card.name: card for card, _ in TABLE_1}, gpu), num_gpus)


def model_of(name: str) -> DenseModel:
    """The dense model of that name. Raises ValueError."""
    from nanocp.overlap.roofline import MODELS

    dense: DenseModel = _named({each.name: each for each in MODELS}, name)
    return dense


def _named(known: dict[str, Any], name: str) -> Any:
    if name not in known:
        raise ValueError(f"{name!r} is not known; it must be one of {', '.join(known)}")
    return known[name]


def _demands(machine: Machine, dense: DenseModel, requests: Requests, batch: int) -> Table:
    from rich.table import Table

    from nanocp.overlap.roofline import demands

    table = Table(title=f"{dense.name} on {machine.num_gpus} {machine.gpu.name}, {batch} tokens")
    for column in ("operation", "GFLOP", "memory, GB", "network, GB"):
        table.add_column(column, justify="left" if column == "operation" else "right")
    for column in ("compute, ms", "memory, ms", "network, ms"):
        table.add_column(column, justify="right")
    for demand in demands(dense, requests, batch, machine.num_gpus):
        times = machine.times(demand)
        sizes = (f"{value:,.1f}" for value in demand[1:])
        table.add_row(demand.name, *sizes, *(f"{value:,.2f}" for value in times))
    return table


def _compared(title: str, compared: list[Comparison]) -> Table:
    from rich.table import Table

    table = Table(title=title)
    for column in ("what", "paper", "here", "holds"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for each in compared:
        table.add_row(
            each.what, each.paper, each.here, {True: "yes", False: "no", None: "-"}[each.holds]
        )
    return table
