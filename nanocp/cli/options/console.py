"""Consoles of commands: results on standard output, progress on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import inf

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_WIDTH = 110
_SAY_EVERY_S = 10.0


def output() -> Console:
    """Standard output; files get lines of 110 columns."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)


def terminal() -> Console:
    """Standard error, apart from the result."""
    return Console(stderr=True)


def progress() -> Progress:
    """A transient progress bar on standard error, for terminals only."""
    console = terminal()
    return Progress(console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def said() -> Iterator[Callable[[str], None]]:
    """A printer of progress on standard error, outside a terminal each 10 s at most."""
    began_s, said_s = time.monotonic(), -inf
    with progress() as bars:
        task = bars.add_task("", total=None)

        def say(what: str) -> None:
            nonlocal said_s
            bars.update(task, description=what)
            now_s = time.monotonic()
            if not bars.console.is_terminal and now_s - said_s >= _SAY_EVERY_S:
                print(f"{now_s - began_s:.0f} s: {what}", file=sys.stderr, flush=True)
                said_s = now_s

        yield say


@contextmanager
def counted(description: str) -> Iterator[Callable[[int, int], None]]:
    """A transient bar on standard error; its caller says (done, total)."""
    with progress() as bar:
        task = bar.add_task(description, visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)


def print_claims(console: Console, claims: Iterable[tuple[str, bool]]) -> bool:
    """Print each claim and its truth; True if all hold."""
    all_hold = True
    for claim, holds in claims:
        console.print(f"{'holds' if holds else 'DOES NOT HOLD'}: {claim}", highlight=False)
        all_hold &= holds
    return all_hold


def request_progress(*notes: ProgressColumn, disable: bool = False) -> Progress:
    """A transient bar of finished requests on standard error, with `notes`."""
    return Progress(
        TextColumn("requests"),
        BarColumn(),
        MofNCompleteColumn(),
        *notes,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=terminal(),
        transient=True,
        disable=disable,
    )
