"""Deferral: while tokens take too long, one long prompt in a hundred requests waits, for others.

Enters: reports of windows, arrivals, tokens. Leaves: whether a waiting request waits on, and until
when. Does not know: the queue's order, policies, costs. (docs/decisions/0049.)

A burst of long prompts makes every row late. If a few of them wait until it is over, none is, but
these. A request that is late already has nothing to lose, so it waits until steps are clearly
shorter again, and others pass it. With drafts a step gives a row several tokens: a token takes as
much less time.
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
"""Requests that are admitted for each that may be deferred: an SLO of 99% lets a few more miss it.
"""
_MOST = 8
"""Requests that are deferred at once, at most, and those that a long calm saves up for. So of N
requests in a row at most N / _ONE_IN and _MOST more are deferred."""
_QUEUE_SHARE = 4
"""One in this many of the queue's places and tokens is for deferred requests, at most."""
_BEGIN_PERCENT, _END_PERCENT = 102, 92
"""Shares of the target. A request is deferred if a token with it would take longer than the first,
and until it would take no longer than the second. A burst that is short makes nobody late."""
_LEAST_PERCENT = 60
"""Share of the target. While a token takes less nobody is deferred: the part of a step that does
not grow with tokens is a large one then."""
_MAX_WAIT_US = 20_000_000
"""Nobody is deferred for longer. A request whose deadline leaves less than this after it never is.
"""
_LONG = 64
"""A prompt is long if it has one in this many of the tokens that attention reads, or more."""
_LEAST_LONG = 4096
"""No prompt of fewer tokens is long, however few the others are."""
_NUM_WINDOWS = 8
"""Windows over which a step's time is measured."""


class _Wait(NamedTuple):
    """The longest that one request is deferred."""

    until_us: int
    num_tokens: int
    """Tokens of the prompt."""


class _End(NamedTuple):
    """The end of a window."""

    window: int
    at_us: int
    """When its last report came."""
    num_tokens: int
    num_accepted: int
    """Until then; see Deferral._num_tokens."""


class TokensRead(NamedTuple):
    """Tokens of KV that attention reads in a step."""

    coming: int
    """In the next step if everything that is decided for the instances were there."""
    now: int
    """Those of them that are there: none while only new prompts are on their way."""


def tokens_read(state: ClusterState, tickets: Tickets) -> TokensRead:
    """Count them over all instances.

    Pages that move are read where they were, so only KV that prefill sends is still to come.
    """
    instances = range(state.cluster.num_instances)
    decided = sum(state.loads.kv_tokens(each) - state.loads.weights[each] for each in instances)
    return TokensRead(decided, decided - tickets.num_unfilled_tokens)


class Deferral:
    """Which requests are deferred. Without a target none is."""

    def __init__(self, config: SchedulerConfig, tokens: Callable[[], TokensRead]) -> None:
        """tokens: what attention reads, as of the call."""
        self._tokens = tokens
        self._most = min(_MOST, config.max_queued_requests // _QUEUE_SHARE)
        self._most_tokens = config.max_queued_tokens // _QUEUE_SHARE
        self._target_us = 1000 * config.tpot_target_ms
        self._num_steps = config.steps_per_window
        self._ends: deque[_End] = deque(maxlen=_NUM_WINDOWS + 1)
        """Windows that followed each other closely."""
        self._num_tokens = self._num_accepted = 0
        """Tokens that were generated, and accepted drafts among them; 0 without drafts."""
        self._last_window = -1
        self._credit = 0
        """Requests that were admitted, less _ONE_IN for each that was deferred; it has a cap."""
        self._deferred: dict[int, _Wait] = {}
        self._ended_us: dict[int, int] = {}
        """Request that waits, and is deferred no more -> since when, in us."""

    def __len__(self) -> int:
        return len(self._deferred)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._deferred

    def admitted(self, num_requests: int) -> None:
        """So many requests are in the queue now; fewer than 0 if some were refused for another."""
        self._credit = min(self._credit + num_requests, _MOST * _ONE_IN)

    @property
    def next_deadline_us(self) -> int | None:
        """When the next request is to be deferred no more, in us, if nothing happens until then."""
        return min((wait.until_us for wait in self._deferred.values()), default=None)

    def expire(self, now_us: int) -> bool:
        """Defer those no more that have waited for the longest time; whether there are any."""
        over = [each for each, wait in self._deferred.items() if wait.until_us <= now_us]
        for request_id in over:
            self._end(request_id, now_us)
        return bool(over)

    def may_be_passed_since_us(self, request_id: int, arrived_us: int) -> int:
        """When the time began in which others may pass the request: after its deferral, if any."""
        return self._ended_us.get(request_id, arrived_us)

    def generated(self, reports: Iterable[WindowDone]) -> None:
        """Count the tokens of windows that may have drafts, and the drafts among them."""
        for report in reports:
            self._num_tokens += report.num_tokens
            self._num_accepted += sum(accepted for _, accepted in report.drafts)

    def reported(self, last_window: int, goes_on: bool, now_us: int, queue: WaitingQueue) -> None:
        """Every instance has reported last_window, maybe some time ago.

        goes_on: whether another window is in flight; else the time until the next is no step's.
        queue: requests that are no more in it are forgotten.
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
        """All windows up to the last one are over, and none that comes follows closely on them."""
        self._last_window = last_window
        self._ends.clear()

    def defers(self, arrival: Arrival, arrived_us: int, now_us: int) -> bool:
        """Whether the request waits on, although it may be that it could be placed.

        Only a long prompt that is computed for the first time, of no class before the default one,
        and once.
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
        """Why a request is deferred, for people."""
        return f"tpot_target_ms: a token takes {self.token_us / 1000:.1f} ms; long prompts wait"

    @property
    def token_us(self) -> int:
        """Mean time of a row's token in the latest windows: that of a step, over a row's tokens.

        0 if fewer than two windows have followed closely.
        """
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
        """Whether one more may be deferred, and this one: not twice, nor with a deadline soon."""
        deadline_us = arrival.deadline_us
        is_urgent = deadline_us is not None and deadline_us < until_us + _MAX_WAIT_US
        if is_urgent or arrival.request_id in self._ended_us or len(self._deferred) >= self._most:
            return False
        waiting = sum(wait.num_tokens for wait in self._deferred.values())
        return waiting + arrival.prompt_len <= self._most_tokens

    def _is_over(self, arrival: Arrival, percent: int) -> bool:
        """Whether the prompt is long, and a token with it would take over so much of the target.

        A step is taken to grow as the tokens do that attention reads, which is the most it can.
        While nothing is read, a step says nothing about the next one.
        """
        more, token_us = arrival.prompt_len, self.token_us
        if more < _LEAST_LONG or 100 * token_us < _LEAST_PERCENT * self._target_us:
            return False
        coming, now = self._tokens()
        if now <= 0 or more * _LONG < now:
            return False
        return 100 * token_us * (coming + more) > percent * self._target_us * now
