"""Predicted time of layers in a schedule's order under other times of nano-operations."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from nanocp.overlap.interference import Interference
from nanocp.overlap.schedule import Schedule, duration_us

_SLACK = 1e-3
"""Tolerance as a share of a period."""
_FEW, _MANY = 4, 8
"""Layers played; further ones are extrapolated."""


class _After(NamedTuple):
    earlier: int
    layers_before: int
    """Layers between; negative for a later layer."""


class Order:
    """The order in which a schedule starts nano-operations."""

    def __init__(self, schedule: Schedule, interference: Interference) -> None:
        self.slots = schedule.slots
        self._interference = interference
        self._period_us = schedule.period_us
        self._starts_us = [slot.start_us for slot in self.slots]
        self._ends_us = [slot.start_us + duration_us(slot, interference) for slot in self.slots]
        self._after = [self._afters(start_us) for start_us in self._starts_us]

    def _afters(self, start_us: float) -> list[_After]:
        period, slack = self._period_us, _SLACK * self._period_us
        last = [
            _After(index, ceil((end_us - start_us - slack) / period))
            for index, end_us in enumerate(self._ends_us)
        ]
        latest_us = max(self._starts_us[one.earlier] - one.layers_before * period for one in last)
        return [
            one
            for one in last
            if self._ends_us[one.earlier] - one.layers_before * period > latest_us + slack
        ]

    def layers_us(self, alone_us: Sequence[float], num_layers: int) -> float:
        """Microseconds of so many layers.

        alone_us: of each slot's nano-operation, alone on the GPU.
        """
        lengths = [
            us / self._interference.speed(slot.nano.operation.resource, slot.share)
            for us, slot in zip(alone_us, self.slots, strict=True)
        ]
        if num_layers <= _MANY:
            return self._played_us(lengths, num_layers)
        few, many = self._played_us(lengths, _FEW), self._played_us(lengths, _MANY)
        return many + (num_layers - _MANY) * (many - few) / (_MANY - _FEW)

    def _played_us(self, lengths: Sequence[float], num_layers: int) -> float:
        ends: dict[tuple[int, int], float] = {}
        starts = sorted(
            (start_us + layer * self._period_us, index, layer)
            for index, start_us in enumerate(self._starts_us)
            for layer in range(num_layers)
        )
        for _, index, layer in starts:
            begin_us = max(
                (
                    ends.get((after.earlier, layer - after.layers_before), 0.0)
                    for after in self._after[index]
                ),
                default=0.0,
            )
            ends[index, layer] = begin_us + lengths[index]
        return max(ends.values(), default=0.0)
