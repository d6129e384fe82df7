"""Planned changes of seats by an operator, with newcomers and the term between.

A newcomer has loaded its weights before the term ends, so the pause is short.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from control_plane.coordinator.members.output import Facts, MembersOutput
from control_plane.coordinator.members.replacements import Replacements
from control_plane.coordinator.members.seats import Seats
from control_plane.coordinator.members.terms import Standing, Terms
from nanocp.values.members import Member
from nanocp.values.plan import SeatsWanted


class SeatChanges:
    """The change from serving seats to wanted ones."""

    def __init__(
        self,
        seats: Seats,
        terms: Terms,
        replacements: Replacements,
        facts: Facts,
        output: MembersOutput,
        retire: Callable[[Member], None],
    ) -> None:
        """retire: lets a process go."""
        self.seats = seats
        self._terms = terms
        self._replacements = replacements
        self._facts, self._output = facts, output
        self._retire = retire
        self._instances = tuple(terms.standing)
        self._is_preparing: tuple[int, ...] | None = None
        """Seats of the next term, while the scheduler prepares it."""
        self._has_begun = False
        """Whether a term has served. Until then every process is under way."""

    def want(self, seats: Sequence[int], by: str) -> Future[None]:
        """Change the seats, as Seats.ask; it fails if processes to come have no room."""
        asked = self.seats.ask(seats, by)
        absent = {*self._terms.those(Standing.ABSENT)} & {self._instances[seat] for seat in seats}
        num_new = len(absent) - sum(map(self._replacements.is_coming, absent))
        if obstacle := self._facts.obstacle_to_more(num_new):
            self.seats.undo(obstacle)
        self.go_on()
        return asked

    def undo(self) -> None:
        """Return to the earlier seats. Raises ValueError: see Seats.undo."""
        self.seats.undo("the change was undone")
        self.go_on()

    def _start(self, seat: int) -> None:
        member = self._instances[seat]
        self._replacements.replace(
            member,
            lives_on=lambda: None,
            failed=lambda reason: self.newcomer_lost(member, f"{member}: {reason}"),
        )

    def newcomer_lost(self, member: Member, message: str) -> None:
        """Record the loss of a process outside the term; another may be started."""
        seat = self._instances.index(member)
        left = [self._instances.index(each) for each in self._terms.present if each != member]
        if seat in self.seats.wanted and self.seats.failed(seat, left, message):
            self._output.warn(f"{message}; another process takes its place")
            self._start(seat)
        else:
            self._output.warn(f"{message}; its seat stays empty")
            self._replacements.kill(member)
        self._terms.gone(member)
        self.go_on()

    def go_on(self) -> None:
        """Take the next step after a seat, a wish or the term has changed."""
        if not self._has_begun:
            return
        for seat, member in enumerate(self._instances):
            self._fill_or_empty(seat, member)
        if not self._terms.is_serving:
            return
        serving = tuple(map(self._instances.index, self._terms.seats))
        ready = map(self._instances.index, self._terms.those(Standing.OUT))
        target = self.seats.target(serving, ready)
        if target != (self._is_preparing or serving):
            self._is_preparing = None if target == serving else target
            self._output.events.append(SeatsWanted(target))
        self.seats.serve(serving)

    def _fill_or_empty(self, seat: int, member: Member) -> None:
        standing, is_coming = self._terms.standing[member], self._replacements.is_coming(member)
        if seat in self.seats.wanted:
            if standing is Standing.ABSENT and not is_coming:
                self._start(seat)
        elif not self._terms.is_serving:
            return  # The next term may be waiting for it.
        elif standing is Standing.OUT:
            self._replacements.retire(member)
            self._terms.gone(member)
            self._retire(member)
        elif is_coming:
            self._replacements.kill(member)

    def term_ended(self) -> None:
        """Drop all preparations."""
        self._is_preparing = None

    def term_began(self) -> None:
        """A term serves."""
        self._has_begun = True
        self.go_on()

    def settled(self) -> None:
        """Begin the next term on the prepared seats."""
        if self._terms.is_serving and self._is_preparing is not None:
            seats = [self._instances[seat] for seat in self._is_preparing]
            self._terms.change(seats, keeps_rows=True)
