"""The members of a cluster: they dial, become ready, are lost and are replaced.

A loss begins the next term (protocol.md, terms), with the rest if they hold all experts. A lost
prefill or puller is replaced within the term.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

from control_plane.coordinator.members.attached import Attached
from control_plane.coordinator.members.deadlines import Deadlines
from control_plane.coordinator.members.end import End
from control_plane.coordinator.members.heartbeats import Heartbeats
from control_plane.coordinator.members.kept_pages import KeptPages
from control_plane.coordinator.members.output import Facts, MembersOutput, PrefillArrived
from control_plane.coordinator.members.replacements import Replacements
from control_plane.coordinator.members.seat_changes import SeatChanges
from control_plane.coordinator.members.seats import Seats, SeatsNow
from control_plane.coordinator.members.short_terms import MAX_SHORT_TERMS, ShortTerms
from control_plane.coordinator.members.start import Start
from control_plane.coordinator.members.suspicion import Suspicion
from control_plane.coordinator.members.terms import Standing, Terms, TermSteps
from control_plane.observe.metrics.recovery import RecoveryMetrics
from nanocp.config.cluster import ClusterConfig
from nanocp.config.limits import LimitsConfig
from nanocp.values import members as values
from nanocp.values.commands import Join, Leave, ToMember
from nanocp.values.members import Hello, Member, Peer, Said
from nanocp.values.plan import InstanceLost, Regrouped, TermEnded, TookOver, WindowDone

_TICKETS_OF_A_TERM = 1_000_000
"""Above the tickets of one term, so that a term's number bounds all earlier tickets."""


