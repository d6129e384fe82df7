"""Messages between the stages of a pipeline: hidden rows forwards, sampled tokens back.

Enters: messages of a stage. Leaves: the same, in order, at the stage they are for. Does not know:
layers, what hidden rows are.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol


class HiddenRows(NamedTuple):
    """What a stage hands to the next one after its layers."""

    number: int
    """The pass."""
    layout: int
    """The layout in which it runs."""
    next_layer: int
    """The first layer that was not run."""
    rows: Any
    """The hidden state of every token of the pass, in the order of its spans."""


class PassTokens(NamedTuple):
    """What the last stage sampled in a pass; every pass has one, that without tokens too."""

    number: int
    tokens: tuple[tuple[int, int], ...]
    """(request id, token id)."""


class StageLinks(Protocol):
    """One stage's ends of the links to the next stage, and from the last to the first."""

    def connect(self) -> None:
        """Attach to the next stage, before anything is sent."""

    def wait(self, timeout_ms: float) -> None:
        """Wait until a message comes that no earlier `wait` has seen, at most so long."""

    def close(self) -> None:
        """Release both ends. Idempotent."""

    def send_hidden(self, rows: HiddenRows) -> None:
        """To the next stage. Never blocks: the passes in flight are bounded."""

    def receive_hidden(self) -> HiddenRows | None:
        """The next message of the stage before; None if it is not here yet.

        Raises PeerLost if the connection has ended by which it would come.
        """

    def send_tokens(self, tokens: PassTokens) -> None:
        """From the last stage to the first; they may be the same stage."""

    def receive_tokens(self) -> PassTokens | None:
        """The next message of the last stage; None if it is not here yet.

        Raises PeerLost as `receive_hidden` does.
        """
