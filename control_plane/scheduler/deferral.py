"""Deferral: while steps are too long, one long prompt in a hundred requests waits, for the others.

Enters: reports of windows, arrivals, loads. Leaves: whether a waiting request waits on. Does not
know: the queue's order, policies, costs. (docs/decisions/0049.)

A burst of long prompts makes every row late. If a few of them wait until it is over, none is, but
these. A request that is late already has nothing to lose, so it waits until steps are clearly
shorter again, and others pass it.
"""

from __future__ import annotations

from collections import deque

from control_plane.scheduler.cluster_state import ClusterState
from control_plane.scheduler.waiting_queue import WaitingQueue
from nanocp.config import SchedulerConfig
from nanocp.plan import Arrival

_ONE_IN = 110
"""Requests that arrive for each that may be deferred: an SLO of 99% lets a few more miss it."""
_BEGIN_PERCENT, _END_PERCENT = 102, 92
"""Shares of the target. A request is deferred if steps with it would be longer than the first, and
until they would be no longer than the second. A burst that is short makes nobody late."""
_MAX_WAIT_US = 20_000_000
"""Nobody is deferred for longer."""
_LONG = 64
"""A prompt is long if it has one in this many of the tokens that attention reads, or more."""
_NUM_WINDOWS = 8
"""Windows over which a step's time is measured."""


class Deferral:
    """Which requests are deferred. Without a target none is."""

    def __init__(self, config: SchedulerConfig, state: ClusterState) -> None:
        self._state = state
        self._target_us = 1000 * config.tpot_target_ms
        self._num_steps = config.steps_per_window
        self._ends: deque[tuple[int, int]] = deque(maxlen=_NUM_WINDOWS + 1)
        """(window, time of its last report in us) of windows that followed each other closely."""
        self._last_window = -1
        self._credit = 0
        """Requests that arrived, less _ONE_IN for each that was deferred."""
        self._deferred: set[int] = set()

    def __len__(self) -> int:
        return len(self._deferred)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._deferred

    def arrived(self) -> None:
        """A request was admitted."""
        self._credit += 1

    def reported(self, last_window: int, goes_on: bool, now_us: int, queue: WaitingQueue) -> None:
        """Every instance has reported last_window, maybe some time ago.

        goes_on: whether another window is in flight; else the time until the next is no step's.
        queue: requests that are no more in it are deferred no more.
        """
        if not self._target_us or last_window == self._last_window:
            return
        self._last_window = last_window
        self._ends.append((last_window, now_us))
        if not goes_on:
            self._ends.clear()
        if self._deferred:
            self._deferred = {each for each in self._deferred if each in queue}

    def end_term(self, last_window: int) -> None:
        """All windows up to the last one are over, and none that comes follows closely on them."""
        self._last_window = last_window
        self._ends.clear()

    def defers(self, arrival: Arrival, arrived_us: int, now_us: int) -> bool:
        """Whether the request waits on, although it may be that it could be placed.

        Only a long prompt that is computed for the first time, of no class before the default one.
        """
        is_new = arrival.needs_prefill and not arrival.resumes and not arrival.attempt
        if len(self._ends) < 2 or not is_new or arrival.priority < 0:
            self._deferred.discard(arrival.request_id)
            return False
        if arrival.request_id in self._deferred:
            waits = now_us - arrived_us < _MAX_WAIT_US and self._is_over(arrival, _END_PERCENT)
            if not waits:
                self._deferred.remove(arrival.request_id)
            return waits
        is_late = now_us - arrived_us >= _MAX_WAIT_US
        if is_late or self._credit < _ONE_IN or not self._is_over(arrival, _BEGIN_PERCENT):
            return False
        self._credit -= _ONE_IN
        self._deferred.add(arrival.request_id)
        return True

    def sentence(self) -> str:
        """Why a request is deferred, for people."""
        return f"tpot_target_ms: steps take {self.step_us / 1000:.1f} ms; long prompts wait"

    @property
    def step_us(self) -> int:
        """Mean time of a step in the latest windows; 0 if fewer than two have followed closely."""
        if len(self._ends) < 2:
            return 0
        (first, began_us), (last, ended_us) = self._ends[0], self._ends[-1]
        return (ended_us - began_us) // ((last - first) * self._num_steps)

    def _is_over(self, arrival: Arrival, percent: int) -> bool:
        """Whether the prompt is long, and steps with it would be longer than so much of the target.

        A step is taken to grow as the tokens do that attention reads, which is the most it can.
        """
        state, more = self._state, arrival.prompt_len
        decided = sum(map(state.kv_tokens, state.open))
        arriving = sum(state.arriving_tokens)
        running = max(decided - arriving, 1)
        if more * _LONG < running:
            return False
        step_us = self.step_us * (running + arriving + more) // running
        return 100 * step_us > percent * self._target_us
