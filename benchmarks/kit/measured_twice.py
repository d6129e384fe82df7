"""Two ways of doing the same, each measured twice: one measurement chooses, the other judges.

Enters: times of both ways. Leaves: which way is chosen, what that costs, and which points are too
noisy to judge. Does not know: what the ways are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from benchmarks.kit.bench import Claim, at_least, at_most

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


def quiet(points: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """The points that can be judged, and why none can; that is empty unless most cannot."""
    judged = [point for point in points if point["noise"] <= MAX_NOISE]
    if judged and 2 * len(judged) >= len(points):
        return judged, ""
    return [], (
        f"{len(points) - len(judged)} of {len(points)} points differ by more than {MAX_NOISE:.2f} "
        "between two measurements; run it on a quiet machine"
    )


def claims_of_choices(points: list[dict[str, Any]], max_of_plain: float) -> Iterator[Claim]:
    """What is claimed of the choice; nothing without points.

    max_of_plain: most that the choice may take of the plain way where that is the better one.
    """
    if not points:
        return
    share = sum(point["regret"] <= MAX_REGRET for point in points) / len(points)
    what = f"the choice is within 5% of the better way at {{}} of {len(points)} points"
    yield at_least(what, share, MIN_RIGHT)
    nothing = [point["chosen_of_plain"] for point in points if point["ratio"] >= 1]
    if nothing:
        what = "where nothing is to be won the choice takes {} of the plain way"
        yield at_most(what, max(nothing), max_of_plain)


def claims_of_long_waits(
    points: Iterable[tuple[str, dict[str, Any]]], ways: str, max_ratio: float
) -> Iterator[Claim]:
    """What is claimed where waits are as long as compute.

    points: (what point it is, the point). ways: the sentence with {} for the ratio of the ways.
    """
    for at, point in points:
        yield at_most(f"{at}: {ways}", point["ratio"], max_ratio)
        yield at_least(f"{at}: {{}} of it is hidden", point["hidden"], MIN_HIDDEN)
