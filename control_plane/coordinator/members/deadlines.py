"""Deadlines of a recovery: timers by name, each of which runs at most once at a time.

Enters: names, delays, what to do. Leaves: calls in the event loop. Does not know: members, terms.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future


class Deadlines:
    """Timers of one owner. Used from the event loop."""

    def __init__(self) -> None:
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def start(self, name: str, delay_ms: float, overdue: Callable[[], None]) -> None:
        """Call `overdue` after the delay, unless the timer of this name runs already."""
        if name not in self._timers:
            loop = asyncio.get_running_loop()
            self._timers[name] = loop.call_later(delay_ms / 1000, self._expire, name, overdue)

    def met(self, name: str) -> bool:
        """End the timer of this name; returns whether it ran."""
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()
        return timer is not None

    def end_all(self) -> None:
        """End every timer."""
        for name in list(self._timers):
            self.met(name)

    def _expire(self, name: str, overdue: Callable[[], None]) -> None:
        del self._timers[name]
        overdue()


async def wait_for(done: Future[None], limit_s: float, what_follows: str) -> None:
    """Wait for what an operator asked for; at the limit `done` is cancelled.

    Raises what `done` raises, or TimeoutError, with a sentence that ends with what follows.
    """
    try:
        async with asyncio.timeout(limit_s):
            await asyncio.wrap_future(done)
    except TimeoutError:
        raise TimeoutError(f"not done after {limit_s:.0f} s; {what_follows}") from None
