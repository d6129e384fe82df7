"""Progress of rows in a simulated window of steps with drafts.

Acceptance is drawn from request, step and offset, so that every policy draws the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_STEP, _OFFSET = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F
_MULTIPLY_1, _MULTIPLY_2, _MASK = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, (1 << 64) - 1


class Speculation(NamedTuple):
    """Drafts of a simulated cluster."""

    shares: tuple[float, ...]
    """Acceptance rate by offset from 1, given that the drafts before are accepted."""
    is_measured: bool = True
    """Whether each window has as many drafts as pay, else all."""

    @classmethod
    def read(cls, text: str) -> Speculation:
        """Read `D:SHARE`, `D:SHARE,SHARE` or `D:SHARE:always`; raises ValueError."""
        try:
            number, shares, *how = text.split(":")
            given = [float(share) for share in shares.split(",")]
            num = int(number)
        except ValueError:
            num, given, how = 0, [], []
        if not (1 <= len(given) <= num and all(0 <= each <= 1 for each in given)) or (
            how not in ([], ["always"])
        ):
            raise ValueError(
                f"speculate is {text!r}; it must be the number of drafts and the share of them "
                "that is right, by offset (the last share is of all that follow), as 1:.85 or "
                "3:.85,.75,.65, and :always behind it for so many in every window"
            )
        return cls((*given, *given[-1:] * (num - len(given))), not how)


class Came(NamedTuple):
    """Progress of a row in a window."""

    num_tokens: int
    last_step: int | None
    """None if it goes on."""


def come(
    shares: Sequence[float],
    request_id: int,
    first_step: int,
    num_steps: int,
    num_left: int,
    counts: list[list[int]],
) -> Came:
    """Progress in a window of a row with num_left tokens to come.

    shares: acceptance rates of the window's drafts. counts: [checked, accepted] by offset, which
    grow.
    """
    total = 0
    for step in range(num_steps):
        total += 1
        for offset, share in enumerate(shares):
            if total >= num_left:
                break
            counts[offset][0] += 1
            if _drawn(request_id, first_step + step, offset) >= share:
                break
            counts[offset][1] += 1
            total += 1
        if total >= num_left:
            return Came(num_left, step)
    return Came(total, None)


def _drawn(request_id: int, step: int, offset: int) -> float:
    """A number from 0 to 1: SplitMix64's finaliser of the three."""
    value = (request_id + step * _STEP + offset * _OFFSET) & _MASK
    value = ((value ^ (value >> 30)) * _MULTIPLY_1) & _MASK
    value = ((value ^ (value >> 27)) * _MULTIPLY_2) & _MASK
    return (value ^ (value >> 31)) / 2**64
