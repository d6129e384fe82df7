"""Consoles of commands: results on standard output, progress on standard error.

Enters: nothing. Leaves: consoles of rich. Does not know: what is printed.
"""

from __future__ import annotations

from rich.console import Console
from rich.progress import Progress

_WIDTH = 110


def output() -> Console:
    """Standard output; a file gets lines of 110 columns."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)


def terminal() -> Console:
    """Standard error, so that the result stands alone on standard output."""
    return Console(stderr=True)


def progress() -> Progress:
    """A progress bar on standard error that leaves nothing behind."""
    return Progress(console=terminal(), transient=True)
