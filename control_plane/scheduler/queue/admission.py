"""Admission of requests to the waiting queue, and from there to placement in order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from control_plane.scheduler.queue.deferral import Deferral
from control_plane.scheduler.queue.fair_share import FairShare
from control_plane.scheduler.queue.first_windows import FATAL, FirstWindows
from control_plane.scheduler.queue.waiting_queue import WaitingQueue, earliest, invalidity
from control_plane.scheduler.state.answer import Answer
from nanocp.config.cluster import ClusterConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.values.plan import Arrival, FinishReason, Preempted

_MAX_PASSED = 32
"""Most requests that one walk tries to place but leaves in the queue."""

_NOTE_US = 1_000_000


class Admission:
    """The waiting queue, and the preempted requests that are away from it."""

    def __init__(
        self, cluster: ClusterConfig, config: SchedulerConfig, answer: Answer, deferral: Deferral
    ) -> None:
        """deferral: names requests that wait although they could be placed."""
        self._cluster = cluster
        self.deferral = deferral
        self._config = config
        self._answer = answer
        self.now_us = 0
        """Time of the latest call of the scheduler."""
        self.fair_share = FairShare()
        self.queue = WaitingQueue(config, self.fair_share)
        self.first_windows = FirstWindows()
        self.away: dict[int, int] = {}
        """Preempted requests away from the queue -> time they left, in us, ascending."""
        self.should_walk = False
        """Something changed since the queue was last walked."""
        self.noted: dict[int, str] = {}
        """Requests that this call could not place -> reason, for people; see `note`."""
        self._told: set[int] = set()
        """Requests that were noted since `_told_since_us`."""
        self._told_since_us = 0
        self.failure: str | None = None
        """Reason to refuse every request, once set."""

    def __len__(self) -> int:
        return len(self.queue) + len(self.away)

    def refusal(self, arrival: Arrival) -> tuple[FinishReason, str] | None:
        """Return why the request, in any attempt, ends as it arrives; None if it does not."""
        if self.failure is not None:
            return FinishReason.FAILED, self.failure
        if invalid := invalidity(arrival, self._cluster):
            return FinishReason.INVALID, invalid
        if arrival.request_id in self.first_windows.fatal:
            return FinishReason.FATAL, FATAL
        return None

    def begin_call(self, now_us: int) -> None:
        """Take the time of a call of the scheduler."""
        assert now_us >= self.now_us, f"time went back from {self.now_us} to {now_us} us"
        self.now_us = now_us
        self.noted = {}

    def admit(self, arrival: Arrival) -> None:
        """Queue a new request. If the queue is full, end it or another one."""
        refusals = self.queue.admit(arrival, self.now_us)
        for refused, sentence in refusals:
            self._answer.end(refused, FinishReason.REFUSED, sentence)
        self.should_walk |= arrival.request_id in self.queue
        self.deferral.admitted(1 - len(refusals))

    def come_back(self, arrival: Arrival) -> None:
        """Queue a request that was admitted before."""
        self.away.pop(arrival.request_id, None)
        self.queue.append(arrival, self.now_us)
        self.should_walk = True

    def preempted(self, request_id: int, num_tokens: int) -> None:
        """Wait for a request to come back with the tokens that it has."""
        self._answer.preempted.append(Preempted(request_id, num_tokens))
        self.away[request_id] = self.now_us

    @property
    def next_deadline_us(self) -> int | None:
        """Return when the next wait ends in the queue (expiry, absence, deferral), in us."""
        until_us = self.deferral.next_deadline_us
        return earliest(self.queue.next_deadline_us, self._away_until_us, until_us)

    @property
    def _away_until_us(self) -> int | None:
        since_us = next(iter(self.away.values()), None)
        return None if since_us is None else since_us + self._config.held_timeout_us

    def expire(self) -> list[int]:
        """End requests whose deadline has passed, and stop waiting for those that stay away.

        Returns all of them.
        """
        gone: list[int] = []
        now_us = self.now_us
        self.should_walk |= self.deferral.expire(now_us)
        while self._away_until_us is not None and now_us >= self._away_until_us:
            gone.append(next(iter(self.away)))
            del self.away[gone[-1]]
            self.should_walk = True
        while (waiting := self.queue.expired(now_us)) is not None:
            waited_ms = (now_us - waiting.arrived_us) // 1000
            message = (
                "the request was not placed before its deadline: "
                f"it waited {waited_ms} ms in the queue"
            )
            gone.append(waiting.arrival.request_id)
            self.end(gone[-1], FinishReason.EXPIRED, message)
        return gone

    def end(self, request_id: int, reason: FinishReason, message: str) -> None:
        """End a request that is not placed. An unknown one is ignored."""
        if self.forget(request_id):
            self._answer.end(request_id, reason, message)

    def forget(self, request_id: int) -> bool:
        """Remove a request from the queue; return whether it was there."""
        if request_id in self.queue:
            self.queue.remove(request_id)
        elif self.away.pop(request_id, None) is None:
            return False
        self.should_walk = True
        return True

    def note(self, request_id: int, obstacle: Callable[[], str]) -> None:
        """Note why a request was not placed, at most once a second."""
        if self.now_us - self._told_since_us >= _NOTE_US:
            self._told.clear()
            self._told_since_us = self.now_us
        if request_id not in self._told:
            self._told.add(request_id)
            self.noted[request_id] = obstacle()

    def walk(self, place: Callable[[Arrival], bool], num_open: int = 0) -> None:
        """Place waiting requests in order; some may be passed by others.

        num_open: instances that accept placements; 0: all. Else a too large request is passed.
        Nothing is placed while a preempted request is away, since it has tokens to continue.
        """
        if not self.should_walk or self.away:
            return
        self.should_walk = False
        placed: list[int] = []
        num_passed, now_us = 0, self.now_us
        is_shrunk = 0 < num_open < self._cluster.num_instances
        for arrival, arrived_us in self.queue:
            if is_shrunk and (reason := invalidity(arrival, self._cluster, num_open)):
                self.note(arrival.request_id, partial(str, f"{reason} now"))
                continue
            if self.deferral.defers(arrival, arrived_us, now_us):
                self.note(arrival.request_id, self.deferral.sentence)
                continue
            if place(arrival):
                placed.append(arrival.request_id)
                if not arrival.resumes and not arrival.attempt:
                    self.fair_share.placed(arrival)
                continue
            num_passed += 1
            since_us = self.deferral.may_be_passed_since_us(arrival.request_id, arrived_us)
            may_be_passed = now_us - since_us < self._config.max_overtake_us and not arrival.resumes
            if num_passed == _MAX_PASSED or not may_be_passed:
                break
        for request_id in placed:
            self.queue.remove(request_id)
