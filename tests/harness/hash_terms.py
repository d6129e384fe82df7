"""A hash cluster whose terms are led by the real coordinator of members.

What leaves the coordinator is carried out here: instances leave and join, processes end and others
dial, and the scheduler hears of it. A seed says when.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

from control_plane.coordinator.members.output import MembersEvent, StartProcess
from control_plane.coordinator.members.short_terms import MAX_SHORT_TERMS
from data_plane.instance.interface import TermEnds, TermStart
from harness.hash_cluster import HashCluster
from harness.hash_coordinator import HashCoordinator
from harness.hash_instance import region_layout
from harness.hash_model import NUM_EXPERTS
from harness.hash_parts import Process
from harness.local_exchange import LocalExchange
from harness.local_pages import LocalPageRing, LocalPeerRings, local_peer_rings
from nanocp.config.limits import LimitsConfig
from nanocp.config.whole import Config
from nanocp.values.experts import ExpertTable
from nanocp.values.members import Left, Member, Ready
from nanocp.values.plan import ClusterLost, Event, Plan, Regrouped, TargetRun, TermEnded
from nanocp.values.table import InstanceTable
from nanocp.wire.v1 import cluster_pb2 as pb

_TURN_US = 2000
"""Time of the coordinator for each turn: every deadline is many turns away."""


class RegroupingCluster(HashCluster):
    """Terms and seats of a hash cluster; what is lost, and when, is for the heirs."""

    limits = LimitsConfig(drain_timeout_ms=1, suspect_ms=1_000_000_000, recovery_timeout_ms=300_000)
    """The limits of the coordinator: nobody beats, and a recovery may take long."""

    def __init__(self, seed: int, num_requests: int, config: Config | None) -> None:
        """Draw a cluster; `_start_cluster` begins its first term."""
        self.term = 1
        """The number of the term that serves, or of the last one."""
        self.terms: dict[Process, int] = {}
        """The term that each process is in; a dead one stays in its last."""
        super().__init__(seed, num_requests, config)
        self.running = {*range(len(self.processes))}
        """Seats whose instance is in a term, the last one or the next."""
        self.lost: set[int] = set()
        """Seats whose instance is gone; another is made when it joins."""
        self.ends_of: dict[int, list[TermEnds]] = {}
        """By term and seat: what instances join with."""
        self.is_serving = False
        self.change: Future[None] | None = None
        """The last change of seats that somebody asked for."""
        self.redundant_experts = self._draw_redundancy()
        self.num_terms = -1
        """Terms that followed the first."""
        self.num_shrinks = self.num_changes = self.num_kept = self.num_stale_events = 0

    def _draw_redundancy(self) -> int:
        return self.random.choice([0, NUM_EXPERTS])

    def _begin_controller(self, first_term: int = 0) -> None:
        config = replace(self.config, limits=self.limits)
        self.ends_of.clear()
        self.change = None
        self.coordinator = HashCoordinator(
            config, self.redundant_experts, self.scheduler, first_term
        )
        self.members = self.coordinator.members
        self._settle()

    def _start_cluster(self) -> None:
        """The first controller and the first term begin."""
        self._begin_controller()
        for index in range(len(self.processes)):
            self._dial(index)
        while not self.members.start.has_succeeded:
            self._obey(self.random.randrange(len(self.processes)))
        self.members.start.wait()

    def _start_process(self, index: int, exchange: LocalExchange, moves: LocalPeerRings) -> Process:
        process = super()._start_process(index, exchange, moves)
        self.terms[process] = self.term
        return process

    def _pass_time(self) -> None:
        self.coordinator.clock_us += _TURN_US
        due_us = self.members.next_deadline_us
        if due_us is not None and due_us <= self.coordinator.clock_us:
            self._settle()

    def _run_some(self, index: int) -> None:
        if index in self.running:
            super()._run_some(index)

    def _accepted(self, entry: Event | tuple[Member, int, Event]) -> Event | None:
        """Reports of a term that is over are dropped by the members."""
        if not isinstance(entry, tuple):
            return entry
        member, term, event = entry
        is_taken = self.members.heard(member, event, term)
        self.num_stale_events += not is_taken
        return event if is_taken else None

    def _may_lose(self) -> bool:
        """Whether a loss now does not end one short term too many in a row."""
        short = self.members._short_terms
        num_windows = short._num_reports // len(self.serving)
        return not self.is_serving or len(short._seats) < MAX_SHORT_TERMS - 1 or num_windows > 10

    # --- processes

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
        kept = None
        if index in self.running:
            self._leave(index)
        if self.members.takes_over and index not in self.lost:
            runs = self.processes[index].instance.kept_pages()
            kept = tuple(
                (run.request_id, TargetRun(run.first_page, run.num_pages, index, run.frame))
                for run in runs
            )
        self.coordinator.dial(index, kept)
        self._settle()

    def _obey(self, index: int) -> None:
        """A process does what it was last asked to."""
        if not self.coordinator.inboxes[index]:
            return
        order = self.coordinator.inboxes[index].popleft()
        match "end" if order is None else order.WhichOneof("message"):
            case "end" | "shutdown":
                self._die(index, "it was asked to")
            case "leave":
                if index in self.running:
                    self._leave(index)
                self.coordinator.heard(index, Left(), order.term)
            case "join":
                self._join(index, order.term, order.join)
                self.coordinator.heard(index, Ready(), order.term)
        self._settle()

    def _leave(self, index: int) -> None:
        process = self.processes[index]
        self._take_polled(process)
        process.instance.leave()
        process.plans.clear()
        process.posts.clear()
        self.loops[index] = self._instance_loop(process)
        self.running.discard(index)

    def _join(self, index: int, term: int, join: pb.Join) -> None:
        num = len(self.processes)
        if term not in self.ends_of:
            layout = region_layout(self.config)
            exchanges = LocalExchange.create_all(num, layout, self.config.limits)
            self.ends_of[term] = [
                TermEnds(exchange, [LocalPageRing()], moves)
                for exchange, moves in zip(exchanges, local_peer_rings(num), strict=True)
            ]
        ends = self.ends_of[term][index]
        if index in self.lost:
            process = self._start_process(index, ends.exchange, ends.moves)
            self.processes[index] = process
            self.loops[index] = self._instance_loop(process)
            self.lost.discard(index)
        process = self.processes[index]
        experts = ExpertTable(tuple(join.expert_seats), tuple(join.expert_slots))
        start = TermStart(list(join.seats), experts, join.newest_ticket, join.keeps_rows)
        process.instance.join(ends, start)
        (process.ring,) = ends.rings
        self.terms[process] = term
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
            elif coordinator.events:
                self._take_up(coordinator.events.popleft())
            elif self.members.terms.is_serving and not self.is_serving:
                self._begin_term(False)  # The first of a controller.
            else:
                break
        assert not self.members.failure.done(), self.members.failure.result()

    def _started(self, command: StartProcess) -> None:
        self.coordinator.started(command, None)

    def _take_up(self, event: MembersEvent) -> None:
        match event:
            case ClusterLost():
                raise AssertionError(event.message)
            case Regrouped():
                self._begin_term(event.keeps_rows)
                return
            case TermEnded():
                self.is_serving = False
        self._call_scheduler([event])

    def _begin_term(self, keeps_rows: bool) -> None:
        num, before = len(self.processes), self.serving
        self.term, self.serving = self.members.terms.number, self.members.seats
        for index in {*range(num)} - {*self.serving}:
            self.processes[index].plans.clear()
            self.processes[index].posts.clear()
        self.is_serving = True
        self.num_terms += 1
        self.num_changes += keeps_rows
        self.num_shrinks += len(self.serving) < len(before)
        self.shadows = [
            self.shadows[index]
            if keeps_rows and index in self.serving
            else InstanceTable(index, num)
            for index in range(num)
        ]
        if self.num_terms:
            self._serve(keeps_rows)

    def _serve(self, keeps_rows: bool) -> None:
        """The scheduler takes note that the term has begun."""
        self._call_scheduler([Regrouped(self.term, tuple(self.serving), keeps_rows)])
        self.num_kept += len(self.scheduler._held)

    def _regroup(self) -> None:
        """The term ends though nobody is lost."""
        self.members.terms.end()
        self._settle()

    def _want_seats(self, seats: Sequence[int] = ()) -> None:
        """Let the cluster have these seats, or any."""
        num = len(self.processes)
        number = self.random.randrange(self.members._seats.fewest, num + 1)
        stays = self.random.choice(self.serving)
        wanted = list(seats) or sorted({stays, *self.random.sample(range(num), number)})
        self.change = self.members.want(wanted, "a seed")
        self._settle()

    def _carry_out(self, plan: Plan) -> None:
        super()._carry_out(plan)
        if plan.is_settled:
            assert not any(process.plans for process in self.processes)
            self.members.changes.settled()
