"""Deadlines: timers by name, without a clock of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class _Timer:
    delay_us: float
    overdue: Callable[[], None]
    due_us: float | None = None
    """None until the first tick after its start, from which it counts."""


class Deadlines:
    """Timers of one owner, which calls `tick` after it may have started one."""

    def __init__(self) -> None:
        self._timers: dict[str, _Timer] = {}
        self.next_us: float | None = None
        """When the next one is due, at the last tick; None if none is."""

    def start(self, name: str, delay_ms: float, overdue: Callable[[], None]) -> None:
        """Call `overdue` after the delay, unless this timer already runs."""
        if name not in self._timers:
            self._timers[name] = _Timer(delay_ms * 1000, overdue)

    def met(self, name: str) -> bool:
        """End this timer; return whether it ran."""
        return self._timers.pop(name, None) is not None

    def tick(self, now_us: int) -> None:
        """Call what is overdue, in the order of the deadlines."""
        while self._timers:
            for timer in self._timers.values():
                if timer.due_us is None:
                    timer.due_us = now_us + timer.delay_us
            name = min(self._timers, key=self._due_us)
            self.next_us = self._due_us(name)
            if self.next_us > now_us:
                return
            self._timers.pop(name).overdue()
        self.next_us = None

    def _due_us(self, name: str) -> float:
        due_us = self._timers[name].due_us
        assert due_us is not None, f"{name} was not started"
        return due_us
