"""The members of a cluster: who has dialled, who is ready, who was lost, and who comes instead.

Enters: what members say on their streams, and how their processes ended. Leaves: messages down the
streams; reports of members, losses and terms to `MemberEvents`; processes to end and to start. Does
not know: plans, tickets, how a member's process is started.

A cluster starts when every member is ready. When one is lost later, its process is killed, another
is started, and the instances begin the next term (docs/protocol.md, terms): those that are left, if
they have slots for all experts, or all. A lost prefill is replaced without a new term.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from control_plane.coordinator.members.deadlines import Deadlines, wait_for
from control_plane.coordinator.members.events import MemberEvents
from control_plane.coordinator.members.heartbeats import TICKS, Heartbeats
from control_plane.coordinator.members.kept_pages import KeptPages
from control_plane.coordinator.members.replacements import Processes, Replacements
from control_plane.coordinator.members.seat_changes import SeatChanges
from control_plane.coordinator.members.seats import Seats, SeatsNow
from control_plane.coordinator.members.short_terms import MAX_SHORT_TERMS, ShortTerms
from control_plane.coordinator.members.start import Start
from control_plane.coordinator.members.suspicion import Suspicion
from control_plane.coordinator.members.terms import Standing, Terms
from control_plane.observe.recovery_metrics import RecoveryMetrics
from control_plane.ports.member_streams import MemberStream, ToMember
from nanocp.config.whole import Config
from nanocp.values import members as values
from nanocp.values.members import PREFILL, Hello, Member, Peer, Said
from nanocp.values.plan import WindowDone
from nanocp.wire.v1 import cluster_pb2 as pb

logger = logging.getLogger(__name__)


class Members:
    """Every member of one cluster, ready or not.

    It is used from the controller's event loop, except the properties.
    """

    def __init__(
        self,
        config: Config,
        events: MemberEvents,
        processes: Processes,
        metrics: RecoveryMetrics,
        num_experts: int | None = None,
    ) -> None:
        """num_experts: see Seats."""
        limits = config.limits
        self._metrics = metrics
        self._limits = limits
        self._events = events
        self._instances = tuple(
            Member("instance", instance) for instance in range(config.cluster.num_instances)
        )
        has_prefill = config.has_prefill_member
        self.expected = (*self._instances, PREFILL) if has_prefill else self._instances
        """Every member that must be ready; with synthetic KV or as a pipeline, no prefill."""
        self.recovers = config.recovers
        self._streams: dict[Member, MemberStream] = {}
        self.start = Start(self.expected, limits.start_timeout_ms)
        self.takes_over = False
        """Whether members of a controller that was lost are to dial this one."""
        self._deadlines = Deadlines()
        self._replacements = Replacements(
            self.expected,
            processes,
            self._deadlines,
            lambda member, message: self.lose(member, message, "silent"),
            limits.recovery_timeout_ms,
        )
        self._heartbeats = Heartbeats()
        self.terms = Terms(self._instances, self, metrics.waits_for)
        self.suspicion = Suspicion(self.terms, self._heartbeats, self._deadlines, self.lose)
        self.leaving: str | None = None
        """Why every member is asked to leave; None until then."""
        self.failure: Future[str] = Future()
        """Done when a running cluster can no longer serve: the sentence that says why."""
        self._last_loss = ""
        self._is_after_loss = False
        """Whether an instance was lost since a term last began."""
        self._short_terms = ShortTerms()
        self._kept_pages = KeptPages()
        self._join = pb.Join()
        """What members of the present term were asked to join."""
        self._seats = Seats(config.cluster, num_experts if self.recovers else None)
        self.changes = SeatChanges(
            self._seats, self.terms, self._replacements, events.seats_wanted, self._retire
        )

    def watch(
        self, progress: Callable[[str], None], loading: Callable[[Member, int], None]
    ) -> None:
        """Set what is called for each member that is ready, and for each percent of its weights."""
        self.start.progress = progress
        self._loading = loading

    @property
    def _goes_on(self) -> bool:
        """Whether the loss of a member is not the end."""
        return self.recovers and (self.start.has_succeeded or self.takes_over)

    @property
    def seats(self) -> list[int]:
        """Instances of the term, or of the next one while it is being joined; ascending."""
        return list(map(self._instances.index, self.terms.seats))

    @property
    def _seats_now(self) -> SeatsNow:
        present = map(self._instances.index, self.terms.present)
        return self._seats.now(sorted({*self.seats} & {*present}), self.terms.is_serving)

    def _instances_at(self, seats: Sequence[int]) -> list[Member]:
        return [self._instances[seat] for seat in seats]

    @property
    def has_prefill(self) -> bool:
        """Whether a prefill is attached, and takes requests of the present term."""
        return PREFILL in self._streams

    def send(self, member: Member, message: ToMember) -> None:
        """Queue a message of the present term; it is dropped if the member is not in it."""
        if member == PREFILL or self.terms.standing[member] is Standing.IN:
            self._send(member, message)

    def _send(self, member: Member, message: ToMember) -> None:
        """Queue a message down. A member that leaves too many unread is lost.

        Its loss is taken up once what sends now has come to its end: in the middle it would end the
        term under messages of that term which are yet to be sent.
        """
        stream = self._streams.get(member)
        if stream is None:
            return
        message.term = self.terms.number
        if not stream.send(message) and not stream.closed:
            stream.close()  # It has a gap: nothing may follow.
            asyncio.get_running_loop().call_soon(self._lose_unread, member, stream)

    def _lose_unread(self, member: Member, stream: MemberStream) -> None:
        if self._streams.get(member) is stream:
            self.lose(member, f"{member} left {stream.max_messages} messages unread", "unread")

    def leave(self, reason: str) -> None:
        """Ask every member to leave, also those that attach from now on. Idempotent."""
        if self.leaving is None:
            self.leaving = reason
            self._deadlines.end_all()
            self._seats.end(reason)
            for stream in self._streams.values():
                self._shut_down(stream, reason)

    # --- losses

    def exited(self, member: Member, number: int, message: str) -> None:
        """The process of this number has ended, expected or not."""
        if self._replacements.is_latest(member, number):
            self.lose(member, f"{member}: {message}", "exit")
            message = ""
        self._replacements.exited(member, number, message)

    def lose(self, member: Member, message: str, cause: str) -> None:
        """Take note that the member's process is gone for good, and get another one.

        cause: one word for the metrics.
        A member that was asked to leave is not lost. Before every member is ready, and where
        nothing is recovered, the cluster ends.
        """
        if self.leaving is not None or self.failure.done():
            return
        self._metrics.lost(member.kind, cause)
        self._heartbeats.forget(member)
        self._kept_pages.lose(member)
        if stream := self._streams.pop(member, None):
            stream.close()
        if not self._goes_on:
            self._replacements.kill(member)
            self._give_up(member, message, f"{member} was lost")
            return
        if self.terms.is_serving and member.instance is not None and member in self.terms.seats:
            num_seats, has_windows = len(self.terms.seats), self._events.has_windows
            self._short_terms.lost(member.instance, num_seats, has_windows)
            if self._short_terms.are_too_many:
                self._replacements.kill(member)
                reason = f"{message}; the {MAX_SHORT_TERMS - 1} terms before ended as soon"
                self._give_up(member, reason, f"{member} was lost")
                return
        if member.instance is not None and member not in self.terms.seats:
            if self.start.has_succeeded and not self.terms.is_serving:
                self._events.instance_lost(member.instance)  # It may have left with pages.
            self.changes.newcomer_lost(member, message)
            return
        self._last_loss = message
        if member.instance is None:
            self.start.again([member])
            self._replace(member, message)
            self._recover(PREFILL)
            return
        self._is_after_loss = True
        left = [self._instances.index(e) for e in self.terms.present if e != member]
        is_to_blame = self._short_terms.is_to_blame(member.instance)
        if is_to_blame and self._seats.leave_out(member.instance, left, message):
            logger.warning("%s, as soon as in the terms before; its seat stays empty", message)
            self._replacements.kill(member)
        elif member.instance in {*self._seats.wanted, *self._seats.to_go_on(left)}:
            self._replace(member, message)
        else:
            logger.warning("%s; it was to leave", message)
            self._replacements.kill(member)
        if self.start.has_succeeded:
            self.terms.lost(member, self._instances_at(self._seats.to_go_on(left)))
            self._events.instance_lost(member.instance)
        else:
            # The others may not have dialled yet, and the scheduler has planned nothing.
            self.start.again(self._instances)
            self.terms.lost(member, self._instances)

    def _replace(self, member: Member, message: str) -> None:
        logger.warning("%s; another process takes its place", message)
        self._replacements.replace(
            member,
            term=lambda: self.terms.number + 1,
            # It may still write into the rings: the next term has others.
            lives_on=self.terms.end,
            failed=partial(self._not_replaced, member),
        )

    def _not_replaced(self, member: Member, reason: str) -> None:
        """No process could be started; that ends the cluster if its term waits for one."""
        if member.instance is not None and member not in self.terms.seats:
            self.changes.newcomer_lost(member, f"{member}: {reason}")
            return
        message = f"{self._last_loss}; no process could take its place: {reason}"
        self._give_up(member, message, f"{member} was lost")

    def _give_up(self, member: Member, message: str, sentence: str) -> None:
        """A lost member is not replaced. sentence: what clients get."""
        self.fail(message)
        if member == PREFILL:
            self._events.prefill_lost()
        else:
            self._events.cluster_lost(sentence)

    def fail(self, message: str) -> None:
        """End the cluster, or its start, for this reason; the first reason counts."""
        if self.leaving is not None:
            return
        if not self.start.is_over:
            self.start.fail(message)
        elif not self.failure.done():
            logger.info("%s", message)
            self._deadlines.end_all()
            self._seats.end(message)
            self.failure.set_result(message)

    def _recover(self, member: Member) -> None:
        """End the cluster if the member's kind does not serve again in time."""
        limit_ms = self._limits.recovery_timeout_ms
        self._deadlines.start(member.kind, limit_ms, partial(self._not_recovered, member))

    def _not_recovered(self, member: Member) -> None:
        limit = f"recovery_timeout_ms ({self._limits.recovery_timeout_ms} ms)"
        message = f"the service did not go on within {limit} after a loss: {self._last_loss}"
        self._give_up(member, message, message)

    async def watch_heartbeats(self) -> None:
        """Lose members that are silent for too long, and note the seats, until cancelled."""
        if self.takes_over:
            for member in self.expected:
                self._replacements.expect(member)
        while True:
            await asyncio.sleep(self._limits.suspect_ms / TICKS / 1000)
            self._metrics.seats(self._seats_now.states())
            for member in self._heartbeats.tick():
                if self.start.has_succeeded or self.takes_over:
                    limit = f"suspect_ms ({self._limits.suspect_ms} ms)"
                    self.lose(member, f"{member}: it has sent nothing for {limit}", "silent")

    # --- terms.TermSteps

    def ask_to_leave(self, instance: Member) -> None:
        """See terms.TermSteps."""
        self._send(instance, pb.ToInstance(leave=pb.Leave()))
        self._deadlines.start("leave", self._limits.plan_timeout_ms, self._lose_those_that_stay)

    def _lose_those_that_stay(self) -> None:
        for instance in self.terms.those(Standing.LEAVING):
            limit = f"plan_timeout_ms ({self._limits.plan_timeout_ms} ms)"
            self.lose(instance, f"{instance}: it did not leave its term in {limit}", "stuck")

    def ask_to_join(self) -> None:
        """See terms.TermSteps."""
        self._deadlines.met("leave")
        if self.takes_over and not self.start.has_succeeded:
            self._events.took_over(self._kept_pages.of(self.terms.seats))
        table = self._seats.table(self.seats)
        self._join = pb.Join(
            peers=[
                pb.Peer(**self._streams[each].where._asdict())
                if each in self.terms.seats
                else pb.Peer()
                for each in self._instances
            ],
            newest_ticket=self._events.newest_ticket,
            seats=self.seats,
            keeps_rows=self.terms.keeps_rows,
            expert_seats=table.seats,
            expert_slots=table.slots,
        )
        for instance in self.terms.seats:
            self._send(instance, pb.ToInstance(join=self._join))
        self._send(PREFILL, pb.ToPrefill(join=self._join))

    def term_ended(self) -> None:
        """See terms.TermSteps."""
        self._recover(self._instances[0])
        self.changes.term_ended()
        self._metrics.term_ended()
        self._events.term_ended()

    def term_began(self) -> None:
        """See terms.TermSteps."""
        self._short_terms.began()
        self._replacements.begin_term()
        if self._deadlines.met("instance"):
            cause = "loss" if self._is_after_loss else "request"
            self._metrics.term_began(self.terms.number, cause)
            self._is_after_loss = False
            self._events.term_began(self.terms.number)
            term, seats = self.terms.number, self.terms.seats
            logger.info("term %d serves with %s", term, ", ".join(map(str, seats)))
        self.changes.term_began()

    async def want(self, seats: Sequence[int] | None, by: str = "somebody") -> SeatsNow:
        """Let the cluster have other seats; returns those that it has once they serve.

        seats: None changes nothing. by: see Seats.ask. Raises ValueError (see Seats.ask),
        RuntimeError if the change failed and nothing changed, or TimeoutError if it takes longer
        than `longest_change_s`: it goes on, and others may ask for another one.
        """
        if seats is not None:
            if not (self.start.has_succeeded and self.recovers):
                raise ValueError("this service cannot change its seats, nor go on after a loss")
            goes_on = (
                'the cluster goes on with the change: "nanocp top" shows it, and "nanocp scale '
                '--undo" undoes it'
            )
            await wait_for(self.changes.want(seats, by), self._limits.longest_change_s, goes_on)
        return self._seats_now

    async def undo(self) -> SeatsNow:
        """Undo the change that is under way; returns the seats. Raises ValueError if none is."""
        self.changes.undo()
        return self._seats_now

    def _retire(self, member: Member) -> None:
        self._heartbeats.forget(member)
        if stream := self._streams.pop(member, None):
            self._shut_down(stream, "its seat is not wanted any more")

    # --- member_streams.MemberListener

    def attach(self, member: Member, hello: Hello | None = None) -> MemberStream:
        """See member_streams.MemberListener."""
        if member not in self.expected:
            expected = ", ".join(map(str, self.expected))
            raise ValueError(f"this cluster has no {member}; it has {expected}")
        if member in self._streams:
            raise ValueError(f"{member} is attached already")
        self._replacements.dialled(member)
        if member == PREFILL and self._goes_on:
            # It dials before it loads, and beats after it.
            self._replacements.expect(member)
        self._kept_pages.say(member, hello)
        where = hello.where if hello is not None else Peer()
        stream = self._streams[member] = MemberStream(member, where=where)
        if self.leaving is not None:
            self._shut_down(stream, self.leaving)
        elif member != PREFILL:
            self._heartbeats.heard(member)
            self.terms.arrived(member)
            self.changes.go_on()
        elif self.terms.may_be_joined:
            self._send(PREFILL, pb.ToPrefill(join=self._join))
            self._events.prefill_arrived()
        return stream

    def loading(self, member: Member, percent: int) -> None:
        """See member_streams.MemberListener."""
        if member in self.expected:
            self._replacements.loads(member)
            self._loading(member, percent)

    def received(self, member: Member, said: Said, term: int) -> None:
        """See member_streams.MemberListener."""
        match said:
            case values.Beat():
                self._replacements.dialled(member)
                self._heartbeats.heard(member, said.awaited)
            case values.Loading():
                self.loading(member, said.percent)
            case values.Ready():
                self._is_ready(member, said.chosen, term)
            case values.Left():
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
                self._events.reported(member, said)

    def failed(self, member: Member | None, message: str) -> None:
        """See member_streams.MemberListener."""
        if member is not None:
            self.lose(member, message, "stream")
        elif self._goes_on:
            # Its process ends, which is noticed too.
            logger.warning("%s", message)
        else:
            self.fail(message)

    def _is_ready(self, member: Member, chosen: tuple[str, ...], term: int) -> None:
        # From now on its silence counts, also if it is stopped before its first heartbeat.
        self._heartbeats.heard(member)
        if member == PREFILL:
            if self._deadlines.met(PREFILL.kind):
                logger.info("the prefill serves again")
            self.start.ready(member, chosen)
            return
        self.terms.has_joined(member, term)
        if self.terms.standing[member] is Standing.IN:
            self.start.ready(member, chosen)

    def _shut_down(self, stream: MemberStream, reason: str) -> None:
        kind = pb.ToPrefill if stream.member == PREFILL else pb.ToInstance
        stream.send(kind(shutdown=pb.Shutdown(reason=reason)))
        stream.close()
