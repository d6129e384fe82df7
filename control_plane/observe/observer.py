"""What the front end tells whoever measures it. Seconds are measured here, so that an observer
keeps no state.

Enters: nothing. Leaves: one call for each thing that happens to a request. Does not know: metrics,
their names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from nanocp.plan import FinishReason


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request that ended, however it ended."""

    prompt_len: int
    generated_len: int
    max_tokens: int
    e2e_s: float
    """Arrival to end."""
    queue_s: float | None
    """Arrival to placement; None: it was never placed."""
    prefill_s: float | None
    """Placement to first token; None: there was none."""
    decode_s: float | None
    """First token to last."""


class Observer(Protocol):
    """Called from the front end's thread; must not block or raise."""

    def on_request(self, num_choices: int) -> None:
        """A client sent a valid request for so many choices; each is a request from here on."""

    def on_submitted(self, prompt_len: int) -> None:
        """A valid request went to the controller."""

    def on_first_token(self, ttft_s: float) -> None:
        """Its first token came, so long after its arrival."""

    def on_token(self, interval_s: float) -> None:
        """Another token came, so long after the one before (tokens of one message share the time)."""

    def on_finished(self, reason: FinishReason, times: EndedRequest) -> None:
        """A submitted request ended."""

    def on_request_over(self, longest: int) -> None:
        """What a client asked is over; the longest of its choices has so many tokens."""


class Unobserved:
    """Nobody measures."""

    def on_request(self, num_choices: int) -> None:
        """Nothing."""

    def on_submitted(self, prompt_len: int) -> None:
        """Nothing."""

    def on_first_token(self, ttft_s: float) -> None:
        """Nothing."""

    def on_token(self, interval_s: float) -> None:
        """Nothing."""

    def on_finished(self, reason: FinishReason, times: EndedRequest) -> None:
        """Nothing."""

    def on_request_over(self, longest: int) -> None:
        """Nothing."""
