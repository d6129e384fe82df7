"""Messages between the stages of a pipeline: hidden rows forwards, sampled tokens back.

Enters: messages of a stage. Leaves: the same, in order, at the stage they are for. Does not know:
layers, what hidden rows are. LocalStageLinks is the form within one process.
"""

from __future__ import annotations

from collections import deque
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


class LocalStageLinks(StageLinks):
    """Links within one process; the queues hold no more than the passes in flight."""

    def __init__(
        self, stage: int, hidden: list[deque[HiddenRows]], tokens: deque[PassTokens]
    ) -> None:
        """hidden: for each stage, what comes from the stage before."""
        self._stage = stage
        self._hidden = hidden
        self._tokens = tokens

    @classmethod
    def create_all(cls, num_stages: int) -> list[LocalStageLinks]:
        """Make the ends of all stages."""
        hidden: list[deque[HiddenRows]] = [deque() for _ in range(num_stages)]
        tokens: deque[PassTokens] = deque()
        return [cls(stage, hidden, tokens) for stage in range(num_stages)]

    def connect(self) -> None:
        """Nothing: queues need none."""

    def wait(self, timeout_ms: float) -> None:
        """Return: what can come in one process is here."""

    def close(self) -> None:
        """Nothing: queues need none."""

    def send_hidden(self, rows: HiddenRows) -> None:
        waiting = self._hidden[self._stage + 1]
        assert len(waiting) < len(self._hidden), f"more than {len(waiting)} passes are in flight"
        waiting.append(rows)

    def receive_hidden(self) -> HiddenRows | None:
        waiting = self._hidden[self._stage]
        return waiting.popleft() if waiting else None

    def send_tokens(self, tokens: PassTokens) -> None:
        self._tokens.append(tokens)

    def receive_tokens(self) -> PassTokens | None:
        return self._tokens.popleft() if self._tokens else None
