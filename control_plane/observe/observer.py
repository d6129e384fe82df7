"""The interface by which a front end reports its requests, with durations, to metrics and logs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from nanocp.values.plan import FinishReason


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request that ended: its lengths in tokens, its durations in seconds."""

    prompt_len: int
    generated_len: int
    max_tokens: int
    e2e_s: float
    """Arrival to end."""
    queue_s: float | None
    """Arrival to placement; None if it was never placed."""
    prefill_s: float | None
    """Placement to first token; None if there was none."""
    decode_s: float | None
    """First token to last; None if there was none."""
    client_id: str = ""
    """The client's id of the request, which its choices share."""
    request_id: int = 0
    """The cluster's number of the request."""
    endpoint: str = ""
    """What the client called."""
    tenant: str = ""
    """Whose request it is; empty if nobody says."""
    moe_binding: int | None = None
    """None if it was never placed."""
    cp_degree: int | None = None
    """None if it was never placed."""
    num_attempts: int = 1
    """Submissions to the scheduler: more than one after a preemption or a loss."""
    message: str = ""
    """Reason for an end before its last token."""
    traceparent: str = ""
    """The W3C header that the client sent; empty without one."""


PAUSES = ("term", "controller", "preempted", "tokens_lost")
"""Causes of a pause until the request's next attempt: term, controller, preemption, lost tokens."""


class Observer(Protocol):
    """Called from the front end's thread. Calls must not block or raise."""

    def on_request(self, num_choices: int) -> None:
        """Record a client's valid request; each of its choices becomes a request."""

    def on_submitted(self, prompt_len: int) -> None:
        """Record that a valid request was submitted to the controller."""

    def on_first_token(self, ttft_s: float) -> None:
        """Record a request's first token, this time after its arrival."""

    def on_token(self, interval_s: float, paused_by: str = "") -> None:
        """Record another token of a request, this time after the last one.

        Tokens of one message share their time. paused_by: one of PAUSES after another attempt, else
        empty.
        """

    def on_finished(self, reason: FinishReason, times: EndedRequest) -> None:
        """Record that a submitted request ended."""

    def on_request_over(self, longest: int) -> None:
        """Record that a client's request is over, with its longest choice's tokens."""

    def http_responded(self, endpoint: str, method: str, status: int) -> None:
        """Record that an HTTP response began."""
