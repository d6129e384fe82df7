"""The phases of a decode step, and the probe that is called as each begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from data_plane.moe.mixture import MoePhase

Phase = Literal["step", "attention", "exchange"] | MoePhase
"""A part of a step; a step is in one phase at a time.

step: before the first layer and after the last. attention: over own frames. exchange: routes, the
merge, and other work for peers' rows. MoePhase has the rest; other is all else of a layer.
"""

Probe = Callable[[Phase], None]
"""Called with the phase that begins; the one before ends."""


def no_probe(phase: Phase) -> None:
    """Measure nothing."""
