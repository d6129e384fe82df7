"""Pages that instances kept though their controller was lost, and states that outlive a term.

Enters: what instances say in their hello and when they leave a term, losses. Leaves: the pages of
each request over all instances; where rows may go on. Does not know: what becomes of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from nanocp.values.members import Hello, Member
from nanocp.values.plan import TargetRun


class KeptPages:
    """Used from the controller's thread."""

    def __init__(self) -> None:
        self._said: dict[Member, tuple[tuple[int, TargetRun], ...]] = {}
        self._restarts: dict[Member, tuple[tuple[int, int, int], ...]] = {}

    def say(self, member: Member, hello: Hello | None) -> None:
        """Take what an instance has."""
        if hello is not None and hello.kept is not None:
            self._said[member] = hello.kept
        if hello is not None and hello.restarts:
            self._restarts[member] = hello.restarts

    def left(self, member: Member, restarts: tuple[tuple[int, int, int], ...]) -> None:
        """Take where rows may go on whose states an instance has that has left its term."""
        self._restarts[member] = restarts

    def term_began(self) -> None:
        """What instances said of their states was of the term before."""
        self._restarts.clear()

    @property
    def restarts(self) -> tuple[tuple[int, int, int], ...]:
        """(request, least, most): positions at which rows may go on, of all instances."""
        return tuple(chain(*self._restarts.values()))

    def lose(self, member: Member) -> None:
        """The member's process is gone."""
        self._said.pop(member, None)
        self._restarts.pop(member, None)

    def of(self, seats: Sequence[Member]) -> tuple[tuple[int, tuple[TargetRun, ...]], ...]:
        """(request, its pages) of these instances; none if some instance has no pages to tell of.

        One that is gone may have had the newer copy of a page that was moving. For the same reason
        a page that is in two places is in none.
        """
        if not self._said.keys() >= {*seats}:
            return ()
        runs: dict[int, list[TargetRun]] = {}
        for member in seats:
            for request_id, run in self._said[member]:
                runs.setdefault(request_id, []).append(run)
        return tuple((request_id, tuple(sorted(found))) for request_id, found in runs.items())
