"""What the schedulers of instances and of stages share: who waits, who ends, what others read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from control_plane.scheduler.queue.admission import Admission
from control_plane.scheduler.queue.deferral import Deferral
from control_plane.scheduler.queue.known_requests import KnownRequests
from control_plane.scheduler.queue.waiting_queue import earliest
from control_plane.scheduler.state.answer import Answer
from control_plane.scheduler.state.cluster_state import ClusterState
from control_plane.scheduler.state.promise import Promise
from control_plane.scheduler.state.request import Request
from control_plane.scheduler.terms.scheduler_term import SchedulerTerm
from nanocp.config.cluster import ClusterConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.values.plan import (
    AbortRequested,
    Arrival,
    ClusterLost,
    FinishReason,
    InstanceLost,
    Resubmitted,
    TermEnded,
)


class SchedulerBase(ABC):
    """A scheduler without what it plans. A placed request gives up what it holds in `_release`."""

    _state: ClusterState
    requests: KnownRequests

    def __init__(
        self, cluster: ClusterConfig, scheduler: SchedulerConfig, answer: Answer, deferral: Deferral
    ) -> None:
        self._config = scheduler
        self._answer = answer
        self._admission = Admission(cluster, scheduler, answer, deferral)
        self._promise = Promise(scheduler)
        self._term = SchedulerTerm()
        self._handlers: dict[type, Callable[[Any], None]] = {
            Arrival: self._arrive,
            AbortRequested: self._abort,
            InstanceLost: self._term.lose,
            TermEnded: self._term.end,
            Resubmitted: self._resubmitted,
            ClusterLost: self._cluster_lost,
        }

    # --- what others read between two calls

    @property
    def noted(self) -> Mapping[int, str]:
        """Why waiting requests were not placed in the latest call: the bound and a sentence.

        By request id; each request is noted once a second at most.
        """
        return self._admission.noted

    @property
    def next_deadline_us(self) -> int | None:
        """When something is due without an event, in us: call again by then."""
        return earliest(self._admission.next_deadline_us, self._waits_until_us)

    # --- a call begins

    def _expire(self) -> list[int]:
        """End what has waited long enough; returns requests that do not wait any more."""
        until_us = self._waits_until_us
        if until_us is not None and self._admission.now_us >= until_us:
            self._resubmitted(Resubmitted())
        return self._admission.expire()

    @property
    @abstractmethod
    def _waits_until_us(self) -> int | None:
        """When front ends are waited for no longer, in us; None if all have submitted."""

    # --- events

    def _arrive(self, arrival: Arrival) -> None:
        """A request comes, or one that was admitted before goes on.

        Only its front end knows whether it is open: a request that is unknown here has lost its
        pages, or it ended here and its last token was lost on the way.
        """
        admission, request_id = self._admission, arrival.request_id
        request = self._state.requests.get(request_id)
        if end := admission.refusal(arrival):
            # An earlier attempt may be placed, or wait.
            self._give_way(request)
            admission.forget(request_id)
            self._answer.end(request_id, *end)
            return
        if not (arrival.resumes or arrival.attempt):
            admission.admit(arrival)
            return
        admission.should_walk = True
        self._answer.go_on(request_id)
        if request_id in admission.queue:
            admission.queue.replace(arrival)
            return
        if request is not None and arrival.attempt <= request.arrival.attempt:
            return
        if self._goes_on(request, arrival):
            return
        self._give_way(request)
        admission.come_back(arrival)

    def _give_way(self, request: Request | None) -> None:
        """An earlier attempt ends; it may have been placed in this very call."""
        if request is not None:
            self._release(request)
            self._answer.placed.pop(request.request_id, None)

    def _goes_on(self, request: Request | None, arrival: Arrival) -> bool:
        return False

    def _abort(self, event: AbortRequested) -> None:
        self._end_by_id(event.request_id, FinishReason.ABORTED, "aborted")

    @abstractmethod
    def _resubmitted(self, event: Resubmitted) -> None:
        """Every front end has submitted what is open, or is waited for no longer."""

    def _cluster_lost(self, event: ClusterLost) -> None:
        admission = self._admission
        if admission.failure is not None:
            return
        admission.failure = event.message
        self._term.is_over = False
        waiting = [entry.arrival.request_id for entry in admission.queue]
        for request_id in sorted([*waiting, *admission.away, *self._state.requests]):
            self._end_by_id(request_id, FinishReason.FAILED, event.message)
        self.requests.give_up()

    # --- ends

    def _end_by_id(self, request_id: int, reason: FinishReason, message: str) -> None:
        if request := self._state.requests.get(request_id):
            self._release(request)
            self._answer.end(request_id, reason, message)
        else:
            self._admission.end(request_id, reason, message)

    @abstractmethod
    def _release(self, request: Request) -> None:
        """Give up all that the placed request holds."""
