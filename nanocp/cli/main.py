"""The command `nanocp`: every command by its name, with late imports."""

from __future__ import annotations

from typing import Annotated

import typer

from nanocp.cli.ask.batch import batch
from nanocp.cli.ask.generate import generate
from nanocp.cli.bench.app import app as bench
from nanocp.cli.checkpoint.make_checkpoint import make_checkpoint
from nanocp.cli.checkpoint.prefill_flags import prefill_flags
from nanocp.cli.checkpoint.profile import profile
from nanocp.cli.demo.chaos import chaos
from nanocp.cli.demo.demo import demo
from nanocp.cli.operate.config import config
from nanocp.cli.operate.experts import experts
from nanocp.cli.operate.seats import abort, drain, layout, scale, upgrade
from nanocp.cli.operate.top import status, top
from nanocp.cli.operate.why import why
from nanocp.cli.options.extras import Commands
from nanocp.cli.options.help import Command
from nanocp.cli.options.typed import with_options
from nanocp.cli.options.vllm_flags import VllmCommand
from nanocp.cli.overlap.app import app as overlap
from nanocp.cli.plan.app import plan
from nanocp.cli.serve.serve import serve
from nanocp.cli.simulate.app import app as simulate

app = typer.Typer(
    name="nanocp",
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from importlib.metadata import version

        print(f"nanocp {version('nanocp')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    """A decode cluster for Mixture-of-Experts language models with dynamic context parallelism."""


app.command(cls=VllmCommand)(serve)
for command in (
    config,
    generate,
    batch,
    status,
    top,
    why,
    experts,
    abort,
    make_checkpoint,
    prefill_flags,
    with_options(plan),
    profile,
    demo,
    chaos,
    drain,
    scale,
    upgrade,
    layout,
):
    app.command(cls=Command)(command)
app.add_typer(bench, name="bench")
app.add_typer(simulate, name="simulate")
app.add_typer(overlap, name="overlap")

if __name__ == "__main__":
    app()
