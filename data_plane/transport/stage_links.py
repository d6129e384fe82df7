"""Messages between the stages of a pipeline: hidden rows forwards, sampled tokens back."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol


class HiddenRows(NamedTuple):
    """A stage's output for the next stage."""

    number: int
    layout: int
    next_layer: int
    """The first layer that has not run."""
    rows: Any
    """Hidden states of every token of the pass, by span."""


class PassTokens(NamedTuple):
    """The tokens that the last stage sampled in a pass, perhaps none."""

    number: int
    tokens: tuple[tuple[int, int], ...]
    """(request id, token id)."""


class StageLinks(Protocol):
    """One stage's links: to the next stage, and from the last to the first."""

    def connect(self) -> None:
        """Attach to the next stage, before anything is sent."""

    def wait(self, timeout_ms: float) -> None:
        """Wait, at most this time, for a message that no earlier `wait` has seen."""

    def close(self) -> None:
        """Release both ends. Idempotent."""

    def send_hidden(self, rows: HiddenRows) -> None:
        """Send to the next stage. Never blocks: the passes in flight are bounded."""

    def receive_hidden(self) -> HiddenRows | None:
        """Return the next message of the stage before, or None if it has not come.

        Raises PeerLost if its connection has ended.
        """

    def send_tokens(self, tokens: PassTokens) -> None:
        """Send from the last stage to the first; they may be one stage."""

    def receive_tokens(self) -> PassTokens | None:
        """Return the last stage's next message or None. Raises PeerLost as `receive_hidden`."""
