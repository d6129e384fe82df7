"""What the front end tells whoever measures it. Seconds are measured here, so that an observer keeps no state.

Enters: nothing. Leaves: one call for each thing that happens to a request. Does not know: metrics, their names.
"""

from __future__ import annotations

from typing import Protocol

from nanocp.plan import FinishReason


class Observer(Protocol):
    """Called from the front end's thread; must not block or raise."""

    def on_submitted(self, prompt_len: int) -> None:
        """A valid request went to the controller."""

    def on_first_token(self, ttft_s: float) -> None:
        """Its first token came, so long after its arrival."""

    def on_token(self, interval_s: float) -> None:
        """Another token came, so long after the one before (tokens of one message share the time)."""

    def on_finished(self, reason: FinishReason, generated_len: int, e2e_s: float) -> None:
        """A submitted request ended, so long after its arrival."""


class Unobserved:
    """Nobody measures."""

    def on_submitted(self, prompt_len: int) -> None:
        """Nothing."""

    def on_first_token(self, ttft_s: float) -> None:
        """Nothing."""

    def on_token(self, interval_s: float) -> None:
        """Nothing."""

    def on_finished(self, reason: FinishReason, generated_len: int, e2e_s: float) -> None:
        """Nothing."""
