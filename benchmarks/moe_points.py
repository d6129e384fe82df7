"""What benchmarks/moe_cpu.py measures, and what must hold there.

Enters: nothing. Leaves: points, claims. Does not know: how a point is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

PARTS, CALL, TWO, EARLY = "parts", "one call", "two processors", "arrival"
"""Variants: a call for each part of a mixture; one call, with moe_schedule barrier; that on two
processors; one call with moe_schedule arrival."""
ROWS = (8, 16, 96, 128)
"""Rows of an instance, where schedules are compared."""


class MixturePoint(NamedTuple):
    """What is measured, by every variant that it names."""

    part: str
    instances: int
    rows: int
    variants: tuple[str, ...]
    late_ms: float = 0.0
    straggler_ms: float = 0.0
    """Another instance in each layer comes so much later."""
    is_tcp: bool = False
    """Whether puts go by TCP, as between nodes."""


class MixtureClaim(NamedTuple):
    """The first variant takes at most this share of the second one's time."""

    variant: str
    other: str
    at_most: float


POINTS = (
    *(MixturePoint("processors", 1, rows, (PARTS, CALL, TWO)) for rows in (1, 4, 8, 16, 32)),
    *(MixturePoint("four", 4, rows, (PARTS, CALL, EARLY)) for rows in (1, 8)),
    *(MixturePoint("arrival", 2, rows, (CALL, EARLY)) for rows in ROWS),
    *(MixturePoint("arrival", 2, rows, (CALL, EARLY), 0.0, 1.5) for rows in ROWS),
    *(MixturePoint("arrival", 2, rows, (CALL, EARLY), 1.0) for rows in ROWS),
    MixturePoint("arrival", 2, 128, (CALL, EARLY), 5.0),
    *(MixturePoint("tcp", 2, rows, (CALL, EARLY), 1.0, is_tcp=True) for rows in ROWS),
    MixturePoint("step", 1, 1, (PARTS, CALL, TWO)),
    MixturePoint("step", 1, 8, (PARTS, CALL, TWO)),
    MixturePoint("step", 1, 32, (PARTS, CALL, TWO)),
    *(MixturePoint("service", 2, rows, (CALL, EARLY)) for rows in (1, 8, 16)),
)
PART_NAMES = tuple(dict.fromkeys(point.part for point in POINTS))
WHOLE_STEPS = ("step", "service")
"""Parts whose times are of a step; the others' are of a layer."""


def claims(point: MixturePoint) -> list[MixtureClaim]:
    """What must hold at a point (docs/log.md says why)."""
    match point:
        case MixturePoint("processors", rows=16):
            return [MixtureClaim(TWO, CALL, 0.65)]
        case MixturePoint("processors", rows=32):
            return [MixtureClaim(TWO, CALL, 0.60)]
        case MixturePoint("step", rows=32):
            return [MixtureClaim(TWO, CALL, 0.80)]
        case MixturePoint("four") | MixturePoint("service"):
            return [MixtureClaim(EARLY, CALL, 1.02)]
        case MixturePoint("arrival", late_ms=0.0, straggler_ms=0.0):
            return [MixtureClaim(EARLY, CALL, 1.02)]
        case MixturePoint("arrival", late_ms=0.0):
            return [MixtureClaim(EARLY, CALL, 0.93)]
        case MixturePoint("arrival") | MixturePoint("tcp", rows=8 | 16):
            return [MixtureClaim(EARLY, CALL, 0.95)]
    return []


def result_of(point: MixturePoint, variant: str, us: Sequence[float]) -> dict[str, Any]:
    """Name what a variant took at a point."""
    fields = {name: value for name, value in point._asdict().items() if name != "variants"}
    return fields | {
        "variant": variant,
        "min_us": round(min(us), 1),
        "median_us": round(median(us), 1),
        "us": [round(each, 1) for each in us],
    }
