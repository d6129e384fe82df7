"""`nanocp overlap show`: lanes of windows by size, with reasons."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from nanocp.config.scheduler import SchedulerConfig


def show(
    config: Annotated[
        Path | None,
        typer.Option(help="The file of nanocp serve --config; nanocp profile --overlap makes one."),
    ] = None,
) -> None:
    """Print why windows of each size run in one lane or in two, and in which order."""
    from rich.table import Table

    from nanocp.cli.options.console import output
    from nanocp.config.file import load_config

    scheduler = load_config(config, {}).scheduler
    console = output()
    if scheduler.lanes != "measured":
        console.print(f"scheduler.lanes is {scheduler.lanes}: {_UNMEASURED[scheduler.lanes]}")
    if not scheduler.lane_table or scheduler.lanes not in ("measured", "off"):
        return
    table = Table(title="lanes of a window, by its fullest instance")
    for column in ("rows up to", "links up to", "two lanes / one", "lanes", "order", "why"):
        table.add_column(column, justify="left" if column in ("order", "why") else "right")
    for rows, links, percent, order in scheduler.lane_table:
        num_lanes = 1 + (scheduler.has_lanes and scheduler.lane_order(rows, links) > 0)
        numbers = str(rows), str(links), f"{percent / 100:.2f}", str(num_lanes)
        table.add_row(*numbers, order, reason(scheduler, percent))
    console.print(table)


_UNMEASURED = {
    "off": "every window runs in one lane",
    "always": "every window runs in two lanes",
    "random": "each window is drawn",
}


def reason(scheduler: SchedulerConfig, percent: int) -> str:
    """Why two lanes of this relative time run or not."""
    if percent > 100:
        return f"two lanes cost {percent - 100}%: halves cost more than the waits that they hide"
    saved, least = 100 - percent, scheduler.lane_gain_percent
    if saved < least:
        return f"two lanes save {saved}%, less than lane_gain_percent ({least})"
    return f"two lanes save {saved}%"
