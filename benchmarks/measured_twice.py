"""Two ways of doing the same, each measured twice: one measurement chooses, the other judges.

Enters: times of both ways. Leaves: which way is chosen, what that costs, and which points are too
noisy to judge. Does not know: what the ways are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

MAX_NOISE = 1.15
"""Two measurements of one point may differ so much; beyond it nothing is judged."""
MAX_REGRET = 1.05
MIN_HIDDEN = 0.5
"""Claim: at least this share of the waits is hidden where they are as long as compute."""
MIN_RIGHT = 0.9
"""Claim: the chosen way is within 5% of the better one at 90% of the points."""


class Ways(NamedTuple):
    """Microseconds of both ways, which were taken by turns."""

    plain_us: float
    other_us: float


def point_of(first: Ways, second: Ways, *, other_is_chosen: bool) -> dict[str, Any]:
    """What a point shows: its choice, made from `first`, is judged by `second`."""
    return {
        "ratio": round(
            min(first.other_us, second.other_us) / min(first.plain_us, second.plain_us), 3
        ),
        "chosen": 1 + other_is_chosen,
        "chosen_of_plain": round(second[other_is_chosen] / second.plain_us, 3),
        "regret": round(second[other_is_chosen] / min(second), 3),
        "noise": round(max(max(a, b) / min(a, b) for a, b in zip(first, second, strict=True)), 3),
    }


CANNOT_JUDGE = 2
"""Exit status of a run that was too noisy to judge: it is no success."""


def judged(points: list[dict[str, Any]], console: Console) -> list[dict[str, Any]]:
    """The points that can be judged.

    Exits with status 2 (`CANNOT_JUDGE`), after a sentence, if there is none or most cannot.
    """
    quiet = [point for point in points if point["noise"] <= MAX_NOISE]
    if quiet and 2 * len(quiet) >= len(points):
        return quiet
    console.print(
        f"cannot judge: {len(points) - len(quiet)} of {len(points)} points differ by more than "
        f"{MAX_NOISE:.2f} between two measurements; run it on a quiet machine"
    )
    raise typer.Exit(CANNOT_JUDGE)


def claims_of_choices(points: list[dict[str, Any]], max_of_plain: float) -> list[tuple[str, bool]]:
    """What is claimed of the choice, and whether it holds; nothing without points.

    max_of_plain: most that the choice may take of the plain way where that is the better one.
    """
    if not points:
        return []
    num_right = sum(point["regret"] <= MAX_REGRET for point in points)
    claims = [
        (
            f"the choice is within 5% of the better way at {num_right} of {len(points)} points, "
            f"at least {MIN_RIGHT:.0%}",
            num_right >= MIN_RIGHT * len(points),
        )
    ]
    nothing = [point["chosen_of_plain"] for point in points if point["ratio"] >= 1]
    if nothing:
        claims.append(
            (
                f"where nothing is to be won the choice takes {max(nothing):.2f} of the plain way, "
                f"at most {max_of_plain}",
                max(nothing) <= max_of_plain,
            )
        )
    return claims


def claims_of_long_waits(
    points: Iterable[tuple[str, dict[str, Any]]], ways: str, max_ratio: float
) -> Iterator[tuple[str, bool]]:
    """What is claimed where waits are as long as compute, and whether it holds.

    points: (what point it is, the point). ways: the sentence with {} for the ratio of the ways.
    """
    for at, point in points:
        ratio, hidden = point["ratio"], point["hidden"]
        yield f"{at}: {ways.format(ratio)}, at most {max_ratio}", ratio <= max_ratio
        yield f"{at}: {hidden} of it is hidden, at least {MIN_HIDDEN}", hidden >= MIN_HIDDEN


def show(title: str, points: list[dict[str, Any]], console: Console) -> None:
    """One line for each point."""
    table = Table(title=title, box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for name in points[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for point in points:
        table.add_row(*map(str, point.values()))
    console.print(table)
