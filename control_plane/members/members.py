"""The members of a cluster: who has dialled, who is ready, who was lost, and who comes instead.

Enters: what members say on their streams, and how their processes ended. Leaves: messages down the
streams; reports of members, losses and terms to `MemberEvents`; processes to end and to start. Does
not know: plans, tickets, how a member's process is started.

A cluster starts when every member is ready. When one is lost later, its process is killed, another
takes its seat, and all instances begin the next term (docs/protocol.md, terms). A lost prefill is
replaced without a new term.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Protocol

from control_plane.member_streams import PREFILL, FromMember, Member, MemberStream, ToMember
from control_plane.members.heartbeats import TICKS, Heartbeats
from control_plane.members.replacements import Processes, Replacements
from control_plane.members.terms import Standing, Terms
from control_plane.observe.recovery_metrics import RecoveryMetrics
from nanocp.config import Config
from nanocp.wire.v1 import cluster_pb2 as pb

logger = logging.getLogger(__name__)

_SHORT_TERM, _MAX_SHORT_TERMS = 10, 3
"""A loss before so many windows ends a short term, and how many of them may follow each other:
something that runs in its first windows kills members."""
_GONE_S = 1.0
"""A process that a peer calls gone is noticed by other means in this time, or else it is lost."""


class StartError(RuntimeError):
    """The cluster cannot start; the message says which member and why."""


class MemberEvents(Protocol):
    """What is done about the members. Called from the controller's event loop."""

    @property
    def newest_ticket(self) -> int:
        """The last ticket of all terms so far."""

    @property
    def has_windows(self) -> bool:
        """Whether a window was sent that some instance has not reported."""

    def reported(self, member: Member, message: FromMember) -> None:
        """Take a member's report on its work in this term.

        Raises ValueError if the member cannot have meant it: its stream then ends.
        """

    def prefill_arrived(self) -> None:
        """A prefill has dialled and will join the term; it knows no ticket."""

    def instance_lost(self, instance: int) -> None:
        """The instance's process is gone, with its frames. Another takes its seat."""

    def term_ended(self) -> None:
        """No member takes windows any more."""

    def term_began(self, term: int) -> None:
        """Every instance has joined a term that is not the first."""

    def cluster_lost(self, message: str) -> None:
        """No term will serve any more."""

    def prefill_lost(self) -> None:
        """No prefill will come any more. Requests that have their KV go on."""


