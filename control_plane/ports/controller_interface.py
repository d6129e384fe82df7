"""The interface between a front end and the controller: two protocols and a value.

Enters: what the front end submits. Leaves: what the scheduler decided about it. Does not know:
clients, streams, plans.

The two sides are threads of one process, or processes (remote/). Each queues what the other calls,
and returns at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from nanocp.values.plan import Arrival, Ended, Placement, Preempted


@dataclass(frozen=True, slots=True)
class Submission:
    """A validated request on its way into the waiting queue, or a later attempt of one."""

    arrival: Arrival
    """What the scheduler gets, without what the controller adds. The front end counts ids, in the
    order of submission; every attempt keeps its own."""
    prompt_ids: Sequence[int]
    """Prompt for the prefill; the scheduler sees only its length. Output of earlier attempts is
    part of it."""
    queue_timeout_us: int | None = None
    """The request ends with EXPIRED if it is not placed within this time. None: it waits without
    limit."""
    front_end: str = ""
    """host:port that gets the log probabilities of the prompt."""
    prompt_logprobs: int | None = None
    """Number of most likely tokens beside each token of the prompt. None: no log probabilities of
    the prompt."""

    @property
    def request_id(self) -> int:
        """That of its arrival."""
        return self.arrival.request_id

    def event(self, now_us: int) -> Arrival:
        """What it becomes for the scheduler when the controller takes it."""
        waits_us = self.queue_timeout_us
        return replace(
            self.arrival,
            deadline_us=None if waits_us is None else now_us + waits_us,
            is_recomputed=self.arrival.attempt > 0 and self.prompt_logprobs is not None,
        )


class ControllerInterface(Protocol):
    """The controller, as the front end sees it.

    Every call comes from the front end's thread and never blocks.
    """

    def submit(self, submission: Submission) -> None:
        """Queue the request. Never raises: a refusal is an `Ended`."""

    def resubmitted(self) -> None:
        """Every open request of this front end has been submitted again (`interrupted`)."""

    def abort(self, request_id: int) -> None:
        """The client wants the request to end. Unknown and ended ids are ignored."""


class ControllerEvents(Protocol):
    """The front end, as the controller sees it.

    Calls may come from any thread and never block. Unknown ids are ignored: a request may have
    ended meanwhile.
    """

    def placed(self, placement: Placement, num_cached: int | None = None) -> None:
        """The request was placed, or its placement changed.

        num_cached: tokens of the prompt whose KV was in the cluster, when it is placed first.
        """

    def preempted(self, preempted: Preempted) -> None:
        """Submit the request again, once all tokens that it has generated are here."""

    def interrupted(self) -> int:
        """A term ended, and the next has begun: every open request must be submitted again.

        Returns how often `resubmitted` will be called for it: once by each front end.
        """

    def tokens_lost(self, request_id: int, sentence: str) -> None:
        """Tokens of the request were lost on their way; the sentence says where and why."""

    def ended(self, ended: Ended) -> None:
        """The scheduler ended the request."""
