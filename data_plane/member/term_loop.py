"""The loop of a member with an instance or a stage: terms, and the controller's messages."""

from __future__ import annotations

import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from queue import Empty, Full
from typing import Any

from data_plane.member.controller_link import ControllerLink, ControllerLost
from data_plane.member.lifetime import ShutdownRequested
from data_plane.member.token_streams import TokenStreams
from data_plane.transport.exchange import ExchangeError, ExchangeTimeout, PeerLost, TermOver
from data_plane.transport.segments import Segments
from nanocp.config.limits import LimitsConfig
from nanocp.values.commands import Join, Leave, Shutdown
from nanocp.values.members import Envelope, Left, Ready, Said, Suspect, TokensLost
from nanocp.values.sampling import Token

logger = logging.getLogger(__name__)

LOOK = object()
"""A message in the inbox: pages have come, or a token stream has ended."""


class TermLoop(ABC):
    """Joins one term after the other, and works in them. One thread, the caller's."""

    def __init__(
        self, link: ControllerLink, tokens: TokenStreams, segments: Segments, limits: LimitsConfig
    ) -> None:
        """segments: the member's own, whose term this loop sets."""
        self._link = link
        self._tokens = tokens
        self._segments = segments
        self._limits = limits

    @abstractmethod
    def _join(self, join: Join) -> Ready:
        """Join the term, whose peers do the same."""

    @abstractmethod
    def _work(self) -> None:
        """Do the term's work until TermOver."""

    @abstractmethod
    def _take_work(self, message: Any) -> None:
        """Take a message of the present term."""

    @abstractmethod
    def _leave(self) -> None:
        """Forget the term, which is over."""

    def _left(self) -> Left:
        return Left()

    @abstractmethod
    def _renew(self) -> None:
        """Give up ends of a term that will not begin."""

    @abstractmethod
    def join(self) -> None:
        """Wait, a bounded time, for threads of this loop; closing the instance ends them."""

    def run(self) -> None:
        """Work until the controller asks for a shutdown, which raises ShutdownRequested.

        After a failed wait the controller decides whether the term ends; then the next is joined.
        Any other exception is a failure of the member, or ControllerLost.
        """
        limit_s: float | None = self._limits.start_timeout_ms / 1000
        while True:
            join, term = self._await_join(limit_s)
            # Unbounded on purpose after the first term: a loss is mended elsewhere meanwhile. The
            # controller bounds that, and keepalive proves its stream.
            limit_s = None
            try:
                self._begin(join, term)
                self._work()
            except TermOver as over:
                logger.info("%s", over)
            except (PeerLost, ExchangeTimeout) as error:
                self._suspect(error)
            self._leave()
            self._send(self._left())

    def forget_term(self) -> None:
        self._leave()

    def _begin(self, join: Join, number: int) -> None:
        term = self._segments.term
        if number != term.number:
            # A process that was started for a term which ended before it began has made its ends.
            self._renew()
            term.number = number
        term.check()
        self._send(self._join(join))

    def _await_join(self, limit_s: float | None) -> tuple[Join, int]:
        while True:
            try:
                envelope: Any = self._link.inbox.get(timeout=limit_s)
            except Empty:
                limit = f"start_timeout_ms ({self._limits.start_timeout_ms} ms)"
                raise ControllerLost(f"no term began within {limit}") from None
            if envelope is None:
                raise ControllerLost("the controller's stream ended")
            if envelope is LOOK:
                continue
            match envelope.message:
                case Join() as join:
                    return join, envelope.term
                case Shutdown(reason):
                    raise ShutdownRequested(reason)
            _log_dropped(envelope)

    def _suspect(self, error: ExchangeError) -> None:
        """Report a failed wait, and wait for the term's end; else raise the error."""
        is_gone = isinstance(error, PeerLost)
        message = f"{type(error).__name__}: {error}"
        logger.info("%s", message)
        self._send(Suspect(error.peer, is_gone, message))
        deadline = time.monotonic() + self._limits.exchange_timeout_ms / 1000
        try:
            while (left_s := deadline - time.monotonic()) > 0:
                with contextlib.suppress(Empty):
                    self._take(self._link.inbox.get(timeout=left_s))
        except TermOver:
            return
        raise error

    def _send(self, message: Said) -> None:
        self._link.send(message, self._segments.term.number)

    def _take_all(self) -> None:
        while True:
            try:
                self._take(self._link.inbox.get_nowait())
            except Empty:
                return

    def _await_message(self, timeout_s: float | None) -> None:
        with contextlib.suppress(Empty):
            self._take(self._link.inbox.get(timeout=timeout_s))

    def _take(self, envelope: Any) -> None:
        if envelope is LOOK:
            return
        if envelope is None:
            raise ControllerLost("the controller's stream ended")
        message, term = envelope
        if isinstance(message, Shutdown):
            # At once, also from a window: the other members are asked to leave too.
            raise ShutdownRequested(message.reason)
        if term != self._segments.term.number:
            _log_dropped(envelope)
        elif isinstance(message, Leave):
            raise TermOver(f"term {term} is over")
        else:
            self._take_work(message)

    def _deliver_tokens(self, tokens: Sequence[Token]) -> None:
        lost = self._tokens.send(tokens)
        if lost:
            reason = "the front end does not take the tokens"
            self._send(TokensLost(tuple(sorted(lost)), reason))


def _log_dropped(envelope: Envelope) -> None:
    name = type(envelope.message).__name__
    logger.debug("dropped: %s of term %d, which is over", name, envelope.term)


def wake(link: ControllerLink) -> None:
    """Wake a loop that waits for a message."""
    try:
        link.inbox.put_nowait(LOOK)
    except Full:
        logger.debug("the inbox is full: the loop's thread is awake anyway")
