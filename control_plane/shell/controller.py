"""The loop: drain events -> plan_window -> push plans -> collect. It decides nothing.

Enters: submissions and aborts from the front end, events from the members. Leaves: plans, tickets
and fences to the members, placements and ends to the front end. Does not know: tokens, models, how
a member's process was started.

The scheduler is called once per window while two are in flight, else at once.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from control_plane.coordinator.flights.flights import Flights
from control_plane.coordinator.members.members import Members
from control_plane.coordinator.members.output import MembersEvent, PrefillArrived, PrefillLost
from control_plane.coordinator.members.seats import SeatsNow
from control_plane.frontend.controller_interface import (
    ControllerEvents,
    ControllerInterface,
    Submission,
)
from control_plane.observe.cluster_view import ClusterView
from control_plane.observe.metrics import Metrics
from control_plane.ports.member_streams import serve_members
from control_plane.ports.members_port import MemberSecrets
from control_plane.shell.event_log import open_event_log
from control_plane.shell.members_shell import MembersShell, Processes, wait_for
from nanocp.config.whole import Config
from nanocp.values.members import EnginesNow, Member, Report, TokensLost
from nanocp.values.passes import LayoutWanted, ServiceEvent
from nanocp.values.plan import (
    AbortRequested,
    Ended,
    Event,
    FinishReason,
    Plan,
    Regrouped,
    Resubmitted,
    TermEnded,
    TransferFailed,
    WindowDone,
)

logger = logging.getLogger(__name__)

_STREAMS_GRACE_S = 1.0
"""Longest wait for the members' streams to take their last message."""
_ANSWER_S = 10.0
"""Longest wait for the controller's thread to answer."""
_THREAD_TIMEOUT_S = 10.0
"""Longest wait for the controller's thread to end."""


