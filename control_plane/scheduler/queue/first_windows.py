"""Requests suspected of ending instances: they were in their first window at loss after loss."""

from __future__ import annotations

from collections.abc import Collection

MAX_FIRST_WINDOWS = 3
"""Number of losses in a row after which a request in its first window is ended."""
FATAL = (
    f"instances were lost in this request's first window, {MAX_FIRST_WINDOWS} times in a row: it "
    "may be what ends them"
)


class FirstWindows:
    """Requests that were in their first window at each of the latest losses."""

    def __init__(self) -> None:
        self._num_losses: dict[int, int] = {}
        """Consecutive losses, by request that was in its first window at the last one."""
        self.fatal: set[int] = set()
        """Requests to end. Each has cost several instances, so they are few."""

    def lost(self, in_first_window: Collection[int] | None) -> None:
        """Record the requests in their first window on a lost instance.

        None: no window was in flight, or no instance was lost; this says nothing.
        """
        if in_first_window is not None:
            before = self._num_losses
            self._num_losses = {each: before.get(each, 0) + 1 for each in in_first_window}
            self.fatal |= {i for i, n in self._num_losses.items() if n >= MAX_FIRST_WINDOWS}
