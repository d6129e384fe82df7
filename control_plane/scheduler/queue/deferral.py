"""Deferral: while tokens take too long, one long prompt in a hundred requests waits for others.

A burst of long prompts makes every row late; if a few of them wait, only these are late
(docs/decisions/0049).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from control_plane.scheduler.pages.tickets import Tickets
from control_plane.scheduler.queue.waiting_queue import WaitingQueue
from control_plane.scheduler.state.cluster_state import ClusterState
from nanocp.config.scheduler import SchedulerConfig
from nanocp.values.plan import Arrival, WindowDone

_ONE_IN = 110
"""Admitted requests for each that may be deferred: an SLO of 99% lets slightly more miss it."""
_MOST = 8
"""Most requests that are deferred at once, and most that a long calm saves up for."""
_QUEUE_SHARE = 4
"""Deferred requests get at most one in this many of the queue's places and tokens."""
_BEGIN_PERCENT, _END_PERCENT = 102, 92
"""Percentages of the target. A request is deferred if a token with it would exceed the first.

It is deferred until a token with it would not exceed the second.
"""
_LEAST_PERCENT = 60
"""Percentage of the target below which a token's time defers nobody."""
_MAX_WAIT_US = 20_000_000
"""Longest deferral. A request is never deferred if its deadline leaves less than this."""
_LONG = 64
"""A prompt is long if it has at least one in this many of the tokens that attention reads."""
_LEAST_LONG = 4096
"""A prompt of fewer tokens is never long."""
_NUM_WINDOWS = 8
"""Windows over which a step's time is measured."""


class _Wait(NamedTuple):
    until_us: int
    num_tokens: int
    """Tokens of the prompt."""


class _End(NamedTuple):
    window: int
    at_us: int
    """When its last report came."""
    num_tokens: int
    num_accepted: int
    """Accepted drafts until then; see Deferral._num_tokens."""


class TokensRead(NamedTuple):
    """KV tokens that attention reads in a step."""

    coming: int
    """Tokens in the next step if all KV that was decided on were in place."""
    now: int
    """Those of them that are in place: none while only new prompts are on their way."""


def tokens_read(state: ClusterState, tickets: Tickets) -> TokensRead:
    """Count the tokens over all instances; only KV from the prefill is still to come."""
    instances = range(state.cluster.num_instances)
    decided = sum(state.loads.kv_tokens(each) - state.loads.weights[each] for each in instances)
    return TokensRead(decided, decided - tickets.num_unfilled_tokens)


