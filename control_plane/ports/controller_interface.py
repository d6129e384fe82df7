"""The interface between a front end and the controller: two protocols and a value.

They are threads or processes (remote/). Each queues the other's calls, and returns at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from nanocp.values.plan import Arrival, Ended, Placement, Preempted
from nanocp.values.remote_blocks import RemoteBlocks


@dataclass(frozen=True, slots=True)
class Submission:
    """A validated request on its way into the waiting queue."""

    arrival: Arrival
    """The scheduler's part. Ids are numbered by the front end; every attempt keeps its own."""
    prompt_ids: Sequence[int]
    """Prompt for the prefill, with output of earlier attempts; the scheduler only sees its
    length."""
    queue_timeout_us: int | None = None
    """The request ends with EXPIRED if it is not placed within this time; None: no limit."""
    front_end: str = ""
    """host:port that gets the log probabilities of the prompt."""
    prompt_logprobs: int | None = None
    """Most likely tokens beside each prompt token; None: no log probabilities of the prompt."""
    salt: bytes = b""
    """For the prefill; see PrefillRequest."""
    remote: RemoteBlocks | None = None
    """Where the prompt's KV is to be pulled from; None: nobody has it, or the request has output.
    """

    @property
    def request_id(self) -> int:
        """The id of its arrival."""
        return self.arrival.request_id

    def event(self, now_us: int) -> Arrival:
        """Return the scheduler's event, at the time when the controller takes it."""
        waits_us = self.queue_timeout_us
        return replace(
            self.arrival,
            deadline_us=None if waits_us is None else now_us + waits_us,
            is_recomputed=self.arrival.attempt > 0 and self.prompt_logprobs is not None,
        )


class ControllerInterface(Protocol):
    """The controller, as the front end sees it; no call blocks."""

    def submit(self, submission: Submission) -> None:
        """Queue the request. Never raises: a refusal is an `Ended`."""

    def resubmitted(self) -> None:
        """Record that this front end has submitted all open requests again (`interrupted`)."""

    def abort(self, request_id: int) -> None:
        """End the request for the client. Unknown and ended ids are ignored."""

    def refuse_blocks(self, blocks: RemoteBlocks) -> None:
        """Let the engine free blocks that a client named, unless a submitted request holds them."""


class ControllerEvents(Protocol):
    """The front end, as the controller sees it.

    Calls may come from any thread and never block. Unknown ids are ignored: a request may have
    ended.
    """

    def placed(self, placement: Placement, num_cached: int | None = None) -> None:
        """Take the request's placement.

        num_cached: cached tokens of the prompt, at the first placement.
        """

    def preempted(self, preempted: Preempted) -> None:
        """Submit the request again, once all its generated tokens are here."""

    def interrupted(self) -> int:
        """Submit every open request again: a term ended, and the next has begun.

        Returns the number of front ends that will call `resubmitted`.
        """

    def tokens_lost(self, request_id: int, sentence: str) -> None:
        """Submit the request again, from its tokens in order; the sentence says what was lost."""

    def ended(self, ended: Ended) -> None:
        """Take the end of a request from the scheduler."""
