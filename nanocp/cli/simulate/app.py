"""`nanocp simulate`: its commands by name."""

from __future__ import annotations

import typer

from nanocp.cli.options.help import Command, Group
from nanocp.cli.options.typed import with_options
from nanocp.cli.simulate.replay import replay
from nanocp.cli.simulate.run import run
from nanocp.cli.simulate.sweep import sweep

app = typer.Typer(
    cls=Group, help="Policies on a simulated cluster, without a GPU.", invoke_without_command=True
)
app.callback()(with_options(run))
app.command(cls=Command)(with_options(sweep))
app.command(cls=Command)(replay)
