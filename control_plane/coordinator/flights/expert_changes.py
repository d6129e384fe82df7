"""Changes of the expert table while the cluster serves (protocol.md, named slots).

Rows first leave the slots that get another expert; once no window in flight names them, instances
fill them; once all have, rows go there.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from control_plane.coordinator.members.expert_moves import HALVED_EVERY, Change, ExpertMoves
from control_plane.coordinator.members.members import Members
from control_plane.observe.metrics.experts import ExpertMetrics
from nanocp.config.cluster import ClusterConfig
from nanocp.values.commands import ChangeExperts
from nanocp.values.experts import ExpertTable, num_slots
from nanocp.values.members import ExpertLoad, ExpertsHere, Member

MAX_LOAD_MS = 600_000
"""Longest time that instances may take to load the experts of one change."""
_LOADING = "experts"


START_ABOVE = 1.1
"""A layer's hottest instance over the mean, above which its experts move."""
CHANGES_PER_ROUND = 1
"""Experts that a plan loads into a layer at most, by instance."""


def expert_changes(
    cluster: ClusterConfig, members: Members, metrics: ExpertMetrics
) -> ExpertChanges | None:
    """Make what changes a cluster's expert table; None: no experts, or each seat must serve."""
    num_experts = members.changes.seats.num_experts
    if not num_experts or cluster.num_instances == 1:
        return None
    total = num_slots(num_experts, cluster.num_instances, cluster.redundant_experts)
    is_on = cluster.expert_load_mb_per_s > 0
    moves = ExpertMoves(num_experts, total, START_ABOVE, CHANGES_PER_ROUND if is_on else 0)
    return ExpertChanges(moves, members, metrics, is_on)


@dataclass(frozen=True, slots=True)
class ExpertsNow:
    """The experts of a cluster for its operator, with their loads and changes."""

    is_on: bool
    seats: tuple[int, ...]
    num_slots: int
    """Slots of an instance in a layer."""
    table: list[list[int]]
    """For each MoE layer the expert in each slot's number; -1: none. Empty before reports."""
    loads: list[list[float]]
    """For each MoE layer the pairs of each expert, lately."""
    is_changing: bool
    num_loading: int
    """0 while rows leave the slots of a change."""
    failure: str
    """Why the last change that failed did."""
    changes: dict[str, int]
    """Changes so far, by outcome."""


