"""Terms: the standing of each seat, and the way from one term to the next (protocol.md, terms).

A loss on the way begins it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol

from nanocp.values.members import Member


class Standing(Enum):
    """The standing of a seat's process."""

    ABSENT = "it has not said hello"
    OUT = "it is in no term"
    JOINING = "it was asked to join the term"
    IN = "it is in the term"
    LEAVING = "it was asked to leave the term"


class TermSteps(Protocol):
    """Actions on the way from term to term. Called from the controller's thread."""

    def ask_to_leave(self, instance: Member) -> None:
        """End the term for this instance, which may still be in it."""

    def ask_to_join(self) -> None:
        """Ask every instance of `seats` to join the next term; none is in one."""

    def term_began(self) -> None:
        """Record that every instance is in the term."""

    def term_ended(self) -> None:
        """Record that the term that served is over."""


class Terms:
    """The seats of one cluster, and the number of its term."""

    def __init__(
        self,
        instances: Sequence[Member],
        steps: TermSteps,
        waits_for: Callable[[str], None] = lambda phase: None,
    ) -> None:
        """waits_for: called with the phase that the next term waits for (metric_families)."""
        self._steps = steps
        self._waits_for = waits_for
        self.number = 0
        """Number of the term that serves or is being joined; 0 before the first."""
        self.is_serving = False
        """Whether the term has begun and is not over."""
        self.instances = tuple(instances)
        self.standing = dict.fromkeys(instances, Standing.ABSENT)
        self.seats = list(instances)
        """Instances of the term, or of the one being joined; ascending."""
        self.keeps_rows = False
        """True if the last term ended in order and its rows continue."""
        self.is_after_loss = False
        """Whether an instance was lost since a term last began."""

    @property
    def may_be_joined(self) -> bool:
        """Return whether the term has an exchange to join."""
        return self.number > 0 and all(
            self.standing[each] in (Standing.JOINING, Standing.IN) for each in self.seats
        )

    @property
    def present(self) -> list[Member]:
        """The instances that have a process, ascending."""
        return [each for each, where in self.standing.items() if where is not Standing.ABSENT]

    def arrived(self, instance: Member) -> None:
        """Record that a process for the seat has said hello."""
        self.standing[instance] = Standing.OUT
        self._advance()

    def has_left(self, instance: Member, term: int) -> None:
        """Record that the instance has forgotten the term."""
        if self.standing[instance] is Standing.LEAVING and term == self.number:
            self.standing[instance] = Standing.OUT
            self._advance()

    def has_joined(self, instance: Member, term: int) -> None:
        """Record that the instance is attached to all others in the term."""
        if self.standing[instance] is Standing.JOINING and term == self.number:
            self.standing[instance] = Standing.IN
            self._advance()

    def lost(self, instance: Member, seats: Sequence[Member]) -> None:
        """End the term: a seat's process is gone. seats: for the next term."""
        self.standing[instance] = Standing.ABSENT
        self.is_after_loss = True
        self.change(seats)

    def change(self, seats: Sequence[Member], keeps_rows: bool = False) -> None:
        """End the term; these instances join the next one.

        keeps_rows: the scheduler has brought the term to its end.
        """
        self.seats = list(seats)
        self.end(keeps_rows)

    def gone(self, instance: Member) -> None:
        """Stop waiting for a process outside the term, which is gone."""
        self.standing[instance] = Standing.ABSENT
        self._advance()

    def end(self, keeps_rows: bool = False) -> None:
        """End the term; the instances of `seats` join another."""
        self.keeps_rows = keeps_rows
        if self.is_serving:
            self.is_serving = False
            self._steps.term_ended()
        for instance, standing in self.standing.items():
            if standing in (Standing.JOINING, Standing.IN):
                self.standing[instance] = Standing.LEAVING
                self._steps.ask_to_leave(instance)
        self._advance()

    def those(self, standing: Standing) -> list[Member]:
        """The instances that stand there, ascending."""
        return [instance for instance, each in self.standing.items() if each is standing]

    def _advance(self) -> None:
        standings = {self.standing[each] for each in self.seats}
        has_left = set(self.standing.values()) <= {Standing.OUT, Standing.ABSENT}
        if Standing.LEAVING in self.standing.values():
            self._waits_for("leave")
        elif has_left:
            self._waits_for("load")
        if standings == {Standing.OUT} and has_left:
            self._waits_for("join")
            self.number += 1
            self.standing.update(dict.fromkeys(self.seats, Standing.JOINING))
            self._steps.ask_to_join()
        elif standings == {Standing.IN} and not self.is_serving:
            self.is_serving = True
            self._steps.term_began()
            self.is_after_loss = False
