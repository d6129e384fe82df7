"""How much further rows come than a token a step, because their drafts are accepted.

Enters: windows with drafts, what instances report of them, rows that end. Leaves: the most that a
row may have come further by windows in flight; what it surely has, in its position. Does not know:
pages, how many drafts a window has.

A report counts once every instance has reported its window: until then its drafts count as those of
a window in flight, and afterwards as positions, never as both (protocol.md, bounded positions).
"""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple

from control_plane.scheduler.queue.fair_share import FairShare
from control_plane.scheduler.state.cluster_state import ClusterState
from control_plane.scheduler.state.request import Request
from nanocp.config.scheduler import SchedulerConfig

_SETTLED_EVERY = 16
"""Windows from one time to the next at which a row's accepted drafts enter its position."""


class _Window(NamedTuple):
    """A window in flight."""

    number: int
    num_drafts: int
    """Drafts of a row in all of its steps."""
    advanced: list[int]
    """Requests whose drafts were accepted, each as often, as far as it was reported."""


class Advances:
    """What is known of accepted drafts. Without drafts nothing is kept."""

    def __init__(self, state: ClusterState, fair_share: FairShare, config: SchedulerConfig) -> None:
        self._state = state
        self._fair_share = fair_share
        self._num_steps, self._most = config.steps_per_window, config.num_drafts
        self._in_flight: deque[_Window] = deque()
        self._unsettled: Counter[int] = Counter()
        """Request -> accepted drafts that its position does not have yet."""
        self._left: dict[int, int] = {}
        """Request whose row has left -> last window that has it, while that is in flight.

        The same request may come back before: the late report is not of its new row."""
        self.slack = 0
        """Drafts of one row that may be accepted in windows in flight."""

    def issued(self, window: int, num_drafts: int) -> None:
        """A window is in flight. num_drafts: of a row in all of its steps."""
        if num_drafts:
            self._in_flight.append(_Window(window, num_drafts, []))
            self.slack += num_drafts

    def told(self, window: int, advanced: tuple[int, ...]) -> None:
        """An instance reports what was accepted in the window; see plan.WindowDone.advanced."""
        for each in self._in_flight:
            if each.number == window:
                each.advanced.extend(advanced)

    def reported(self, last_window: int) -> None:
        """Every instance has reported the windows up to this one."""
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
        """The request has no row any more. last_window: the last one sent that has it."""
        self._unsettled.pop(request_id, None)
        if last_window is not None and self._in_flight:
            self._left[request_id] = last_window

    def settle(self, request: Request) -> None:
        """Let the request's position have every accepted draft that counts."""
        if num_tokens := self._unsettled.pop(request.request_id, 0):
            self._state.advance(request, request.position + num_tokens)
            self._fair_share.generated(request.arrival, num_tokens)

    def settle_some(self, window: int) -> None:
        """Settle a part of the requests, another one in each window.

        Loads may lag a little; each position every time would take ten times as long as a plan.
        """
        for request_id in list(self._unsettled):
            if (request_id + window) % _SETTLED_EVERY == 0:
                self.settle(self._state.requests[request_id])

    def reach(self, num_windows: int, num_drafts: int) -> int:
        """Positions that a row may write in windows in flight and in the next ones, at most.

        The drafts of a step are drafted one after the other, each with the KV of the one before.
        """
        num_tokens = num_windows * self._num_steps * (1 + num_drafts)
        return self.slack + num_tokens + max(num_drafts - 1, 0)

    def windows_to(self, num_tokens: int) -> int:
        """Windows from the next one on before a row may write so far ahead, at least 1."""
        num_left = num_tokens - self.reach(0, self._most)
        return max(1, num_left // (self._num_steps * (1 + self._most)))

    def end_term(self) -> None:
        """No window is in flight, and no request has a row."""
        self._in_flight.clear()
        self._unsettled.clear()
        self._left.clear()
        self.slack = 0