class ExpertChanges:
    """The expert table of the term that serves. Used from the controller's thread."""

    def __init__(
        self, moves: ExpertMoves, members: Members, metrics: ExpertMetrics, is_on: bool
    ) -> None:
        """is_on: experts follow the load; else loads are only reported."""
        self.moves, self._members, self.metrics, self.is_on = moves, members, metrics, is_on
        self.number = 0
        """The table that windows name from now on."""
        self._table: list[list[int]] = []
        """By layer the expert in each slot's number; empty until a report says how many layers."""
        self._awaited: set[int] = set()
        """Instances that have yet to report their load, or that their experts are here."""
        self._loads: list[Change] = []
        self._newest = 0
        self._next = 0
        """The table that instances load; 0: none is."""
        self._sent = self._done = -1
        self._leaving: int | None = None
        """The last window that may name a slot of the change; None: there is no change."""
        self.rest = HALVED_EVERY
        """Windows without a change after one that has failed."""
        self._resume_at = -1
        self._planning: Iterator[None] | None = None
        self._failure = ""

    def now(self) -> ExpertsNow:
        """Return the present state, for an operator."""
        return ExpertsNow(
            self.is_on,
            tuple(self._members.seats),
            self.moves.num_slots,
            [[*layer] for layer in self._table],
            [self.moves.loads(layer) for layer in range(len(self._table))],
            self._leaving is not None,
            len(self._loads) if self._next else 0,
            self._failure,
            dict(self.metrics.changes),
        )

    # --- the term

    def begin_term(self) -> None:
        """Begin with the table that all instances have joined with."""
        self.number = self._newest = self._next = 0
        self._sent = self._done = max(self._sent, self._done)
        self._table = []

    def end_term(self) -> None:
        """Drop a change that is under way."""
        self._planning = None
        if self._leaving is not None:
            self._end("lost")

    def sent(self, window: int) -> int:
        """Record that a window leaves; return the number of its table."""
        self._sent = window
        return self.number

    def window_done(self, window: int) -> None:
        """Record that all instances have reported a window."""
        self._done = window
        if self._leaving is not None and not self._next and window >= self._leaving:
            self._load()

    # --- reports

    def reported(self, report: ExpertLoad | ExpertsHere) -> None:
        """Take a report of an instance; those of a table that is over are dropped."""
        match report:
            case ExpertsHere(instance, number, problem) if number == self._next:
                if problem:
                    self._fail(f"instance {instance}: {problem}")
                    return
                self._awaited.discard(instance)
                if not self._awaited:
                    self._use()
            case ExpertLoad(instance, number, window, pairs) if number == self.number:
                if self._leaving is not None:
                    return
                if not self._table:
                    self._begin(len(pairs))
                counts = [array("q", layer) for layer in pairs]
                self.moves.report(number, window, instance, counts)
                self._awaited.discard(instance)
                if not self._awaited and self._planning is None:
                    self._planning = self.moves.plan()

    def _begin(self, num_layers: int) -> None:
        table = self._members.changes.seats.experts
        assert table is not None, "a cluster with experts has a table"
        self._table = [[*table.experts(layer)] for layer in range(num_layers)]
        self._awaited = {*self._members.seats}
        self.moves.use(self.number, self._table, self._members.seats)

    # --- changes

    def advance(self, has_time: Callable[[], bool]) -> None:
        """Plan on in small steps, at least one; begin a change that is planned."""
        while self._planning is not None:
            if next(self._planning, self) is self:
                self._planning = None
                self._awaited = {*self._members.seats}
                self.metrics.reported(self.moves.imbalances)
                self._begin_change()
            elif not has_time():
                return

    def _begin_change(self) -> None:
        changes = self.moves.changes() if self.is_on and self._done >= self._resume_at else []
        if not changes:
            return
        self._leaving = self._done
        self._loads = [change for change in changes if change.expert >= 0]
        leaves = [c for c in changes if self._table[c.layer][c.number] >= 0]
        if leaves:
            self._put([each._replace(expert=-1) for each in leaves])
            self._leaving = self._sent
            self.number = self._send()
        if self._done >= self._leaving:
            self._load()

    def _load(self) -> None:
        """Let instances fill slots, which no window in flight names."""
        self._remember()
        if not self._loads:
            self._go_on()
            return
        self._awaited = {*self._members.seats}
        self._put(self._loads)
        self._next = self._send()
        self.metrics.load_began()
        self._members.deadlines.start(_LOADING, MAX_LOAD_MS, self._overdue)

    def _use(self) -> None:
        self.number = self._next
        self._remember()
        self.metrics.changed("done", len(self._loads))
        self._go_on()

    def _go_on(self) -> None:
        self._end("")
        self.moves.use(self.number, self._table, self._members.seats)
        self._begin_change()

    def _overdue(self) -> None:
        late = ", ".join(map(str, sorted(self._awaited)))
        self._fail(f"instances {late} did not load their experts in {MAX_LOAD_MS // 60_000} min")

    def _fail(self, message: str) -> None:
        self._failure = message
        self._members.output.warn(f"{message}; the experts stay where they are")
        self._put([change._replace(expert=-1) for change in self._loads])
        self._resume_at = self._done + self.rest
        self._end("failed")
        self.moves.use(self.number, self._table, self._members.seats)

    def _end(self, outcome: str) -> None:
        if outcome:
            self.metrics.changed(outcome, 0)
        self._members.deadlines.met(_LOADING)
        self._next, self._leaving = 0, None
        self._awaited = {*self._members.seats}

    def _put(self, changes: Sequence[Change]) -> None:
        for layer, number, expert in changes:
            self._table[layer][number] = expert

    def _remember(self) -> None:
        """Let a next term begin with this table: its slots are filled."""
        table = ExpertTable.of(self.moves.num_slots, *self._table)
        self._members.changes.seats.experts = table

    def _send(self) -> int:
        table = ExpertTable.of(self.moves.num_slots, *self._table)
        self._newest += 1
        for seat in self._members.seats:
            self._members.send(Member("instance", seat), ChangeExperts(self._newest, table))
        return self._newest
