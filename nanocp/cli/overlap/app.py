"""`nanocp overlap`: its commands by name."""

from __future__ import annotations

import typer

from nanocp.cli.options.help import Command, Group
from nanocp.cli.options.typed import with_options
from nanocp.cli.overlap.model import model
from nanocp.cli.overlap.run import run
from nanocp.cli.overlap.search import search
from nanocp.cli.overlap.show import show

app = typer.Typer(
    cls=Group,
    help="What overlapping compute, memory and network inside a GPU is worth (NanoFlow, DynaFlow).",
    no_args_is_help=True,
)
app.command(cls=Command)(with_options(model))
app.command(cls=Command)(with_options(search))
app.command(cls=Command)(with_options(run))
app.command(cls=Command)(show)
