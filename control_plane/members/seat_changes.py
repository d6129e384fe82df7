"""Planned changes: seats that an operator wants, newcomers that wait, and the term between them.

Enters: wishes for seats, newcomers, terms that begin and settle. Leaves: processes to start and to
retire, seats for the scheduler to prepare, terms to end. Does not know: streams, why a process is
lost.

A newcomer has loaded its weights before the scheduler hears of it. So one that fails changes
nothing, and the pause is that of a term alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from control_plane.member_streams import Member
from control_plane.members.replacements import Replacements
from control_plane.members.seats import Seats
from control_plane.members.terms import Standing, Terms

logger = logging.getLogger(__name__)


class SeatChanges:
    """The way from the seats that serve to those that are wanted. Used from the event loop."""

    def __init__(
        self,
        seats: Seats,
        terms: Terms,
        replacements: Replacements,
        prepare: Callable[[tuple[int, ...]], None],
        retire: Callable[[Member], None],
    ) -> None:
        """prepare: lets the scheduler bring the term to its end. retire: lets a process go."""
        self.seats = seats
        self._terms = terms
        self._replacements = replacements
        self._prepare = prepare
        self._retire = retire
        self._instances = tuple(terms.standing)
        self._is_preparing: tuple[int, ...] | None = None
        """Seats of the next term, while the scheduler prepares it."""

    def want(self, seats: Sequence[int]) -> Future[None]:
        """Let the cluster have other seats; returns what is done when they serve.

        Raises ValueError: see Seats.ask.
        """
        asked = self.seats.ask(seats)
        for seat in self.seats.wanted:
            if self._terms.standing[self._instances[seat]] is Standing.ABSENT:
                self._start(seat)
        self.go_on()
        return asked

    def _start(self, seat: int) -> None:
        """Start another process for a seat that has none, or whose process is lost."""
        member = self._instances[seat]
        self._replacements.replace(
            member,
            term=lambda: self._terms.number + 1,
            lives_on=lambda: None,
            failed=lambda reason: self.newcomer_lost(member, f"{member}: {reason}"),
        )

    def newcomer_lost(self, member: Member, message: str) -> None:
        """A process that is not in the term is lost; another one may be started."""
        seat = self._instances.index(member)
        self._terms.gone(member)
        if seat in self.seats.wanted and self.seats.failed(seat, message):
            logger.warning("%s; another process takes its place", message)
            self._start(seat)
        else:
            logger.warning("%s; its seat stays empty", message)
            self._replacements.kill(member)
        self.go_on()

    def go_on(self) -> None:
        """Take the next step, now that a seat, a wish or the term has changed."""
        serving = tuple(map(self._instances.index, self._terms.seats))
        if not self._terms.is_serving:
            return
        ready = map(self._instances.index, self._terms.those(Standing.OUT))
        target = self.seats.target(serving, ready)
        if target != (self._is_preparing or serving):
            self._is_preparing = None if target == serving else target
            self._prepare(target)

    def term_ended(self) -> None:
        """Whatever was prepared is void."""
        self._is_preparing = None

    def term_began(self) -> None:
        """A term serves: processes that are not wanted any more are let go."""
        for member in self._terms.left_out():
            if self._instances.index(member) not in self.seats.wanted:
                self._replacements.retire(member)
                self._terms.gone(member)
                self._retire(member)
        self.seats.serve([self._instances.index(each) for each in self._terms.seats])
        self.go_on()

    def settled(self) -> None:
        """The scheduler has brought the term to its end: the next one has the prepared seats."""
        if self._terms.is_serving and self._is_preparing is not None:
            seats = [self._instances[seat] for seat in self._is_preparing]
            self._terms.change(seats, keeps_rows=True)