class Controller(ControllerInterface):
    """The loop around one scheduler, in a thread of its own.

    Public methods may be called from any thread; it calls the front end from its own.
    """

    def __init__(
        self,
        config: Config,
        processes: Processes,
        member_secrets: MemberSecrets,
        front_end: ControllerEvents,
        metrics: Metrics,
        view: ClusterView,
        make_flights: Callable[[Members], Flights],
        num_experts: int | None = None,
    ) -> None:
        """Make a controller; no port is open and no thread runs yet.

        processes: replaces members that are lost. member_secrets: what each member shows when it
        attaches. make_flights: makes the scheduler, and what sends its plans to these members.
        num_experts: see members.seats. Raises ValueError (policy) or OSError (event log).
        """
        self._config = config
        self._processes = processes
        self._member_secrets = member_secrets
        self._front_end = front_end
        self._metrics = metrics
        self._view = view
        self._events: list[ServiceEvent] = []
        self._submitted: dict[int, Submission] = {}
        """By request, from submit until its prompt is on its way to the prefill."""
        self.members = Members(config, self, metrics.recovery, num_experts)
        self._shell = MembersShell(self.members, processes, self._take_up, self._reported)
        self._flights = make_flights(self.members)
        self._scheduler = self._flights.scheduler
        wall_us = time.time_ns() // 1000 - _now_us()
        self._event_log = open_event_log(config, wall_us, self._flights.pipeline)
        if event_log := self._event_log:
            metrics.recovery.log_with(lambda: event_log.num_missing)
        self._deadlines = self._shell.deadlines
        self._resubmissions = 0
        """Front ends that have yet to submit their open requests again, once for each term."""
        self._num_queued = 0
        """Submissions that the controller's thread has not taken."""
        self._lock = threading.Lock()
        self._bound: Future[str] = Future()
        self.is_planning = True
        """False: the scheduler itself failed, and no running request will end by itself."""
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._main()), name="controller", daemon=True
        )

    # --- start and end ---

    def start(self, progress: Callable[[str], None], loading: Callable[[Member, int], None]) -> str:
        """Open the port for members, and return its host:port. Raises OSError naming the port.

        `progress` is called for every member that becomes ready, `loading` for each percent of the
        weights that a member has loaded, both from the controller's thread.
        """
        self.members.start.progress = progress
        self._shell.loaded = loading
        self._thread.start()
        return self._bound.result()

    def member_exited(self, member: Member, number: int, message: str) -> None:
        """The member's process of this number has ended, expected or not."""
        self._call(self._shell.within, self.members.exited, member, number, message)

    def regroup(self) -> None:
        """Let all instances begin another term though none is lost, for tests and benchmarks."""
        self._call(self._shell.within, self.members.terms.end)

    def want_seats(self, seats: Sequence[int] | None, by: str) -> Future[SeatsNow]:
        """Let the cluster have other seats; done with those that it has once they serve.

        seats: None changes nothing. It fails as Members.want and what that returns do, or with a
        TimeoutError if it takes longer than `longest_change_s`: the change goes on, and others may
        ask for another one.
        """

        async def want() -> SeatsNow:
            if seats is not None:
                done = self._shell.within(self.members.want, seats, by)
                goes_on = (
                    'the cluster goes on with the change: "nanocp top" shows it, and "nanocp scale '
                    '--undo" undoes it'
                )
                await wait_for(done, self._config.limits.longest_change_s, goes_on)
            return self.members.seats_now

        return asyncio.run_coroutine_threadsafe(want(), self._loop)

    def undo_seats(self) -> Future[SeatsNow]:
        """Undo the change of seats that is under way; fails with a ValueError if none is."""

        async def undo() -> SeatsNow:
            self._shell.within(self.members.changes.undo)
            return self.members.seats_now

        return asyncio.run_coroutine_threadsafe(undo(), self._loop)

    def want_layout(self, split: Sequence[int]) -> Future[None]:
        """Let layers of a pipeline move; done when they have. See PipelineFlights.want_layout."""

        async def want() -> None:
            wanted = self._flights.want_layout(tuple(split))
            self._events.append(LayoutWanted(tuple(split)))
            self._look()
            limit_s = self._config.limits.longest_change_s
            await wait_for(wanted, limit_s, "the layers go on moving")

        return asyncio.run_coroutine_threadsafe(want(), self._loop)

    def stages(self) -> list[dict[str, Any]]:
        """For each stage of a pipeline, its layers and what it does; empty without stages."""
        answer: Future[list[dict[str, Any]]] = Future()
        self._call(lambda: answer.set_result(self._flights.stages()))
        return answer.result(_ANSWER_S)

    def leave(self, reason: str) -> None:
        """Plan no more and ask every member to leave, also those that attach later. Idempotent."""
        if self._thread.is_alive():
            self._call(self._leave, reason)

    def stop(self) -> None:
        """Close the port and end the thread, once all have left (see `leave`). Idempotent."""
        if self._thread.is_alive():
            self._call(self._left.set)
            self._thread.join(_THREAD_TIMEOUT_S)
        if self._event_log is not None:
            self._event_log.close()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._due = asyncio.Event()
        self._left = asyncio.Event()
        try:
            server, address = await serve_members(
                self._shell, self._config, self._member_secrets, self._processes.kill
            )
        except OSError as error:
            self._bound.set_exception(error)
            return
        self._bound.set_result(address)
        self._planner = asyncio.create_task(self._plan_for_ever())
        self._publisher = asyncio.create_task(
            self._view.publish_for_ever(self._scheduler, self._flights.stages)
        )
        self._shell.within(self.members.begin)
        await self._left.wait()
        self._planner.cancel()
        await server.stop(_STREAMS_GRACE_S)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            logger.debug("the controller has stopped; a call was dropped")

    def _leave(self, reason: str) -> None:
        if self.members.leaving is not None:
            return
        self._planner.cancel()
        self._deadlines.met("window")
        self._shell.within(self.members.leave, reason)

    # --- controller_interface.ControllerInterface ---

    def submit(self, submission: Submission) -> None:
        limit = self._config.scheduler.max_queued_requests
        with self._lock:
            is_full = self._num_queued >= limit and not submission.arrival.resumes
            self._num_queued += not is_full
        if is_full:
            message = f"max_queued_requests ({limit}) requests wait for the controller itself"
            self._report_end(Ended(submission.request_id, FinishReason.REFUSED, message))
        else:
            self._call(self._take, submission)

    def resubmitted(self) -> None:
        self._call(self._resubmitted, -1)

    def abort(self, request_id: int) -> None:
        self._call(self._happened, AbortRequested(request_id))

    def _resubmitted(self, num_owed: int) -> None:
        # Each answers every term, in order: the last answer is for the present term.
        self._resubmissions += num_owed
        if self._resubmissions == 0:
            self._happened(Resubmitted())

    def _take(self, submission: Submission) -> None:
        with self._lock:
            self._num_queued -= 1
        self._submitted[submission.request_id] = submission
        if submission.arrival.attempt:
            self._metrics.recovery.submitted_again()
        self._happened(submission.event(_now_us()))

    # --- the loop ---

    def _happened(self, event: Event) -> None:
        """Keep the event for the scheduler, and call it if it could act now."""
        self._events.append(event)
        self._look()

    def _look(self) -> None:
        # After a loss no window may ever be reported again, and new requests must still be ended.
        if self.members.failure.done() or not self._flights.is_full:
            self._due.set()

    async def _plan_for_ever(self) -> None:
        while True:
            await self._due.wait()
            self._due.clear()
            try:
                self._plan()
                is_checked = self._config.service.check_invariants
                if is_checked and not len(self._flights) and self.members.terms.is_serving:
                    self._flights.check()
            except Exception as error:
                # A scheduler that fails must not plan on, and streams must not wait for it.
                logger.exception("the controller's loop failed")
                self.is_planning = False
                self.members.fail(f"the controller failed: {type(error).__name__}: {error}")
                return

    def _plan(self) -> None:
        events, self._events = self._events, []
        began_ns = time.monotonic_ns()
        plan: Plan | None = None
        try:
            plan = self._flights.plan(events, began_ns // 1000)
            num_new = sum(transfer.source is None for transfer in plan.transfers)
            self._metrics.scheduling.planned(
                (time.monotonic_ns() - began_ns) / 1e9,
                self._scheduler,
                plan.window is not None,
                self._flights.num_prefilling + num_new,
            )
            self._metrics.recovery.waits(self._scheduler.num_held, self._flights.num_prefilling)
            self._view.planned(began_ns // 1000, events, plan, self._scheduler.noted)
            self._carry_out(plan)
            self._shell.settle()
        finally:
            # The plan is on its way: nothing waits for the log. A call in which the scheduler fails
            # is written too.
            if self._event_log is not None:
                self._event_log.write(began_ns // 1000, events, plan)
        if plan != _NOTHING and not self._flights.is_full:
            self._due.set()

    def _carry_out(self, plan: Plan) -> None:
        for event in self._flights.prepare(plan, self._submitted):
            self._happened(event)
        self._metrics.engines.awaited(self._flights.num_pages_awaited)
        # Before the window: a front end refuses tokens of an instance that it does not know as the
        # request's MoE binding.
        for placement in plan.placements:
            submission = self._submitted.pop(placement.request_id, None)
            if submission is not None:
                self._metrics.scheduling.placed(placement.cp_degree)
                num_cached = self._flights.num_cached(submission, plan)
                arrival = submission.arrival
                self._metrics.recovery.placed(arrival.attempt, arrival.prompt_len, num_cached)
                self._front_end.placed(placement, num_cached)
            else:
                self._metrics.scheduling.binding_changed()
                self._front_end.placed(placement)
        if plan.window is not None:
            self._flights.send(plan)
            if len(self._flights) == 1:
                self._watch_window()
        if plan.is_settled:
            self.members.changes.settled()
        for preempted in plan.preempted:
            self._metrics.scheduling.preempted()
            self._front_end.preempted(preempted)
        for ended in plan.ended:
            self._submitted.pop(ended.request_id, None)
            self._report_end(ended)
        self._watch_deadline()

    def _report_end(self, ended: Ended) -> None:
        self._metrics.scheduling.ended(ended)
        self._front_end.ended(ended)

    def _watch_deadline(self) -> None:
        """Call the scheduler again when the next waiting request expires, if nothing else does."""
        self._deadlines.met("scheduler")
        deadline_us = self._scheduler.next_deadline_us
        if deadline_us is not None:
            delay_ms = max(0, deadline_us - _now_us()) / 1e3
            self._deadlines.start("scheduler", delay_ms, self._due.set)

    def _watch_window(self) -> None:
        """End the cluster if the oldest window takes too long (protocol.md, bounded waits).

        Instances find a dead peer first, and name it.
        """
        self._deadlines.met("window")
        if self._flights.oldest is not None:
            limits = self._config.limits
            limit_ms = limits.plan_timeout_ms + limits.exchange_timeout_ms
            self._deadlines.start("window", limit_ms, partial(self._window_overdue, limit_ms))

    def _window_overdue(self, limit_ms: float) -> None:
        message = f"did not report window {self._flights.oldest} in {limit_ms / 1000:.0f} s"
        self.members.suspicion.blame(self._flights.missing(), message)

    # --- what the members ask, and what becomes of them ---

    @property
    def newest_ticket(self) -> int:
        """The last ticket of all terms so far; see output.Facts."""
        return self._scheduler.newest_ticket

    @property
    def has_windows(self) -> bool:
        """Whether a window is in flight; see output.Facts."""
        return len(self._flights) > 0

    def obstacle_to_more(self, num_instances: int) -> str:
        """Why there is no room for more; see output.Facts."""
        return self._processes.obstacle_to_more(num_instances)

    def _take_up(self, event: MembersEvent) -> None:
        match event:
            case PrefillArrived():
                self._flights.prefill_arrived()
                return
            case PrefillLost():
                for failed in self._flights.prefill_lost():
                    self._happened(failed)
                return
            case TermEnded():
                self._flights.end_term()
                self._watch_window()
            case Regrouped():
                self._flights.begin_term(event.seats, event.keeps_rows)
        self._happened(event)
        if isinstance(event, Regrouped) and not event.keeps_rows:
            self._resubmitted(self._front_end.interrupted())

    def _reported(self, member: Member, report: Report) -> None:
        match report:
            case WindowDone():
                self._window_done(report)
            case TokensLost():
                # The requests begin their next attempt (one history).
                for request_id in report.request_ids:
                    self._front_end.tokens_lost(request_id, f"{member}: {report.reason}")
            case EnginesNow():
                self._metrics.engines.reported(report.engines)
            case TransferFailed():
                self._happened(report)
            case _:
                event = self._flights.reported(member, report)
                self._events += [] if event is None else [event]
                self._look()

    def _window_done(self, done: WindowDone) -> None:
        is_complete = self._flights.window_done(done)
        self._metrics.instances.stepped(done, is_complete)
        self._events.append(done)
        if is_complete:
            self._watch_window()
            self._due.set()


_NOTHING = Plan(None)


def _now_us() -> int:
    """The controller's monotonic clock, in microseconds (protocol.md, one clock)."""
    return time.monotonic_ns() // 1000
