"""Suspicion: the choice of the lost instance when another cannot continue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from control_plane.coordinator.members.deadlines import Deadlines
from control_plane.coordinator.members.heartbeats import Heartbeats
from control_plane.coordinator.members.terms import Terms
from nanocp.values.members import Member, Suspect

_GONE_MS = 1000
"""Longest time for other means to notice a process that a peer calls gone."""


class Suspicion:
    """Chooses the instance to lose. Used from the controller's thread."""

    def __init__(
        self,
        terms: Terms,
        heartbeats: Heartbeats,
        deadlines: Deadlines,
        lose: Callable[[Member, str, str], None],
    ) -> None:
        """lose: see Members.lose."""
        self._terms = terms
        self._heartbeats = heartbeats
        self._deadlines = deadlines
        self._lose = lose

    def blame(self, instances: Sequence[int], message: str) -> None:
        """Lose the instances at the root of these instances' waits.

        message: follows the name of one of them.
        """
        members = [Member("instance", instance) for instance in instances]
        for member in {self._heartbeats.root(member): None for member in members}:
            self._lose(member, f"{member} {message}", "stuck")

    def suspected(self, member: Member, suspect: Suspect, term: int) -> None:
        """Record that a member cannot continue: its wait for an instance failed."""
        if term != self._terms.number or not self._terms.may_be_joined:
            return
        message = f"{member}: {suspect.message}"
        if suspect.instance is None:
            self._terms.end()
        elif suspect.is_gone:
            blamed = Member("instance", suspect.instance)
            lose = partial(self._lose_if_still_in, blamed, message, term)
            self._deadlines.start(f"{blamed} gone in term {term}", _GONE_MS, lose)
        else:
            root = self._heartbeats.root(Member("instance", suspect.instance))
            self._lose(root, message, "stuck")

    def _lose_if_still_in(self, member: Member, message: str, term: int) -> None:
        if self._terms.number == term and self._terms.may_be_joined:
            self._lose(member, message, "gone")