class Members:
    """Every member of one cluster, ready or not.

    It is used from the controller's event loop, except `wait_ready` and the properties.
    """

    def __init__(
        self,
        config: Config,
        events: MemberEvents,
        processes: Processes,
        metrics: RecoveryMetrics,
    ) -> None:
        limits = config.limits
        self._metrics = metrics
        self._limits = limits
        self._events = events
        self._instances = tuple(
            Member("instance", instance) for instance in range(config.cluster.num_instances)
        )
        has_prefill = not config.prefill.synthetic_kv
        self.expected = (*self._instances, PREFILL) if has_prefill else self._instances
        """Every member that must be ready; with synthetic KV there is no prefill."""
        self.recovers = recovers(config)
        self._streams: dict[Member, MemberStream] = {}
        self._ready: dict[Member, tuple[str, ...]] = {}
        """What each member that is ready has chosen."""
        self._replacements = Replacements(self.expected, processes)
        self._heartbeats = Heartbeats()
        self.terms = Terms(self._instances, self)
        self.leaving: str | None = None
        """Why every member is asked to leave; None until then."""
        self._started: Future[None] = Future()
        self.failure: Future[str] = Future()
        """Done when a running cluster can no longer serve: the sentence that says why."""
        self._last_loss = ""
        self._is_after_loss = False
        """Whether an instance was lost since a term last began."""
        self._num_windows_reported = 0
        """Reports of windows in this term, by all instances together."""
        self._num_short_terms = 0
        self._recovery: asyncio.TimerHandle | None = None
        self._prefill_recovery: asyncio.TimerHandle | None = None
        self._leaving_overdue: asyncio.TimerHandle | None = None

    def watch(
        self, progress: Callable[[str], None], loading: Callable[[Member, int], None]
    ) -> None:
        """Set what is called as members start.

        progress: for each member that becomes ready. loading: for each percent of its weights that
        a member has loaded.
        """
        self._progress = progress
        self._loading = loading

    def wait_ready(self) -> dict[Member, tuple[str, ...]]:
        """Wait for every member, from any thread; returns what each chose at start-up.

        Raises StartError naming the members that failed or are late.
        """
        start_timeout_ms = self._limits.start_timeout_ms
        try:
            self._started.result(start_timeout_ms / 1000)
        except TimeoutError:
            absent = ", ".join(str(member) for member in self.expected if member not in self._ready)
            limit = f"start_timeout_ms ({start_timeout_ms} ms)"
            raise StartError(f"not ready after {limit}: {absent}") from None
        return {member: self._ready[member] for member in self.expected}

    @property
    def _has_started(self) -> bool:
        """Whether every member has been ready at one time."""
        return self._started.done() and self._started.exception() is None

    @property
    def has_prefill(self) -> bool:
        """Whether a prefill is attached, and takes requests of the present term."""
        return PREFILL in self._streams

    def send(self, member: Member, message: ToMember) -> None:
        """Queue a message of the present term; it is dropped if the member is not in it."""
        if member == PREFILL or self.terms.standing[member] is Standing.IN:
            self._send(member, message)

    def _send(self, member: Member, message: ToMember) -> None:
        """Queue a message down. A member that leaves too many unread is lost."""
        stream = self._streams.get(member)
        if stream is None:
            return
        message.term = self.terms.number
        if not stream.send(message) and not stream.closed:
            self.lose(member, f"{member} left {stream.max_messages} messages unread", "unread")

    def leave(self, reason: str) -> None:
        """Ask every member to leave, also those that attach from now on. Idempotent."""
        if self.leaving is None:
            self.leaving = reason
            self._stop_recovering()
            for stream in self._streams.values():
                self._shut_down(stream, reason)

    # --- losses

    def exited(self, member: Member, number: int, message: str) -> None:
        """The process of this number has ended, expected or not."""
        if self._replacements.is_latest(member, number):
            self.lose(member, f"{member}: {message}", "exit")
        self._replacements.exited(member, number)

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
        if stream := self._streams.pop(member, None):
            stream.close()
        if not self._has_started or not self.recovers:
            self._replacements.kill(member)
            self._give_up(member, message, f"{member} was lost")
            return
        if self.terms.is_serving and member != PREFILL:
            num_windows = self._num_windows_reported // len(self._instances)
            # The loss of a member that did nothing says nothing.
            is_short = num_windows < _SHORT_TERM and (num_windows or self._events.has_windows)
            self._num_short_terms = self._num_short_terms + 1 if is_short else 0
        if self._num_short_terms == _MAX_SHORT_TERMS:
            self._replacements.kill(member)
            reason = f"{message}; the {_MAX_SHORT_TERMS - 1} terms before ended as soon"
            self._give_up(member, reason, f"{member} was lost")
            return
        logger.warning("%s; another process takes its place", message)
        self._last_loss = message
        self._replacements.replace(
            member,
            term=lambda: self.terms.number + 1,
            # It may still write into the rings: the next term has others.
            lives_on=self.terms.end,
            failed=lambda reason: self._give_up(
                member,
                f"{self._last_loss}; no process could take its place: {reason}",
                f"{member} was lost",
            ),
        )
        if member == PREFILL:
            if self._prefill_recovery is None:
                self._prefill_recovery = self._call_later(
                    self._limits.recovery_timeout_ms / 1000, partial(self._not_recovered, PREFILL)
                )
        else:
            assert member.instance is not None
            self._is_after_loss = True
            self.terms.lost(member)
            self._events.instance_lost(member.instance)

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
        if not self._started.done():
            self._started.set_exception(StartError(message))
        elif not self.failure.done():
            logger.info("%s", message)
            self._stop_recovering()
            self.failure.set_result(message)

    def _not_recovered(self, member: Member) -> None:
        limit = f"recovery_timeout_ms ({self._limits.recovery_timeout_ms} ms)"
        message = f"the service did not go on within {limit} after a loss: {self._last_loss}"
        self._give_up(member, message, message)

    def _stop_recovering(self) -> None:
        for timer in (self._recovery, self._prefill_recovery, self._leaving_overdue):
            if timer is not None:
                timer.cancel()

    def _call_later(self, delay_s: float, function: Callable[[], None]) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(delay_s, function)

    # --- suspicion

    async def watch_heartbeats(self) -> None:
        """Lose members that are silent for too long, until cancelled."""
        while True:
            await asyncio.sleep(self._limits.suspect_ms / TICKS / 1000)
            for member in self._heartbeats.tick():
                if self._has_started:
                    limit = f"suspect_ms ({self._limits.suspect_ms} ms)"
                    self.lose(member, f"{member}: it has sent nothing for {limit}", "silent")

    def blame(self, instances: list[int], message: str) -> None:
        """These instances do not go on: lose those at the root of their waits.

        message: says of one of them, by the prefix of its name, what it did not do.
        """
        members = [Member("instance", instance) for instance in instances]
        for member in {self._heartbeats.root(member): None for member in members}:
            self.lose(member, f"{member} {message}", "stuck")

    def _suspected(self, member: Member, suspect: pb.Suspect, term: int) -> None:
        """A member's wait for an instance failed, and it cannot go on in this term."""
        if term != self.terms.number or not self.terms.may_be_joined:
            return
        message = f"{member}: {suspect.message}"
        if not suspect.HasField("instance"):
            self.terms.end()
        elif not self.recovers:
            self.lose(Member("instance", suspect.instance), message, "stuck")
        elif suspect.is_gone:
            blamed = Member("instance", suspect.instance)
            self._call_later(_GONE_S, partial(self._lose_if_still_in, blamed, message, term))
        else:
            root = self._heartbeats.root(Member("instance", suspect.instance))
            self.lose(root, message, "stuck")

    def _lose_if_still_in(self, member: Member, message: str, term: int) -> None:
        if self.terms.number == term and self.terms.may_be_joined:
            self.lose(member, message, "gone")

    # --- terms.TermSteps

    def ask_to_leave(self, instance: Member) -> None:
        """See terms.TermSteps."""
        self._send(instance, pb.ToInstance(leave=pb.Leave()))
        if self._leaving_overdue is None:
            self._leaving_overdue = self._call_later(
                self._limits.plan_timeout_ms / 1000, self._lose_those_that_stay
            )

    def _lose_those_that_stay(self) -> None:
        self._leaving_overdue = None
        for instance in self.terms.those(Standing.LEAVING):
            limit = f"plan_timeout_ms ({self._limits.plan_timeout_ms} ms)"
            self.lose(instance, f"{instance}: it did not leave its term in {limit}", "stuck")

    def ask_to_join(self) -> None:
        """See terms.TermSteps."""
        if self._leaving_overdue is not None:
            self._leaving_overdue.cancel()
            self._leaving_overdue = None
        for member in self.expected:
            self._ask_to_join(member)

    def _ask_to_join(self, member: Member) -> None:
        peers = [self._streams[instance].where for instance in self._instances]
        join = pb.Join(peers=peers, newest_ticket=self._events.newest_ticket)
        self._send(member, _to(member)(join=join))

    def term_ended(self) -> None:
        """See terms.TermSteps."""
        if self._recovery is None:
            self._recovery = self._call_later(
                self._limits.recovery_timeout_ms / 1000,
                partial(self._not_recovered, self._instances[0]),
            )
        self._metrics.term_ended()
        self._events.term_ended()

    def term_began(self) -> None:
        """See terms.TermSteps."""
        self._num_windows_reported = 0
        if self._recovery is not None:
            self._recovery.cancel()
            self._recovery = None
            cause = "loss" if self._is_after_loss else "request"
            self._metrics.term_began(self.terms.number, cause)
            self._is_after_loss = False
            self._events.term_began(self.terms.number)

    # --- member_streams.MemberListener

    def attach(self, member: Member, where: pb.Peer | None = None) -> MemberStream:
        """See member_streams.MemberListener."""
        if member not in self.expected:
            expected = ", ".join(map(str, self.expected))
            raise ValueError(f"this cluster has no {member}; it has {expected}")
        if member in self._streams:
            raise ValueError(f"{member} is attached already")
        stream = self._streams[member] = MemberStream(member, where=where)
        if self.leaving is not None:
            self._shut_down(stream, self.leaving)
        elif member != PREFILL:
            self.terms.arrived(member)
        elif self.terms.may_be_joined:
            self._ask_to_join(member)
            self._events.prefill_arrived()
        return stream

    def loading(self, member: Member, percent: int) -> None:
        """See member_streams.MemberListener."""
        if member in self.expected:
            self._loading(member, percent)

    def received(self, member: Member, message: FromMember) -> None:
        """See member_streams.MemberListener."""
        match message.WhichOneof("message"):
            case "heartbeat":
                beat = message.heartbeat
                self._heartbeats.heard(member, beat.awaited if beat.HasField("awaited") else None)
            case "loading_percent":
                assert isinstance(message, pb.FromPrefill)
                self.loading(member, message.loading_percent)
            case "ready":
                self._is_ready(member, message)
            case "left":
                self.terms.has_left(member, message.term)
            case "suspect":
                self._suspected(member, message.suspect, message.term)
            case kind if message.term != self.terms.number or not self.terms.is_serving:
                logger.debug("dropped: %s of %s in term %d", kind, member, message.term)
                self._metrics.dropped(kind or "nothing")
            case kind:
                self._num_windows_reported += kind == "window_done"
                self._events.reported(member, message)

    def failed(self, member: Member | None, message: str) -> None:
        """See member_streams.MemberListener."""
        if member is not None:
            self.lose(member, message, "stream")
        elif self._has_started and self.recovers:
            # Its process ends, which is noticed too.
            logger.warning("%s", message)
        else:
            self.fail(message)

    def _is_ready(self, member: Member, message: FromMember) -> None:
        # From now on its silence counts, also if it is stopped before its first heartbeat.
        self._heartbeats.heard(member)
        if isinstance(message, pb.FromPrefill):
            self._ready[member] = (f"process {message.ready.pid}",)
            if self._prefill_recovery is not None:
                self._prefill_recovery.cancel()
                self._prefill_recovery = None
        else:
            graphs = f"graphs: {message.ready.num_graphs} prepared"
            self._ready[member] = (*message.ready.selected, graphs)
            self.terms.has_joined(member, message.term)
        if not self._started.done():
            self._progress(f"{len(self._ready)} of {len(self.expected)} processes are ready")
            if len(self._ready) == len(self.expected):
                self._started.set_result(None)

    def _shut_down(self, stream: MemberStream, reason: str) -> None:
        stream.send(_to(stream.member)(shutdown=pb.Shutdown(reason=reason)))
        stream.close()


def recovers(config: Config) -> bool:
    """Whether the cluster goes on after it has lost a member."""
    is_cpu = config.data_plane.device == "cpu" and config.data_plane.page_backend != "nixl"
    return is_cpu and config.limits.recovery_timeout_ms > 0


def _to(member: Member) -> type[pb.ToInstance] | type[pb.ToPrefill]:
    """The class of messages to this member."""
    return pb.ToPrefill if member == PREFILL else pb.ToInstance
