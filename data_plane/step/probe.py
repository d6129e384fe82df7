"""The phases of a decode step, and the probe that a step calls as each one begins.

Enters: a phase's name. Leaves: nothing. Does not know: clocks; profiling/phase_clock.py has one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from data_plane.moe.all_to_all_cpu import MoePhase

Phase = Literal["step", "attention", "exchange"] | MoePhase
"""A part of a step; a step is in one phase at a time.

step: before the first layer and after the last one. attention: over own frames, for own rows and
received ones. exchange: both routes, the merge, and what is computed for the rows of others but
attention. all_to_all_cpu.MoePhase has the rest; other is all else of a layer.
"""

Probe = Callable[[Phase], None]
"""Called with the name of the phase that begins; the one before ends there."""


def no_probe(phase: Phase) -> None:
    """Measure nothing."""
