"""The controller's messages to a prefill that computes prompts itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from data_plane.member.controller_link import ControllerLink, ControllerLost
from data_plane.member.lifetime import ShutdownRequested
from nanocp.values.commands import CancelPrefill, Join, PagesArrived, PrefillRequest, Shutdown
from nanocp.values.members import Said
from nanocp.values.plan import TransferFailed

MAX_QUEUED_PROMPTS = 4096
"""More are given up at once."""


class TicketLoop(ABC):
    """Dispatches the controller's messages to a prefill that computes prompts itself."""

    def __init__(self, link: ControllerLink) -> None:
        self._link = link

    @abstractmethod
    def run(self) -> None:
        """Prefill until the controller asks for a shutdown (ShutdownRequested).

        Any other exception is a failure of the prefill, or ControllerLost.
        """

    @abstractmethod
    def forget_term(self) -> None:
        """Drop every prompt of a term that is over."""

    @property
    @abstractmethod
    def _term(self) -> int:
        """The number of the present term."""

    @abstractmethod
    def _join(self, join: Join, term: int) -> None:
        """Join another term."""

    @abstractmethod
    def _queue(self, request: PrefillRequest) -> None:
        """Prefill this prompt after those that came before."""

    @abstractmethod
    def _cancel(self, ticket: int) -> None:
        """Send no page of the ticket any more."""

    @abstractmethod
    def _arrived(self, ticket: int) -> None:
        """Forget the ticket: all its pages have arrived."""

    @abstractmethod
    def _num_queued(self) -> int:
        """Prompts that wait."""

    def _take(self, envelope: Any) -> None:
        if envelope is None:
            raise ControllerLost("the controller's stream ended")
        match envelope.message:
            case PrefillRequest() as request:
                if self._num_queued() >= MAX_QUEUED_PROMPTS:
                    reason = f"{MAX_QUEUED_PROMPTS} prompts wait for the prefill"
                    self._give_up(request.transfer.ticket, reason)
                else:
                    self._queue(request)
            case CancelPrefill(ticket):
                self._cancel(ticket)
            case PagesArrived(ticket):
                self._arrived(ticket)
            case Join() as join:
                self.forget_term()
                self._join(join, envelope.term)
            case Shutdown(reason):
                raise ShutdownRequested(reason)
            case message:
                raise AssertionError(f"the controller sent {message} to a running prefill")

    def _send(self, message: Said) -> None:
        self._link.send(message, self._term)

    def _give_up(self, ticket: int, message: str) -> None:
        self._send(TransferFailed(ticket, message))
