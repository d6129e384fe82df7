"""Plays whose terms end and begin, as the real coordinator leads them.

What leaves the coordinator is carried out here: processes leave and join, end, and others dial, and
the scheduler hears of it. A seed says when.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from control_plane.coordinator.members.output import MembersEvent, StartProcess
from control_plane.coordinator.members.short_terms import MAX_SHORT_TERMS
from data_plane.instance.interface import TermEnds, TermStart
from harness.hash_clusters.hash_cluster import HashCluster
from harness.hash_clusters.hash_model import NUM_EXPERTS
from harness.hash_clusters.hash_parts import Process
from harness.hash_clusters.hash_play import HashPlay
from harness.transports.random_tables import random_table
from nanocp.config.limits import LimitsConfig
from nanocp.config.whole import Config
from nanocp.values.commands import Join, Leave, Shutdown
from nanocp.values.experts import num_slots
from nanocp.values.members import Envelope, Left, Member, Ready
from nanocp.values.plan import ClusterLost, Plan, Regrouped, TargetRun, TermEnded
from nanocp.values.table import InstanceTable

_TURN_US = 2000
"""Time of the coordinator for each turn: every deadline is many turns away."""


class RegroupingPlay(HashPlay):
    """Terms and processes of a play; what is lost, and when, is for the heirs."""

    limits = LimitsConfig(drain_timeout_ms=1, suspect_ms=1_000_000_000, recovery_timeout_ms=300_000)
    """The limits of the coordinator: nobody beats, and a recovery may take long."""
    redundant_experts = 0

    def _draw_terms(self) -> None:
        """Draw how terms end; `_begin_cluster` begins the first one."""
        self.term = 1
        """The number of the term that serves, or of the last one."""
        self.serving = list(range(len(self.processes)))
        """Seats of the term."""
        self.running = {*self.serving}
        """Seats whose process is in a term, the last one or the next."""
        self.lost: set[int] = set()
        """Seats whose process is gone; another is made when it joins."""
        self.ends_of: dict[int, list[Any]] = {}
        """By term and seat: what processes join with."""
        self.is_serving = False
        self.losses_left = self.num_losses = 0
        self.num_terms = -1
        """Terms that followed the first."""
        self.full_seat: int | None = None
        self.num_posted = self.num_unread = 0

    def _start_cluster(self) -> None:
        """Heirs begin it, once they have drawn what they need."""

    def _begin_cluster(self) -> None:
        """The first controller and the first term begin."""
        self.full_share = self.random.choice([0, 0.003])
        """How often a process stops reading its stream, which holds one message and no other."""
        self._begin_controller()
        for index in range(len(self.processes)):
            self._dial(index)
        while not self.members.start.has_succeeded:
            self._obey(self.random.randrange(len(self.processes)))
        self.members.start.wait()

    def _begin_controller(self, first_term: int = 0) -> None:
        cluster = replace(self.config.cluster, redundant_experts=self.redundant_experts)
        self.ends_of.clear()
        self._new_coordinator(replace(self.config, limits=self.limits, cluster=cluster), first_term)
        self.members = self.coordinator.members
        self._settle()

    def _pass_time(self) -> None:
        self.coordinator.clock_us += _TURN_US
        due_us = self.members.deadlines.next_us
        if due_us is not None and due_us <= self.coordinator.clock_us:
            self._settle()

    def _may_lose(self) -> bool:
        """Whether a loss now does not end one short term too many in a row."""
        short = self.members._short_terms
        num_windows = short._num_reports // len(self.serving)
        return not self.is_serving or len(short._seats) < MAX_SHORT_TERMS - 1 or num_windows > 10

    def _plan(self) -> None:
        if self.losses_left and self.random.random() < self.full_share and self._may_lose():
            self.full_seat, self.num_posted = self.random.choice(self.serving), 0
        super()._plan()
        self._settle()

    def _take_work(self, member: Member, message: Envelope) -> bool:
        """The stream of a process that reads nothing holds one message."""
        if self.full_seat is None or member.instance != self.full_seat:
            return super()._take_work(member, message)
        self.num_posted += 1
        if self.num_posted == 1:
            return super()._take_work(member, message)
        if self.num_posted == 2:
            # Others may have been lost since the seat was drawn.
            self.losses_left = max(self.losses_left - 1, 0)
            self.num_losses += 1
            self.num_unread += 1
        return False

    # --- processes

    def _run_some(self, index: int) -> None:
        if index in self.running:
            super()._run_some(index)

    def _go_on(self, index: int) -> None:
        """A process does what it was last asked to, or another one dials."""
        if self.coordinator.inboxes[index]:
            self._obey(index)
        else:
            self._dial(index)

    def _die(self, index: int, how: str, is_seen: bool = True) -> None:
        self.lost.add(index)
        self.running.discard(index)
        self.coordinator.die(index, how, is_seen)

    def _dial(self, index: int) -> None:
        """The process that comes has loaded its weights, or has lost its controller."""
        kept, restarts, experts = None, (), ()
        if index in self.running:
            self._leave(index)
        if self.members.takes_over and index not in self.lost:
            runs = self.processes[index].instance.kept_pages()
            kept = tuple(
                (run.request_id, TargetRun(run.first_page, run.num_pages, index, run.frame))
                for run in runs
            )
            restarts = tuple(self.processes[index].instance.restarts())
            experts = self.processes[index].instance.slots.held()
        self.coordinator.dial(index, kept, restarts, experts)
        self._settle()

    def _obey(self, index: int) -> None:
        """A process does what it was last asked to."""
        if not self.coordinator.inboxes[index]:
            return
        order = self.coordinator.inboxes[index].popleft()
        match order and order.message:
            case None | Shutdown():
                self._die(index, "it was asked to")
            case Leave():
                if index in self.running:
                    self._leave(index)
                process = self.processes[index]
                has_states = hasattr(process, "instance")  # a stage of a pipeline has none
                left = Left(tuple(process.instance.restarts()) if has_states else ())
                self.members.heard(process.member, left, order.term)
            case Join() as join:
                self._let_join(index, order.term, join)
                self.members.heard(self.processes[index].member, Ready(), order.term)
        self._settle()

    def _leave(self, index: int) -> None:
        process = self.processes[index]
        self._leave_term(process)
        process.forget()
        self.loops[index] = self._loop(process)
        self.running.discard(index)

    def _let_join(self, index: int, term: int, join: Join) -> None:
        if term not in self.ends_of:
            self.ends_of[term] = self._new_ends()
        is_new = index in self.lost
        process = self.processes[index] = self._join_term(index, self.ends_of[term][index], join)
        if is_new:
            self.loops[index] = self._loop(process)
        self.lost.discard(index)
        process.term = term
        self.running.add(index)

    # --- the controller

    def _settle(self) -> None:
        """Carry out what leaves the coordinator, until nothing does."""
        coordinator = self.coordinator
        while True:
            coordinator.settle()
            if coordinator.to_kill:
                self._die(coordinator.to_kill.pop(0), "it was killed")
            elif coordinator.to_start:
                self._started(coordinator.to_start.pop(0))
            elif coordinator.changes:
                self._take_up(coordinator.changes.popleft())
            elif self.members.terms.is_serving and not self.is_serving:
                self._term_began(False)  # The first of a controller.
            else:
                break
        assert not self.members.end.failure.done(), self.members.end.failure.result()

    def _started(self, command: StartProcess) -> None:
        self.coordinator.started(command, None)

    def _take_up(self, event: MembersEvent) -> None:
        match event:
            case ClusterLost():
                raise AssertionError(event.message)
            case Regrouped():
                self._term_began(event.keeps_rows)
            case TermEnded():
                self.is_serving = False
        self.coordinator.take_up(event)
        if batch := self.coordinator.take_events():
            self._call_scheduler(batch)

    def _term_began(self, keeps_rows: bool) -> None:
        self.term, self.serving = self.members.terms.number, self.members.seats
        self.is_serving, self.full_seat = True, None
        self.num_terms += 1

    def _end_term(self) -> None:
        """The term ends though nobody is lost."""
        self.members.terms.end()
        self._settle()


class RegroupingCluster(RegroupingPlay, HashCluster):
    """Terms and seats of a hash cluster."""

    def __init__(self, seed: int, num_requests: int, config: Config | None) -> None:
        """Draw a cluster; `_begin_cluster` begins its first term."""
        super().__init__(seed, num_requests, config)
        self.change: Future[None] | None = None
        """The last change of seats that somebody asked for."""
        self.redundant_experts = self._draw_redundancy()
        self.has_moved_experts = seed % 4 != 0
        """Whether experts are elsewhere in each layer, and some twice, when a controller begins."""
        self.num_shrinks = self.num_changes = self.num_kept = 0

    def _draw_redundancy(self) -> int:
        return self.random.choice([0, NUM_EXPERTS])

    def _begin_controller(self, first_term: int = 0) -> None:
        self.change = None
        super()._begin_controller(first_term)
        if self.has_moved_experts:
            num, terms = len(self.processes), self.num_terms
            slots = num_slots(NUM_EXPERTS, num, self.redundant_experts)
            layers = self.model.num_moe_layers
            self.members._seats.experts = random_table(NUM_EXPERTS, num, terms, slots, layers)

    def _leave_term(self, process: Process) -> None:
        self._take_polled(process)
        process.instance.leave()

    def _join_term(self, index: int, ends: TermEnds, join: Join) -> Process:
        process = self.processes[index]
        if index in self.lost:
            process = self._start_process(index, ends)
        start = TermStart(join.seats, join.experts, join.newest_ticket, join.keeps_rows)
        process.instance.join(ends, start)
        (process.ring,) = ends.rings
        return process

    def _take_up(self, event: MembersEvent) -> None:
        super()._take_up(event)
        if isinstance(event, Regrouped):
            self.num_kept += len(self.scheduler.held)

    def _term_began(self, keeps_rows: bool) -> None:
        num, before = len(self.processes), self.serving
        super()._term_began(keeps_rows)
        for index in {*range(num)} - {*self.serving}:
            self.processes[index].forget()
        self.num_changes += keeps_rows
        self.num_shrinks += len(self.serving) < len(before)
        self.shadows = [
            self.shadows[index]
            if keeps_rows and index in self.serving
            else InstanceTable(index, num)
            for index in range(num)
        ]

    def _want_seats(self, seats: Sequence[int] = ()) -> None:
        """Let the cluster have these seats, or any."""
        num = len(self.processes)
        number = self.random.randrange(self.members._seats.fewest, num + 1)
        stays = self.random.choice(self.serving)
        wanted = list(seats) or sorted({stays, *self.random.sample(range(num), number)})
        self.change = self.members.want(wanted, "a seed")
        self._settle()

    def _count(self, plan: Plan) -> None:
        super()._count(plan)
        if plan.is_settled:
            assert not any(process.plans for process in self.processes)
