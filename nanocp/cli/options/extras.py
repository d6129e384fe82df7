"""A missing package of a command, as a sentence that names the extra."""

from __future__ import annotations

import sys
from typing import Any

import typer

from nanocp.cli.options.help import Group

EXTRAS = {
    "batch": "bench",
    "bench": "bench",
    "chaos": "chaos",
    "demo": "serve",
    "make-checkpoint": "serve",
    "overlap": "search",
    "plan": "serve",
    "prefill-flags": "serve",
    "profile": "serve",
    "serve": "serve",
    "simulate": "simulate",
}
"""The extra of pyproject.toml for an import; others need none."""
_OTHERS = {
    ("plan", "matplotlib"): "simulate",
    ("overlap", "torch"): "serve",
    ("profile", "highspy"): "search",
}
"""The extra of `plan --html`, `overlap run` and `profile --overlap`."""
_OWN = ("nanocp", "control_plane", "data_plane")


class Commands(Group):
    """The commands of `nanocp`."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; a missing package ends it with status 2."""
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            command, package = ctx.invoked_subcommand, (error.name or "").partition(".")[0]
            if command not in EXTRAS or package in _OWN:
                raise
            extra = _OTHERS.get((command, package), EXTRAS[command])
            print(
                f"nanocp {command}: the package {package} is not installed; "
                f"pip install '.[{extra}]' brings it",
                file=sys.stderr,
            )
            raise typer.Exit(2) from None
