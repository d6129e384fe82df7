"""The door between a front end and the controller: two protocols and the value that goes through.

Enters: what the front end submits. Leaves: what the brain decided about it. The two sides are threads of one process;
each side queues what the other calls and returns at once. Does not know: clients, streams, plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from nanocp.plan import Ended, Placement


@dataclass(frozen=True, slots=True)
class Submission:
    """A validated request on its way into the waiting queue."""

    request_id: int
    """Positive, counted by the front end in the order of submission."""
    prompt_ids: Sequence[int]
    """For prefill; the brain sees only their number."""
    prompt_len: int
    max_tokens: int
    row_start: bytes
    """An encoded RowInput (nanocp.wire.convert)."""


class ControllerDoor(Protocol):
    """The controller, as the front end sees it. Both calls come from the front end's thread and never block."""

    def submit(self, submission: Submission) -> None:
        """Queue the request. Never raises: a refusal is an `Ended`."""

    def abort(self, request_id: int) -> None:
        """The client wants the request to end. Unknown and ended ids are ignored."""


class ControllerEvents(Protocol):
    """The front end, as the controller sees it. Calls may come from any thread and never block."""

    def placed(self, placement: Placement) -> None:
        """The request lives here now. Unknown ids are ignored."""

    def ended(self, ended: Ended) -> None:
        """The brain ended the request. Unknown ids are ignored."""
