"""Positions that rows gain beyond one token a step, since their drafts are accepted.

They count as in flight until every instance has reported the window (protocol.md, bounded
positions).
"""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple

from control_plane.scheduler.queue.fair_share import FairShare
from control_plane.scheduler.state.cluster_state import ClusterState
from control_plane.scheduler.state.request import Request
from nanocp.config.scheduler import SchedulerConfig

_SETTLED_EVERY = 16
"""Windows between two times at which a row's accepted drafts enter its position."""


class _Window(NamedTuple):
    number: int
    num_drafts: int
    """Drafts of a row in all of its steps."""
    advanced: list[int]
    """Reported requests with accepted drafts; each is repeated as often as drafts were accepted."""


class Advances:
    """Accepted drafts, as far as they are known."""

    def __init__(self, state: ClusterState, fair_share: FairShare, config: SchedulerConfig) -> None:
        self._state = state
        self._fair_share = fair_share
        self._num_steps, self._most = config.steps_per_window, config.num_drafts
        self._in_flight: deque[_Window] = deque()
        self._unsettled: Counter[int] = Counter()
        """Request -> accepted drafts that its position does not include yet."""
        self._left: dict[int, int] = {}
        """Request whose row has left -> last window that has it, while that is in flight.

        A late report is not about its new row.
        """
        self.slack = 0
        """Drafts of one row that may be accepted in windows in flight."""

    def issued(self, window: int, num_drafts: int) -> None:
        """Record a window in flight. num_drafts: of a row in all of its steps."""
        if num_drafts:
            self._in_flight.append(_Window(window, num_drafts, []))
            self.slack += num_drafts

    def told(self, window: int, advanced: tuple[int, ...]) -> None:
        """Record the drafts that an instance reports as accepted; see plan.WindowDone.advanced."""
        for each in self._in_flight:
            if each.number == window:
                each.advanced.extend(advanced)

    def reported(self, last_window: int) -> None:
        """Record that every instance has reported the windows up to this one."""
        while self._in_flight and self._in_flight[0].number <= last_window:
            window, num_drafts, advanced = self._in_flight.popleft()
            self.slack -= num_drafts
            if self._left:
                advanced = [each for each in advanced if self._left.get(each, -1) < window]
            self._unsettled.update(advanced)
        if self._left:
            left = self._left.items()
            self._left = {each: window for each, window in left if window > last_window}

    def left(self, request_id: int, last_window: int | None) -> None:
        """Record that the request lost its row. last_window: the last with it."""
        self._unsettled.pop(request_id, None)
        if last_window is not None and self._in_flight:
            self._left[request_id] = last_window

    def settle(self, request: Request) -> None:
        """Add every accepted draft that counts to the request's position."""
        if num_tokens := self._unsettled.pop(request.request_id, 0):
            self._state.advance(request, request.position + num_tokens)
            self._fair_share.generated(request.arrival, num_tokens)

    def settle_some(self, window: int) -> None:
        """Settle a part of the requests, another part in each window, to save time."""
        for request_id in list(self._unsettled):
            if (request_id + window) % _SETTLED_EVERY == 0:
                self.settle(self._state.requests[request_id])

    def reach(self, num_windows: int, num_drafts: int) -> int:
        """Return the most positions that a row may write in windows in flight and the next ones.

        The drafts of a step are made one after the other, each with the KV of those before.
        """
        num_tokens = num_windows * self._num_steps * (1 + num_drafts)
        return self.slack + num_tokens + max(num_drafts - 1, 0)

    def windows_to(self, num_tokens: int) -> int:
        """Return the windows, at least 1, before a row may write so far ahead."""
        num_left = num_tokens - self.reach(0, self._most)
        return max(1, num_left // (self._num_steps * (1 + self._most)))

    def end_term(self) -> None:
        """Record that no window is in flight and no request has a row."""
        self._in_flight.clear()
        self._unsettled.clear()
        self._left.clear()
        self.slack = 0
