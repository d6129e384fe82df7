"""Requests that may be what ends instances: those in their first window at loss after loss.

Enters: at each loss, the requests in their first window on the instance that was lost. Leaves: the
requests that are to be ended. Does not know: terms, placement, why an instance was lost.
"""

from __future__ import annotations

from collections.abc import Collection

MAX_FIRST_WINDOWS = 3
"""A request is ended that was in its first window at so many losses, one after the other."""
FATAL = (
    f"instances were lost in this request's first window, {MAX_FIRST_WINDOWS} times in a row: it "
    "may be what ends them"
)


class FirstWindows:
    """Requests that were in their first window at each of the latest losses."""

    def __init__(self) -> None:
        self._num_losses: dict[int, int] = {}
        """By request in its first window at the last loss: at how many losses in a row it was."""
        self.fatal: set[int] = set()
        """Requests that may be what ends instances. Each has cost some, so they are few."""

    def lost(self, in_first_window: Collection[int] | None) -> None:
        """Take the requests that were in their first window on an instance that was lost.

        None: no window was in flight, or no instance was lost, which says nothing of requests.
        """
        if in_first_window is not None:
            before = self._num_losses
            self._num_losses = {each: before.get(each, 0) + 1 for each in in_first_window}
            self.fatal |= {i for i, n in self._num_losses.items() if n >= MAX_FIRST_WINDOWS}