class Members(TermSteps):
    """Every member of one cluster, used from one thread.

    After each call, pass the time to `deadlines` and carry out `output`. `start` and `end.failure`
    are for any thread.
    """

    def __init__(
        self,
        cluster: ClusterConfig,
        limits: LimitsConfig,
        facts: Facts,
        metrics: RecoveryMetrics,
        num_experts: int | None,
        prompt_members: Sequence[Member],
        recovers: bool,
        leave_ms: int,
    ) -> None:
        """num_experts: see Seats. prompt_members: see Config."""
        self._metrics, self._facts = metrics, facts
        self.output = MembersOutput()
        """What is to be done, until it is taken."""
        instances = tuple(Member("instance", seat) for seat in range(cluster.num_instances))
        self.expected = (*instances, *prompt_members)
        """Every member that must be ready."""
        self.recovers, self._leave_ms = recovers, leave_ms
        self.attached = Attached(self.output)
        self.start = Start(self.expected, limits.start_timeout_ms)
        self.takes_over = False
        """True if members of a lost controller are to dial this one."""
        self.deadlines = Deadlines()
        """What is overdue at a time, on a clock that only goes on."""
        self.replacements = Replacements(
            self.expected,
            self.deadlines,
            self.output,
            silent=lambda member, message: self.lose(member, message, "silent"),
            next_term=lambda: self.terms.number + 1,
            recovery_timeout_ms=limits.recovery_timeout_ms,
        )
        self._heartbeats = Heartbeats(limits.suspect_ms)
        self.terms = Terms(instances, self, metrics.waits_for)
        self.suspicion = Suspicion(self.terms, self._heartbeats, self.deadlines, self.lose)
        self._short_terms = ShortTerms()
        self._kept_pages = KeptPages()
        self._join = Join()
        """What members of the present term were asked to join."""
        self._seats = Seats(cluster, num_experts if recovers else None)
        timeout_ms = limits.recovery_timeout_ms
        self.end = End(self.start, self._seats, self.deadlines, self.output, timeout_ms)
        self.changes = SeatChanges(
            self._seats, self.terms, self.replacements, facts, self.output, self._retire
        )

    def begin(self) -> None:
        """Watch the members from now on; those of a lost controller are to dial."""
        self._watch_heartbeats()
        if self.takes_over:
            for member in self.expected:
                self.replacements.expect(member)

    @property
    def _goes_on(self) -> bool:
        """Return whether the cluster survives the loss of a member."""
        return self.recovers and (self.start.has_succeeded or self.takes_over)

    @property
    def seats(self) -> list[int]:
        """The instances of the term, or of the one being joined; ascending."""
        return list(map(self.terms.instances.index, self.terms.seats))

    @property
    def seats_now(self) -> SeatsNow:
        """The seats, for an operator."""
        present = map(self.terms.instances.index, self.terms.present)
        return self._seats.now(sorted({*self.seats} & {*present}), self.terms.is_serving)

    def send(self, member: Member, message: ToMember) -> None:
        """Queue a message of the present term, if the member is in it."""
        if member.instance is None or self.terms.standing[member] is Standing.IN:
            self._send(member, message)

    def _send(self, member: Member, message: ToMember) -> None:
        self.attached.send(member, message, self.terms.number)

    def leave(self, reason: str) -> None:
        """Ask every member to leave, even those that attach later. Idempotent."""
        if self.end.leaving is None:
            self.end.leaving = reason
            self.replacements.kill_unheard()
            self._seats.end(reason)
            self.attached.shut_down_all(reason)

    # --- losses

    def exited(self, member: Member, number: int, message: str) -> None:
        """Record that the process of this number has ended, expected or not."""
        if self.replacements.is_latest(member, number):
            self.lose(member, f"{member}: {message}", "exit")
            message = ""
        self.replacements.exited(member, number, message)

    def lose(self, member: Member, message: str, cause: str) -> None:
        """Replace a member whose process is gone, or end the cluster that cannot recover or start.

        cause: one word for the metrics. A member that was asked to leave is not lost.
        """
        if self.end.has_come:
            return
        self._metrics.lost(member.kind, cause)
        self._heartbeats.forget(member)
        self._kept_pages.lose(member)
        self.attached.drop(member)
        if not self._goes_on:
            self.replacements.kill(member)
            self.end.give_up(member, message)
            return
        if self.terms.is_serving and member.instance is not None and member in self.terms.seats:
            num_seats, has_windows = len(self.terms.seats), self._facts.has_windows
            self._short_terms.lost(member.instance, num_seats, has_windows)
            if self._short_terms.are_too_many:
                self.replacements.kill(member)
                reason = f"{message}; the {MAX_SHORT_TERMS - 1} terms before ended as soon"
                self.end.give_up(member, reason)
                return
        if member.instance is not None and member not in self.terms.seats:
            if self.start.has_succeeded and not self.terms.is_serving:
                # It may have left with pages.
                self.output.events.append(InstanceLost(member.instance))
            self.changes.newcomer_lost(member, message)
            return
        self.end.last_loss = message
        if member.instance is None:
            self.start.again([member])
            self._replace(member, message)
            self.end.unless_recovered(member)
            return
        instances = self.terms.instances
        left = [instances.index(each) for each in self.terms.present if each != member]
        is_to_blame = self._short_terms.is_to_blame(member.instance)
        if is_to_blame and self._seats.leave_out(member.instance, left, message):
            self.output.warn(f"{message}, as soon as in the terms before; its seat stays empty")
            self.replacements.kill(member)
        elif member.instance in {*self._seats.wanted, *self._seats.to_go_on(left)}:
            self._replace(member, message)
        else:
            self.output.warn(f"{message}; it was to leave")
            self.replacements.kill(member)
        if self.start.has_succeeded:
            self.terms.lost(member, [instances[seat] for seat in self._seats.to_go_on(left)])
            self.output.events.append(InstanceLost(member.instance))
        else:
            # The others may not have dialled yet, and the scheduler has planned nothing.
            self.start.again(instances)
            self.terms.lost(member, instances)

    def _replace(self, member: Member, message: str) -> None:
        self.output.warn(f"{message}; another process takes its place")
        self.replacements.replace(
            member,
            # It may still write into the rings: the next term has others.
            lives_on=self.terms.end,
            failed=partial(self._not_replaced, member),
        )

    def _not_replaced(self, member: Member, reason: str) -> None:
        if member.instance is not None and member not in self.terms.seats:
            self.changes.newcomer_lost(member, f"{member}: {reason}")
            return
        message = f"{self.end.last_loss}; no process could take its place: {reason}"
        self.end.give_up(member, message)

    def _watch_heartbeats(self) -> None:
        """Lose silent members and record the seats at each tick."""
        self.deadlines.start("heartbeats", self._heartbeats.tick_ms, self._watch_heartbeats)
        self._metrics.seats(self.seats_now.states())
        for member in self._heartbeats.tick():
            if self.start.has_succeeded or self.takes_over:
                limit = f"suspect_ms ({self._heartbeats.suspect_ms} ms)"
                self.lose(member, f"{member}: it has sent nothing for {limit}", "silent")

    # --- terms.TermSteps

    def ask_to_leave(self, instance: Member) -> None:
        self._send(instance, Leave())
        self.deadlines.start("leave", self._leave_ms, self._lose_those_that_stay)

    def _lose_those_that_stay(self) -> None:
        for instance in self.terms.those(Standing.LEAVING):
            message = f"{instance}: it did not leave its term in {self._leave_ms} ms"
            self.lose(instance, message, "stuck")

    def ask_to_join(self) -> None:
        self.deadlines.met("leave")
        if self.takes_over and not self.start.has_succeeded:
            kept = self._kept_pages.of(self.terms.seats)
            self.output.say(f"instances have kept the pages of {len(kept)} requests")
            tickets = _TICKETS_OF_A_TERM * self.terms.number
            self.output.events.append(TookOver(tickets, kept, self._kept_pages.restarts))
        self._join = Join(
            peers=tuple(
                self.attached.where(each) if each in self.terms.seats else Peer()
                for each in self.terms.instances
            ),
            newest_ticket=self._facts.newest_ticket,
            seats=tuple(self.seats),
            keeps_rows=self.terms.keeps_rows,
            experts=self._seats.table(self.seats),
        )
        for instance in self.terms.seats:
            self._send(instance, self._join)
        for member in self.expected[len(self.terms.instances) :]:
            self._send(member, self._join)

    def term_ended(self) -> None:
        self.end.unless_recovered(self.terms.instances[0])
        self.changes.term_ended()
        self._metrics.term_ended()
        self.output.events.append(TermEnded())

    def term_began(self) -> None:
        self._short_terms.began()
        self.replacements.begin_term()
        if self.deadlines.met("instance"):
            cause = "loss" if self.terms.is_after_loss else "request"
            self._metrics.term_began(self.terms.number, cause)
            term, seats = self.terms.number, self.terms.seats
            restarts = self._kept_pages.restarts
            regrouped = Regrouped(term, tuple(self.seats), self.terms.keeps_rows, restarts)
            self._kept_pages.term_began()
            self.output.events.append(regrouped)
            self.output.say(f"term {term} serves with {', '.join(map(str, seats))}")
        self.changes.term_began()

    def want(self, seats: Sequence[int], by: str) -> Future[None]:
        """Change the seats; the result is done when they serve.

        by, ValueError: see Seats.ask. The result of a failed change, which changes nothing, has a
        RuntimeError.
        """
        if not (self.start.has_succeeded and self.recovers):
            raise ValueError("this service cannot change its seats, nor go on after a loss")
        return self.changes.want(seats, by)

    def _retire(self, member: Member) -> None:
        self._heartbeats.forget(member)
        self.attached.let_go(member, "its seat is not wanted any more")

    # --- what members say

    def attach(self, member: Member, hello: Hello | None = None) -> None:
        """Attach a member that dialled.

        hello: of an instance. Raises ValueError if it has no place.
        """
        if member not in self.expected:
            expected = ", ".join(map(str, self.expected))
            raise ValueError(f"this cluster has no {member}; it has {expected}")
        if member in self.attached:
            raise ValueError(f"{member} is attached already")
        self.replacements.dialled(member)
        if member.instance is None and self._goes_on:
            # It dials before it loads, and beats after it.
            self.replacements.expect(member)
        self._kept_pages.say(member, hello)
        if hello is not None:
            self._seats.hold(hello.instance, hello.experts)
        self.attached.add(member, hello.where if hello is not None else Peer())
        if self.end.leaving is not None:
            self.attached.shut_down(member, self.end.leaving)
        elif member.instance is not None:
            self._heartbeats.heard(member)
            self.terms.arrived(member)
            self.changes.go_on()
        elif self.terms.may_be_joined:
            self._send(member, self._join)
            self.output.events.append(PrefillArrived(member))

    def loading(self, member: Member) -> bool:
        """Record that a member loads weights; return whether it is expected."""
        if member in self.expected:
            self.replacements.loads(member)
        return member in self.expected

    def heard(self, member: Member, said: Said, term: int) -> bool:
        """Take a member's message after hello; return whether it is a report of the present term.

        Raises ValueError if the member cannot have meant it.
        """
        match said:
            case values.Beat():
                self.replacements.dialled(member)
                self._heartbeats.heard(member, said.awaited)
            case values.Loading():
                self.loading(member)
            case values.Ready():
                self._is_ready(member, said.chosen, term)
            case values.Left(restarts):
                self._kept_pages.left(member, restarts)
                self.terms.has_left(member, term)
            case values.Suspect():
                self.suspicion.suspected(member, said, term)
            case Hello() | values.Failure():
                raise ValueError(f"{member} says {said}, which has no meaning here")
            case _ if term != self.terms.number or not self.terms.is_serving:
                self._metrics.dropped(said)
            case _:
                if isinstance(said, WindowDone):
                    self._short_terms.reported()
                return True
        return False

    def failed(self, member: Member | None, message: str, says_why: bool = True) -> None:
        """Record a failed member or a broken stream. member: None if it never said hello.

        says_why: False where the end of the process says more.
        """
        if member is not None and (says_why or self._goes_on):
            self.lose(member, message, "stream")
        elif member is not None:
            self.replacements.await_end(member, partial(self.lose, member, message, "stream"))
        elif self._goes_on:
            # Its process ends, which is noticed too.
            self.output.warn(message)
        else:
            self.end.fail(message)

    def _is_ready(self, member: Member, chosen: tuple[str, ...], term: int) -> None:
        # From now on its silence counts, also if it is stopped before its first heartbeat.
        self._heartbeats.heard(member)
        if member.instance is None:
            if self.deadlines.met(member.kind):
                self.output.say(f"the {member} serves again")
            self.start.ready(member, chosen)
            return
        self.terms.has_joined(member, term)
        if self.terms.standing[member] is Standing.IN:
            self.start.ready(member, chosen)
