"""The door between a front end and the controller: two protocols and the value that goes through.

Enters: what the front end submits. Leaves: what the brain decided about it. The two sides are
threads of one process; each side queues what the other calls and returns at once. Does not know:
clients, streams, plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from nanocp.plan import Arrival, Ended, Placement, Preempted


@dataclass(frozen=True, slots=True)
class Submission:
    """A validated request on its way into the waiting queue, or a preempted one on its way back."""

    request_id: int
    """Positive, counted by the front end in the order of submission. A preempted request keeps its
    own."""
    prompt_ids: Sequence[int]
    """For prefill; the brain sees only their number. What a preempted request has generated is part
    of its prompt."""
    prompt_len: int
    max_tokens: int
    row_start: bytes
    """An encoded RowInput (nanocp.wire.convert)."""
    priority: int = 0
    """Its class: requests of a lower number go first."""
    queue_timeout_us: int | None = None
    """It ends with EXPIRED if it is not placed within this time. None: it waits as long as it
    takes."""
    resumes: bool = False
    """It was preempted; max_tokens is what it still may generate."""
    front_end: str = ""
    """host:port that gets the log probabilities of the prompt."""
    prompt_logprobs: int | None = None
    """Most likely tokens to name beside each of the prompt; None: nothing is told of the prompt."""
    page_hashes: tuple[bytes, ...] = ()
    """See `Arrival.page_hashes`."""
    attempt: int = 0
    """See `Arrival.attempt`."""

    def arrival(self, now_us: int) -> Arrival:
        """The event that it becomes for the scheduler when the controller takes it."""
        waits = self.queue_timeout_us
        return Arrival(
            self.request_id,
            self.prompt_len,
            self.max_tokens,
            self.row_start,
            priority=self.priority,
            deadline_us=None if waits is None else now_us + waits,
            resumes=self.resumes,
            page_hashes=self.page_hashes,
            attempt=self.attempt,
        )


class ControllerInterface(Protocol):
    """The controller, as the front end sees it. Both calls come from the front end's thread and
    never block."""

    def submit(self, submission: Submission) -> None:
        """Queue the request. Never raises: a refusal is an `Ended`."""

    def resubmitted(self) -> None:
        """Every open request of this front end has been submitted again (`interrupted`)."""

    def abort(self, request_id: int) -> None:
        """The client wants the request to end. Unknown and ended ids are ignored."""


class ControllerEvents(Protocol):
    """The front end, as the controller sees it. Calls may come from any thread and never block.

    Unknown ids are ignored: a request may have ended meanwhile.
    """

    def placed(self, placement: Placement) -> None:
        """The request lives here now."""

    def preempted(self, preempted: Preempted) -> None:
        """The request must be submitted again, with the tokens it has generated, once all of them
        are here."""

    def interrupted(self) -> None:
        """A term ended, and the next has begun: every open request must be submitted again."""

    def ended(self, ended: Ended) -> None:
        """The brain ended the request."""