class Deferral:
    """Chooses the requests to defer; none without a target."""

    def __init__(self, config: SchedulerConfig, tokens: Callable[[], TokensRead]) -> None:
        """tokens: returns the tokens that attention reads now."""
        self._tokens = tokens
        self._most = min(_MOST, config.max_queued_requests // _QUEUE_SHARE)
        self._most_tokens = config.max_queued_tokens // _QUEUE_SHARE
        self._target_us = 1000 * config.tpot_target_ms
        self._num_steps = config.steps_per_window
        self._ends: deque[_End] = deque(maxlen=_NUM_WINDOWS + 1)
        """Windows that followed each other closely."""
        self._num_tokens = self._num_accepted = 0
        """Generated tokens, and accepted drafts among them; 0 without drafts."""
        self._last_window = -1
        self._credit = 0
        """Admitted requests, less _ONE_IN for each deferred one; capped."""
        self._deferred: dict[int, _Wait] = {}
        self._ended_us: dict[int, int] = {}
        """Waiting requests that are no longer deferred -> time that it ended, in us."""

    def __len__(self) -> int:
        return len(self._deferred)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._deferred

    def admitted(self, num_requests: int) -> None:
        """Count requests that entered the queue; below 0 if more were refused for another one."""
        self._credit = min(self._credit + num_requests, _MOST * _ONE_IN)

    @property
    def next_deadline_us(self) -> int | None:
        """Return when the next deferral ends if nothing happens until then, in us."""
        return min((wait.until_us for wait in self._deferred.values()), default=None)

    def expire(self, now_us: int) -> bool:
        """End deferrals that reached the longest time; return whether there were any."""
        over = [each for each, wait in self._deferred.items() if wait.until_us <= now_us]
        for request_id in over:
            self._end(request_id, now_us)
        return bool(over)

    def may_be_passed_since_us(self, request_id: int, arrived_us: int) -> int:
        """Return when others could first pass the request: after its deferral, if any."""
        return self._ended_us.get(request_id, arrived_us)

    def generated(self, reports: Iterable[WindowDone]) -> None:
        """Count the tokens and accepted drafts of windows that may have drafts."""
        for report in reports:
            self._num_tokens += report.num_tokens
            self._num_accepted += sum(accepted for _, accepted in report.drafts)

    def reported(self, last_window: int, goes_on: bool, now_us: int, queue: WaitingQueue) -> None:
        """Record that every instance has reported last_window.

        goes_on: another window is in flight, so the next report times a step. queue: requests
        outside it are forgotten.
        """
        if not self._target_us or last_window == self._last_window:
            return
        self._last_window = last_window
        self._ends.append(_End(last_window, now_us, self._num_tokens, self._num_accepted))
        if not goes_on:
            self._ends.clear()
        for of_waiting in (self._deferred, self._ended_us):
            for gone in [each for each in of_waiting if each not in queue]:
                del of_waiting[gone]

    def end_term(self, last_window: int) -> None:
        """Record that windows up to the last one are over; the next one does not follow closely."""
        self._last_window = last_window
        self._ends.clear()

    def defers(self, arrival: Arrival, arrived_us: int, now_us: int) -> bool:
        """Return whether the request waits even if it could be placed.

        Only a long prompt is deferred, once, when it is first computed, unless its class comes
        before the default one.
        """
        request_id = arrival.request_id
        is_new = arrival.needs_prefill and not arrival.resumes and not arrival.attempt
        may_wait = len(self._ends) >= 2 and is_new and arrival.priority >= 0
        if wait := self._deferred.get(request_id):
            if may_wait and now_us < wait.until_us and self._is_over(arrival, _END_PERCENT):
                return True
            self._end(request_id, now_us)
            return False
        until_us = arrived_us + _MAX_WAIT_US
        if not may_wait or now_us >= until_us or self._credit < _ONE_IN:
            return False
        if not self._has_room(arrival, until_us) or not self._is_over(arrival, _BEGIN_PERCENT):
            return False
        self._credit -= _ONE_IN
        self._deferred[request_id] = _Wait(until_us, arrival.prompt_len)
        return True

    def sentence(self) -> str:
        """Explain a deferral to people."""
        return f"tpot_target_ms: a token takes {self.token_us / 1000:.1f} ms; long prompts wait"

    @property
    def token_us(self) -> int:
        """The mean time of a row's token in the latest windows; 0 if it is not known."""
        if len(self._ends) < 2:
            return 0
        first, last = self._ends[0], self._ends[-1]
        step_us = (last.at_us - first.at_us) // ((last.window - first.window) * self._num_steps)
        num_tokens = last.num_tokens - first.num_tokens
        # Of a row in a step all tokens but one are accepted drafts.
        num_row_steps = num_tokens - (last.num_accepted - first.num_accepted)
        return step_us * num_row_steps // num_tokens if num_row_steps > 0 else step_us

    def _end(self, request_id: int, now_us: int) -> None:
        del self._deferred[request_id]
        self._ended_us[request_id] = now_us

    def _has_room(self, arrival: Arrival, until_us: int) -> bool:
        deadline_us = arrival.deadline_us
        is_urgent = deadline_us is not None and deadline_us < until_us + _MAX_WAIT_US
        if is_urgent or arrival.request_id in self._ended_us or len(self._deferred) >= self._most:
            return False
        waiting = sum(wait.num_tokens for wait in self._deferred.values())
        return waiting + arrival.prompt_len <= self._most_tokens

    def _is_over(self, arrival: Arrival, percent: int) -> bool:
        """Assume that a step grows with the tokens that attention reads, the most it can.

        If nothing is read, a step predicts nothing.
        """
        more, token_us = arrival.prompt_len, self.token_us
        if more < _LEAST_LONG or 100 * token_us < _LEAST_PERCENT * self._target_us:
            return False
        coming, now = self._tokens()
        if now <= 0 or more * _LONG < now:
            return False
        return 100 * token_us * (coming + more) > percent * self._target_us * now
