"""The coordinator: carries out the scheduler's plans, and collects its events, without a clock."""

from __future__ import annotations

from collections.abc import Callable

from control_plane.coordinator.flights.flights import Flights
from control_plane.coordinator.flights.held_blocks import HeldBlocks
from control_plane.coordinator.members.deadlines import Deadlines
from control_plane.coordinator.members.members import Members
from control_plane.coordinator.members.output import MembersEvent, PrefillArrived, PrefillLost
from control_plane.observe.kv_events import PageEvents
from control_plane.observe.metrics.registry import Metrics
from control_plane.ports.controller_interface import ControllerEvents, Submission
from nanocp.config.limits import LimitsConfig
from nanocp.values.members import BlocksRefused, EnginesNow, Member, Report, TokensLost
from nanocp.values.passes import ServiceEvent
from nanocp.values.plan import (
    AbortRequested,
    Ended,
    FinishReason,
    Plan,
    Regrouped,
    Resubmitted,
    TermEnded,
    TransferFailed,
    WindowDone,
)


class Coordinator:
    """One scheduler and its members. Used from one thread, which passes the time to `deadlines`."""

    def __init__(
        self,
        limits: LimitsConfig,
        front_end: ControllerEvents,
        metrics: Metrics,
        make_members: Callable[[Coordinator], Members],
        make_flights: Callable[[Members], Flights],
        obstacle_to_more: Callable[[int], str] = lambda num_instances: "",
    ) -> None:
        """make_flights: makes the scheduler and the sender of its plans.

        obstacle_to_more: see output.Facts. Raises ValueError for an unknown policy.
        """
        self._window_ms = limits.plan_timeout_ms + limits.exchange_timeout_ms
        """Longest time that the oldest window may take."""
        self._front_end = front_end
        self._metrics = metrics
        self.obstacle_to_more = obstacle_to_more
        self.members = make_members(self)
        self.flights = make_flights(self.members)
        self.scheduler = self.flights.scheduler
        self.transfers = self.flights.transfers
        self.held = self.transfers.held if self.transfers else HeldBlocks(self.members)
        self.deadlines = Deadlines()
        self.wake: Callable[[], None] = lambda: None
        """Called when the scheduler could act now."""
        self.page_events: PageEvents | None = None
        """Tells routers of shared pages; None: nobody asks."""
        self._events: list[ServiceEvent] = []
        self._submitted: dict[int, Submission] = {}
        """Requests until their prompts are on the way to the prefill."""
        self._num_owed = 0
        """Resubmissions that front ends still owe, one for each term."""

    # --- what the scheduler is to hear of

    def take_events(self) -> list[ServiceEvent]:
        """Return the events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def happened(self, event: ServiceEvent) -> None:
        """Keep an event for the scheduler, and wake it if it could act."""
        self._events.append(event)
        self._look()

    def _look(self) -> None:
        # After a loss no window may ever be reported again, and new requests must still be ended.
        if self.members.end.failure.done() or not self.flights.is_full:
            self.wake()

    def submitted(self, submission: Submission, now_us: int) -> None:
        """Take a new request, or a later attempt of one."""
        self._submitted[submission.request_id] = submission
        if submission.remote is not None:
            self.held.hold(submission.request_id, submission.remote)
        if self.page_events is not None:
            prompt, salt = submission.prompt_ids, submission.salt
            self.page_events.submitted(submission.arrival, prompt, salt)
        if submission.arrival.attempt:
            self._metrics.recovery.submitted_again()
        self.happened(submission.event(now_us))

    def owe(self, num_answers: int) -> None:
        """Expect this many more resubmissions, one by each front end and term, in order.

        Negative: some have come.
        """
        self._num_owed += num_answers
        if self._num_owed == 0:
            self.held.resubmitted()
            self.happened(Resubmitted())

    def take_up(self, event: MembersEvent) -> None:
        """Take an event of a member or of the term."""
        match event:
            case PrefillArrived(member):
                if self.transfers is not None:
                    self.transfers.prefill_arrived(member)
                return
            case PrefillLost(member):
                lost = self.transfers.prefill_lost(member) if self.transfers is not None else ()
                for failed in lost:
                    self.happened(failed)
                return
            case TermEnded():
                self.flights.end_term()
                self._watch_window()
            case Regrouped():
                self.flights.begin_term(event.seats, event.keeps_rows)
        self.happened(event)
        if isinstance(event, Regrouped) and not event.keeps_rows:
            self.held.interrupted()
            self.owe(self._front_end.interrupted())

    def reported(self, member: Member, report: Report) -> None:
        """Take a report of this term. Raises ValueError if it is meaningless."""
        match report:
            case WindowDone():
                self._window_done(report)
            case TokensLost():
                # The requests begin their next attempt (one history).
                for request_id in report.request_ids:
                    self._front_end.tokens_lost(request_id, f"{member}: {report.reason}")
            case EnginesNow():
                self._metrics.engines.reported(member, report.engines)
            case TransferFailed() if self.transfers is not None:
                if (failed := self.transfers.failed(member, report)) is not None:
                    self.happened(failed)
            case BlocksRefused(request_id, message):
                self._front_end.ended(Ended(request_id, FinishReason.INVALID, message))
                self.happened(AbortRequested(request_id))
            case _:
                event = self.flights.reported(member, report)
                self._events += [] if event is None else [event]
                self._look()

    def _window_done(self, done: WindowDone) -> None:
        is_complete = self.flights.window_done(done)
        self._metrics.instances.stepped(done, is_complete)
        self._events.append(done)
        if is_complete:
            self._watch_window()
            self.wake()

    # --- what it has decided

    def carry_out(self, plan: Plan, now_us: int) -> None:
        """Send the plan, and inform the front end. now_us: the time of the call."""
        for event in self.flights.prepare(plan, self._submitted):
            self.happened(event)
        # Before the window: a front end refuses tokens of an instance that it does not know as the
        # request's MoE binding.
        cached = self.flights.cached_tokens(plan) if plan.placements else {}
        for placement in plan.placements:
            submission = self._submitted.pop(placement.request_id, None)
            if submission is not None:
                self._metrics.scheduling.placed(placement.cp_degree)
                arrival = submission.arrival
                num_cached = cached.get(placement.request_id, arrival.prompt_len - 1)
                self._metrics.recovery.placed(arrival.attempt, arrival.prompt_len, num_cached)
                self._front_end.placed(placement, num_cached)
                self.held.placed(placement.request_id)
            else:
                self._metrics.scheduling.binding_changed()
                self._front_end.placed(placement)
        if plan.window is not None:
            self.flights.send(plan)
            if len(self.flights) == 1:
                self._watch_window()
        if plan.is_settled:
            self.members.changes.settled()
        for preempted in plan.preempted:
            self._metrics.scheduling.preempted()
            self._front_end.preempted(preempted)
        for ended in plan.ended:
            self._submitted.pop(ended.request_id, None)
            self.held.release(ended.request_id)
            self.report_end(ended)
        self.deadlines.met("scheduler")
        deadline_us = self.scheduler.next_deadline_us
        if deadline_us is not None:
            self.deadlines.start("scheduler", max(0, deadline_us - now_us) / 1e3, self.wake)
        if self.page_events is not None:
            self.page_events.planned(self.scheduler, plan.ended)

    def report_end(self, ended: Ended) -> None:
        """Inform the front end that a request has ended."""
        self._metrics.scheduling.ended(ended)
        self._front_end.ended(ended)

    def _watch_window(self) -> None:
        """End the cluster if the oldest window takes too long (protocol.md, bounded waits)."""
        self.deadlines.met("window")
        if self.flights.oldest is not None:
            self.deadlines.start("window", self._window_ms, self._window_overdue)

    def _window_overdue(self) -> None:
        message = f"did not report window {self.flights.oldest} in {self._window_ms / 1000:.0f} s"
        self.members.suspicion.blame(self.flights.missing(), message)

    # --- output.Facts

    @property
    def newest_ticket(self) -> int:
        """The last ticket of all terms so far; see output.Facts."""
        return self.flights.newest_ticket

    @property
    def has_windows(self) -> bool:
        """Return whether a window is in flight; see output.Facts."""
        return len(self.flights) > 0
