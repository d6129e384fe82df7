"""Pages kept by instances whose controller was lost, and states that outlive a term."""

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
        """Take an instance's kept pages from its hello."""
        if hello is not None and hello.kept is not None:
            self._said[member] = hello.kept
        if hello is not None and hello.restarts:
            self._restarts[member] = hello.restarts

    def left(self, member: Member, restarts: tuple[tuple[int, int, int], ...]) -> None:
        """Take the restart positions of an instance that left its term."""
        self._restarts[member] = restarts

    def term_began(self) -> None:
        """Forget the states of the last term."""
        self._restarts.clear()

    @property
    def restarts(self) -> tuple[tuple[int, int, int], ...]:
        """(request, least, most): positions at which rows may continue, of all instances."""
        return tuple(chain(*self._restarts.values()))

    def lose(self, member: Member) -> None:
        """Forget a member without a process."""
        self._said.pop(member, None)
        self._restarts.pop(member, None)

    def of(self, seats: Sequence[Member]) -> tuple[tuple[int, tuple[TargetRun, ...]], ...]:
        """Return (request, its pages) of these instances; none if one of them does not know.

        A page in two places is in none: a lost instance may have had the newer copy.
        """
        if not self._said.keys() >= {*seats}:
            return ()
        runs: dict[int, list[TargetRun]] = {}
        for member in seats:
            for request_id, run in self._said[member]:
                runs.setdefault(request_id, []).append(run)
        return tuple((request_id, tuple(sorted(found))) for request_id, found in runs.items())
