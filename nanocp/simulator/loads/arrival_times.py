"""Infers the unit of a log's timestamps, or takes the user's; a ValueError says what to do."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

UNITS = {"s": 1e6, "ms": 1e3, "us": 1.0, "ns": 1e-3}
DATE, ZONED = "a date", "a date with its zone"
_WORDS = {
    **{unit: unit for unit in UNITS},
    "sec": "s",
    "secs": "s",
    "seconds": "s",
    "millis": "ms",
    "milliseconds": "ms",
    "micros": "us",
    "microseconds": "us",
    "nanos": "ns",
    "nanoseconds": "ns",
}
"""Last words of names."""
_OUR_YEARS_S = 1.42e9, 2.53e9
"""Seconds since 1970 of 2015 and 2050, the range of absolute timestamps."""
_USUAL_RATE = 5.0
_HABITS = {
    "whole timestamp": (1.0, 10.0, 0.2, 0.05),
    "whole": (4.0, 3.0, 0.2, 0.05),
    "thousandths": (30.0, 1.0, 0.1, 0.01),
    "fractions": (4.0, 1.0, 0.1, 0.01),
}
"""Prior odds of s, ms, us and ns by a number's form. Whole timestamps are mostly Mooncake's."""
_SAID = 1000.0
"""Likelihood ratio of a unit that the name says, or that gives years in the range."""
_SURE, _SURE_OF_YEARS = 4.0, 100.0
"""Least odds of the likeliest unit over the next one."""


class LogTime(NamedTuple):
    """A time as it stands in a file."""

    where: str
    name: str
    value: float
    """For a date, microseconds since 1970."""
    date: str = ""
    """DATE or ZONED; "" for a number."""

    @property
    def kind(self) -> tuple[str, str]:
        """(unit by form or name, unit by range of years); "" for none."""
        if self.date:
            return self.date, ""
        words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", self.name)
        low, high = _OUR_YEARS_S
        era = next((unit for unit, us in UNITS.items() if low < self.value * us / 1e6 < high), "")
        return _WORDS.get("".join(words[-1:]).lower(), ""), era

    def __str__(self) -> str:
        number = self.date or f"{self.value:.15g}"
        era = self.kind[1]
        return f"{self.where} has {self.name} {number}{f' (of our years in {era})' if era else ''}"


def unit_of(moments: Sequence[LogTime], given: str = "") -> str:
    """The unit of all, a name of UNITS or DATE; given: the user's.

    Raises ValueError if they have more than one, or if it cannot be told.
    """
    if given and given not in UNITS:
        raise ValueError(f"--time-unit is {given!r}; it must be one of {', '.join(UNITS)}")
    kinds: dict[tuple[str, str], LogTime] = {}
    passes_years = _passes_our_years(moments)
    for one in moments:
        said, era = one.kind
        kinds.setdefault((said, "" if passes_years else era), one)
    (said, era), first = next(iter(kinds.items()))
    has_dates = any(one.date for one in kinds.values())
    if len(kinds) > 1 and (has_dates or not given):
        _refuse_two(first, list(kinds.values())[1])
    if has_dates and given:
        raise ValueError(f"{first}: it has no unit; leave out --time-unit {given}")
    if given or (said and era in ("", said)):
        return DATE if has_dates else given or said
    ascending = sorted(moments, key=lambda one: one.value)
    _check_one_scale(ascending)
    values = [one.value for one in ascending]
    if not (span := values[-1] - values[0]):
        return era or "s"
    form = f"{_form(values)} timestamp" if first.name == "timestamp" else _form(values)
    habits = _HABITS.get(form, _HABITS[_form(values)])
    rates = {unit: (len(values) - 1) / (span * us / 1e6) for unit, us in UNITS.items()}
    scores = {
        unit: math.log(_SAID) * ((unit == said) + (unit == era))
        + math.log(1.0 if era else habit)
        - math.log10(rates[unit] / _USUAL_RATE) ** 2 / 2
        for unit, habit in zip(UNITS, habits, strict=True)
    }
    best, other = sorted(scores, key=scores.__getitem__, reverse=True)[:2]
    if scores[best] - scores[other] < math.log(_SURE_OF_YEARS if era else _SURE):
        raise ValueError(
            f"{first}: its times may be in {best} ({rates[best]:.3g} requests/s) or in {other} "
            f"({rates[other]:.3g}); give --time-unit"
        )
    return best


def _refuse_two(one: LogTime, other: LogTime) -> None:
    raise ValueError(
        f"{one} and {other}: a file has one unit, so split it, or give the one that all have "
        "(--time-unit)"
    )


def _passes_our_years(moments: Sequence[LogTime]) -> bool:
    """Whether many numbers are just outside the range."""
    low, high = _OUR_YEARS_S
    values_s = [one.value * us / 1e6 for one in moments if not one.date for us in UNITS.values()]
    beside = sum(low / 2 < value <= low or high <= value < 2 * high for value in values_s)
    return 3 * beside > sum(low < value < high for value in values_s)


def _check_one_scale(ascending: Sequence[LogTime]) -> None:
    """Raise ValueError if the times look like those of two units, or of two clocks."""
    end = ascending[0].value + (ascending[-1].value - ascending[0].value) / 500
    near = sorted({one.value for one in ascending if one.value <= end})
    far = sorted({one.value for one in ascending if one.value > end})
    if len(near) < 3 or not far:
        return
    share = len(near) / (len(near) + len(far))
    whole_near, whole_far = (fmean(value.is_integer() for value in part) for part in (near, far))
    is_other_form = abs(whole_near - whole_far) > 0.5
    factor = (far[-1] - far[0]) * len(near) / ((near[-1] - near[0]) * len(far))
    is_thousandth = 500 < factor < 2000
    if share > 0.9 or (share > 0.05 and is_other_form) or (share > 0.2 and is_thousandth):
        _refuse_two(ascending[0], next(one for one in ascending if one.value > end))


def _form(values: Sequence[float]) -> str:
    if all(value.is_integer() for value in values):
        return "whole"
    is_rounded = all(round(value, 3) == value for value in values)
    return "thousandths" if is_rounded else "fractions"
