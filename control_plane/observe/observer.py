"""What a front end reports of its requests.

Enters: nothing. Leaves: one call for each thing that happens to a request. Does not know: metrics,
their names.

Durations are measured by the front end, so that an observer keeps no state.
"""

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
    """See `Arrival.tenant`."""
    moe_binding: int | None = None
    """The latest MoE binding; None if it was never placed."""
    cp_degree: int | None = None
    """The latest CP degree; None if it was never placed."""
    num_attempts: int = 1
    """Submissions to the scheduler: more than one after a preemption or a loss."""
    message: str = ""
    """Why it ended, if that was not by its last token."""
    traceparent: str = ""
    """The W3C header that the client sent; empty without one."""


PAUSES = ("term", "controller", "preempted", "tokens_lost")
"""What may pause a stream until its request has begun another attempt: the end of a term after a
loss, another controller, a preemption, tokens that were lost on their way to the front end."""


class Observer(Protocol):
    """Called from the front end's thread. Calls must not block or raise."""

    def on_request(self, num_choices: int) -> None:
        """A client sent a valid request for this number of choices; each becomes a request."""

    def on_submitted(self, prompt_len: int) -> None:
        """A valid request was submitted to the controller."""

    def on_first_token(self, ttft_s: float) -> None:
        """The first token of a request came, this time after its arrival."""

    def on_token(self, interval_s: float, paused_by: str = "") -> None:
        """Another token of a request came, this time after the one before.

        Tokens of one message share their time. paused_by: one of PAUSES if the request has begun
        another attempt since the one before, else empty.
        """

    def on_finished(self, reason: FinishReason, times: EndedRequest) -> None:
        """A submitted request ended."""

    def on_request_over(self, longest: int) -> None:
        """A client's request is over; its longest choice has this number of tokens."""
