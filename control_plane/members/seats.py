"""Seats: which are wanted, how many must serve, which do after a loss, and where experts are.

Enters: the number of experts, seats that have a process, an operator's wishes. Leaves: seats of the
next term, and the expert table for them. Does not know: processes, streams, terms' numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from nanocp.config import ClusterConfig, Config
from nanocp.experts import ExpertTable, fewest_seats, place_experts

MAX_FAILURES = 3
"""Processes for one seat that may fail one after the other before they join a term."""


@dataclass(frozen=True, slots=True)
class SeatsNow:
    """The seats of a cluster for its operator."""

    serving: tuple[int, ...]
    """In the term, or joining it; ascending."""
    starting: tuple[int, ...]
    """Wanted, and not in the term: a process loads, or waits for the next term."""
    leaving: tuple[int, ...]
    """In the term and not wanted: what is there moves away."""
    empty: tuple[int, ...]
    """Neither wanted nor in the term."""
    fewest: int
    """How many must serve, so that every expert is somewhere."""


class Seats:
    """The seats of one cluster. Used from the controller's event loop."""

    def __init__(self, cluster: ClusterConfig, num_experts: int | None) -> None:
        """num_experts: of a layer, 0 for a dense model; None if every seat must always serve."""
        self._cluster = cluster
        self._num_experts = num_experts or 0
        num, redundant = cluster.num_instances, cluster.redundant_experts
        self.fewest = num
        """How many seats must serve."""
        if num_experts is not None:
            self.fewest = min(num, fewest_seats(num_experts, num, redundant))
        self.wanted = list(range(num))
        """Seats that are to serve, ascending."""
        self._asked: Future[None] | None = None
        """Done when the seats that an operator asked for serve."""
        self._failures: dict[int, int] = {}
        self._table: ExpertTable | None = None

    def to_go_on(self, left: Collection[int]) -> list[int]:
        """The seats of the next term after a loss, where those `left` have a process.

        They go on alone if they have slots for all experts. Else all that are wanted are waited
        for.
        """
        enough = len(left) >= self.fewest
        return sorted(left) if enough else sorted({*self.wanted, *left})

    def target(self, serving: Sequence[int], ready: Iterable[int]) -> tuple[int, ...]:
        """The seats of the next planned term: those wanted that serve, or are ready to join."""
        return tuple(sorted({*serving, *ready} & {*self.wanted}))

    def ask(self, seats: Sequence[int]) -> Future[None]:
        """Let an operator ask for other seats; returns what is done when they serve.

        Raises ValueError if they cannot serve, or if another change is under way.
        """
        num = self._cluster.num_instances
        wrong = [seat for seat in seats if not 0 <= seat < num]
        if wrong or len(set(seats)) != len(seats):
            raise ValueError(
                f"seats are {list(seats)}; they must be different, from 0 to {num - 1}"
            )
        if len(seats) < self.fewest:
            why = (
                "every expert must be somewhere (cluster.redundant_experts)"
                if self._num_experts
                else "the service was not started to go on with fewer"
            )
            raise ValueError(
                f"{len(seats)} of {num} instances cannot serve, but {self.fewest}: {why}"
            )
        if self._asked is not None and not self._asked.done():
            raise ValueError(f"the cluster is changing to seats {self.wanted}; ask again later")
        self.wanted = sorted(seats)
        self._failures.clear()
        self._asked = Future()
        return self._asked

    def serve(self, seats: Sequence[int]) -> None:
        """A term with these seats has begun."""
        for seat in seats:
            self._failures.pop(seat, None)
        if self._asked is not None and list(seats) == self.wanted and not self._asked.done():
            self._asked.set_result(None)

    def failed(self, seat: int, message: str) -> bool:
        """A process for a seat failed before it joined a term; returns whether another is to come.

        What an operator asked for fails at once, and changes nothing.
        """
        self._failures[seat] = self._failures.get(seat, 0) + 1
        is_asked = self._asked is not None and not self._asked.done()
        if not is_asked and self._failures[seat] < MAX_FAILURES:
            return True
        self.wanted = [each for each in self.wanted if each != seat]
        if self._asked is not None and not self._asked.done():
            self._asked.set_exception(RuntimeError(f"{message}; the cluster is as it was"))
        return False

    def now(self, serving: Sequence[int]) -> SeatsNow:
        """The seats of which these serve, for an operator."""
        all_seats = range(self._cluster.num_instances)
        return SeatsNow(
            serving=tuple(serving),
            starting=tuple(seat for seat in self.wanted if seat not in serving),
            leaving=tuple(seat for seat in serving if seat not in self.wanted),
            empty=tuple(s for s in all_seats if s not in serving and s not in self.wanted),
            fewest=self.fewest,
        )

    def table(self, seats: Sequence[int]) -> ExpertTable:
        """Place the experts on these seats; as few as possible are loaded anew."""
        self._table = place_experts(
            self._num_experts,
            self._cluster.num_instances,
            self._cluster.redundant_experts,
            seats,
            self._table,
        )
        return self._table


def recovers(config: Config) -> bool:
    """Whether the cluster goes on after it has lost a member."""
    is_cpu = config.data_plane.device == "cpu" and config.data_plane.page_backend != "nixl"
    return is_cpu and config.limits.recovery_timeout_ms > 0
