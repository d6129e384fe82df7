"""Seats: those wanted, those that must serve, those after a loss, and the place of experts."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from nanocp.config.cluster import ClusterConfig
from nanocp.values.experts import ExpertTable, fewest_seats, num_slots, place_experts

MAX_FAILURES = 3
"""Processes for one seat that may fail one after the other before they join a term."""


@dataclass(frozen=True, slots=True)
class SeatsNow:
    """The seats of a cluster for its operator."""

    serving: tuple[int, ...]
    """With a process that is in the term, or joins it; ascending."""
    starting: tuple[int, ...]
    """Wanted seats whose process loads, or waits for the next term."""
    leaving: tuple[int, ...]
    """Unwanted seats in the term."""
    empty: tuple[int, ...]
    """Neither wanted nor in the term."""
    fewest: int
    """Seats that must serve, so that every expert is somewhere."""
    is_serving: bool
    """Whether a term serves; False during a recovery."""
    asked_by: str = ""
    """Who asked for the change that is under way; empty if none is."""

    @property
    def wanted(self) -> tuple[int, ...]:
        """Seats that are to serve, ascending."""
        return tuple(sorted({*self.serving, *self.starting} - {*self.leaving}))

    def states(self) -> tuple[str, ...]:
        """Return a word for each seat: serving, draining, loading or empty."""
        words = dict.fromkeys(self.serving, "serving") | dict.fromkeys(self.leaving, "draining")
        words |= dict.fromkeys(self.starting, "loading") | dict.fromkeys(self.empty, "empty")
        return tuple(words[seat] for seat in sorted(words))


@dataclass(frozen=True, slots=True)
class _Change:
    """A requested change of seats, until it is done, failed or undone."""

    by: str
    before: list[int]
    """Seats that were wanted before."""
    done: Future[None] = field(default_factory=Future)
    """Once it is done, with or without success, others may ask."""

    def fail(self, reason: str) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError(reason))


class Seats:
    """The seats of one cluster. Used from the controller's thread."""

    def __init__(self, cluster: ClusterConfig, num_experts: int | None) -> None:
        """num_experts: of a layer, 0 for a dense model; None if every seat must always serve."""
        self._cluster = cluster
        self.num_experts = num_experts or 0
        """Experts of a layer; 0: none, or every seat must always serve."""
        num, redundant = cluster.num_instances, cluster.redundant_experts
        self.fewest = num
        """How many seats must serve."""
        if num_experts is not None:
            self.fewest = min(num, fewest_seats(num_experts, num, redundant))
        self.wanted = list(range(num))
        """Seats that are to serve, ascending."""
        self._change: _Change | None = None
        """The change that is under way."""
        self._failures: dict[int, int] = {}
        self.experts: ExpertTable | None = None
        """Experts that slots are known to hold; None before the first term."""
        self._held: dict[int, Sequence[bytes]] = {}

    def to_go_on(self, left: Collection[int]) -> list[int]:
        """Return the next term's seats after a loss: those `left`, if they hold all experts.

        Else all wanted ones are awaited.
        """
        enough = len(left) >= self.fewest
        return sorted(left) if enough else sorted({*self.wanted, *left})

    def target(self, serving: Sequence[int], ready: Iterable[int]) -> tuple[int, ...]:
        """Return the next planned term's seats: wanted ones that serve, or are ready to join.

        Unwanted ones stay while the others could not serve without them, or have no row yet.
        """
        target = {*serving, *ready} & {*self.wanted}
        if len(target) < self.fewest or target.isdisjoint(serving):
            target |= {*serving}
        return tuple(sorted(target))

    def ask(self, seats: Sequence[int], by: str) -> Future[None]:
        """Request other seats; the result is done when they serve.

        by: the name shown to others. Raises ValueError if they cannot serve, or if another change
        is awaited.
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
                if self.num_experts
                else "the service was not started to go on with fewer"
            )
            raise ValueError(
                f"{len(seats)} of {num} instances cannot serve alone, {self.fewest} can: {why}"
            )
        if self._change is not None and not self._change.done.done():
            raise ValueError(
                f"the cluster is changing to seats {self.wanted}, as {self._change.by} asked; ask "
                'again later, or undo that ("nanocp scale --undo")'
            )
        self._change = _Change(by, self.wanted)
        self.wanted = sorted(seats)
        self._failures.clear()
        return self._change.done

    def serve(self, seats: Sequence[int]) -> None:
        """Record that a term serves with these seats."""
        for seat in seats:
            self._failures.pop(seat, None)
        if self._change is not None and list(seats) == self.wanted:
            if not self._change.done.done():
                self._change.done.set_result(None)
            self._change = None

    def undo(self, reason: str) -> None:
        """Want the seats before the change again. Raises ValueError if none is under way."""
        if self._change is None:
            raise ValueError(f"no change is under way; seats {self.wanted} are wanted")
        change, self._change = self._change, None
        self.wanted = change.before
        change.fail(f"{reason}; the cluster is as it was")

    def end(self, reason: str) -> None:
        """End the wait for a change, since the cluster ends."""
        if self._change is not None:
            self._change.fail(reason)

    def failed(self, seat: int, left: Collection[int], message: str) -> bool:
        """Record a process that failed before it joined a term; return whether another is to come.

        A change that brings the seat fails at once. left: see leave_out.
        """
        if self._change is not None and seat not in self._change.before:
            self.undo(message)
            return False
        self._failures[seat] = self._failures.get(seat, 0) + 1
        return self._failures[seat] < MAX_FAILURES or not self.leave_out(seat, left, message)

    def leave_out(self, seat: int, left: Collection[int], message: str) -> bool:
        """Leave a seat empty whose processes keep failing; False if the others cannot serve.

        left: seats that have a process; they must be able to serve.
        """
        if len(left) < self.fewest:
            return False
        if self._change is not None:
            self.undo(message)
        wanted = [each for each in self.wanted if each != seat]
        self.wanted = wanted if len(wanted) >= self.fewest else sorted(left)
        return True

    def now(self, serving: Sequence[int], is_serving: bool) -> SeatsNow:
        """Return the state of the seats, for an operator. is_serving: see SeatsNow."""
        all_seats = range(self._cluster.num_instances)
        return SeatsNow(
            serving=tuple(serving),
            starting=tuple(seat for seat in self.wanted if seat not in serving),
            leaving=tuple(seat for seat in serving if seat not in self.wanted),
            empty=tuple(s for s in all_seats if s not in serving and s not in self.wanted),
            fewest=self.fewest,
            is_serving=is_serving,
            asked_by=self._change.by if self._change is not None else "",
        )

    def table(self, seats: Sequence[int]) -> ExpertTable | None:
        """Place the experts, if any, on these seats; few are loaded anew."""
        if not self.num_experts:
            return None
        num, redundant = self._cluster.num_instances, self._cluster.redundant_experts
        before = self.experts or self._said(num_slots(self.num_experts, num, redundant))
        self.experts = place_experts(self.num_experts, num, redundant, seats, before)
        return self.experts

    def hold(self, seat: int, layers: Sequence[bytes]) -> None:
        """Record the experts in a seat's slots (Hello.experts), which a lost controller changed."""
        self._held[seat] = layers

    def _said(self, total: int) -> ExpertTable | None:
        num_layers = max(map(len, self._held.values()), default=0)
        empty = [array("h", [-1] * total).tobytes()] * num_layers
        held = [self._held.get(seat) or empty for seat in range(self._cluster.num_instances)]
        layers = (b"".join(layer) for layer in zip(*held, strict=True))
        return ExpertTable(total, tuple(layers)) if num_layers else None
