"""The loop: drain events -> plan_window -> push plans -> collect. It decides nothing.

It runs once per window while two are in flight, else at once.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from control_plane.coordinator.coordinator import Coordinator
from control_plane.coordinator.flights.expert_changes import ExpertsNow
from control_plane.coordinator.flights.flights import Flights
from control_plane.coordinator.members.members import Members
from control_plane.coordinator.members.output import Facts
from control_plane.coordinator.members.seats import SeatsNow
from control_plane.observe.cluster_view import ClusterView
from control_plane.observe.kv_events import open_page_events
from control_plane.observe.metrics.recovery import RecoveryMetrics
from control_plane.observe.metrics.registry import Metrics
from control_plane.ports.controller_interface import (
    ControllerEvents,
    ControllerInterface,
    Submission,
)
from control_plane.ports.member_streams import serve_members
from control_plane.ports.members_port import MemberSecrets
from control_plane.shell.event_log import open_event_log
from control_plane.shell.members_shell import MembersShell, Processes, wait_for
from nanocp.config.whole import Config
from nanocp.values.members import Member
from nanocp.values.passes import LayoutWanted
from nanocp.values.plan import AbortRequested, Ended, FinishReason, Plan
from nanocp.values.remote_blocks import RemoteBlocks

logger = logging.getLogger(__name__)

T = TypeVar("T")

_STREAMS_GRACE_S = 1.0
"""Longest wait for the members' streams to take their last message."""
_ANSWER_S = 10.0
"""Longest wait for the controller's thread to answer."""
_MOVES_NS = 500_000
"""Time for planning where experts go, between two windows, but for one step of less than 1 ms."""
_NUMBER = re.compile("[0-9]{1,18}")
_THREAD_TIMEOUT_S = 10.0
"""Longest wait for the controller's thread to end."""


def members_of(
    config: Config, metrics: RecoveryMetrics, num_experts: int | None, facts: Facts
) -> Members:
    """The members of a cluster that is configured so; num_experts: see members.seats."""
    known = config.prompt_members, config.recovers, config.leave_timeout_ms
    return Members(config.cluster, config.limits, facts, metrics, num_experts, *known)


class Controller(ControllerInterface):
    """The loop around one scheduler, in its own thread.

    Public methods may be called from any thread.
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

        processes: replaces lost members. make_flights, num_experts: see Coordinator. Raises
        ValueError (policy, endpoint of events) or OSError (event log).
        """
        self._config = config
        self._processes = processes
        self._member_secrets = member_secrets
        self._metrics = metrics
        self._view = view
        limits = config.limits
        make_members = partial(members_of, config, metrics.recovery, num_experts)
        self._coordinator = coordinator = Coordinator(
            limits, front_end, metrics, make_members, make_flights, processes.obstacle_to_more
        )
        self.members = coordinator.members
        self._shell = MembersShell(
            coordinator.members,
            processes,
            coordinator.take_up,
            coordinator.reported,
            coordinator.deadlines,
        )
        self._flights = coordinator.flights
        self._scheduler = coordinator.scheduler
        stages = self._flights.stages
        wall_us = time.time_ns() // 1000 - _now_us()
        pipeline = None if stages is None else stages.pipeline
        self._event_log = open_event_log(
            config.service, config.cluster, config.scheduler, wall_us, pipeline
        )
        if event_log := self._event_log:
            metrics.recovery.num_unlogged = lambda: event_log.num_missing
        coordinator.page_events = open_page_events(config.service)
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

        `progress` is called for each ready member, `loading` for each percent of weights.
        """
        self.members.start.progress = progress
        self._shell.loaded = loading
        self._thread.start()
        return self._bound.result()

    def member_exited(self, member: Member, number: int, message: str) -> None:
        """Record the end of a member's process, expected or not."""
        self._call(self._shell.within, self.members.exited, member, number, message)

    def regroup(self) -> None:
        """Begin another term though no instance is lost, for tests and benchmarks."""
        self._call(self._shell.within, self.members.terms.end)

    def want_seats(self, seats: Sequence[int] | None, by: str) -> Future[SeatsNow]:
        """Change the seats; the result is done with the seats once they serve.

        seats: None changes nothing. It fails as Members.want, or with a TimeoutError after
        `longest_change_s`.
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
        """Undo the change of seats under way; the result fails with a ValueError if none is."""

        async def undo() -> SeatsNow:
            self._shell.within(self.members.changes.undo)
            return self.members.seats_now

        return asyncio.run_coroutine_threadsafe(undo(), self._loop)

    def end_requests(self, name: str) -> Future[list[int]]:
        """Abort the open requests of a name (Arrival.names); the result has their numbers."""
        answer: Future[list[int]] = Future()

        def end() -> None:
            state, queue = self._scheduler.requests.decided
            numbers = {*self._view.numbers_of(name), int(name) if _NUMBER.fullmatch(name) else 0}
            found = sorted(each for each in numbers if each in state.requests or each in queue)
            for number in found:
                self._coordinator.happened(AbortRequested(number))
            answer.set_result(found)

        self._call(end)
        return answer

    def want_layout(self, split: Sequence[int]) -> Future[None]:
        """Let layers of a pipeline move; done when they have. See StageLayouts.want_layout."""

        async def want() -> None:
            if (stages := self._flights.stages) is None:
                raise ValueError("this cluster has no stages: cluster.layout is not pipeline")
            wanted = stages.want_layout(tuple(split))
            self._coordinator.happened(LayoutWanted(tuple(split)))
            limit_s = self._config.limits.longest_change_s
            await wait_for(wanted, limit_s, "the layers go on moving")

        return asyncio.run_coroutine_threadsafe(want(), self._loop)

    def stages(self) -> list[dict[str, Any]]:
        """Return each pipeline stage's layers and state; empty without stages."""
        return self._answer(self._stages_now)

    def experts(self) -> ExpertsNow | None:
        """Return the experts, with their loads; None without an expert table."""
        experts = self._flights.experts
        return None if experts is None else self._answer(experts.now)

    def _answer(self, read: Callable[[], T]) -> T:
        answer: Future[T] = Future()
        self._call(lambda: answer.set_result(read()))
        return answer.result(_ANSWER_S)

    def _stages_now(self) -> list[dict[str, Any]]:
        stages = self._flights.stages
        return [] if stages is None else stages.now()

    def leave(self, reason: str) -> None:
        """Plan no more and ask every member to leave. Idempotent."""
        if self._thread.is_alive():
            self._call(self._leave, reason)

    def stop(self) -> None:
        """Close the port and end the thread, once all have left. Idempotent."""
        if self._thread.is_alive():
            self._call(self._left.set)
            self._thread.join(_THREAD_TIMEOUT_S)
        if self._event_log is not None:
            self._event_log.close()
        if (page_events := self._coordinator.page_events) is not None:
            page_events.close()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._due = asyncio.Event()
        self._coordinator.wake = self._due.set
        self._left = asyncio.Event()
        service, silent_s = self._config.service, self._config.limits.suspect_ms / 1000
        try:
            server, address = await serve_members(
                self._shell, service, silent_s, self._member_secrets, self._processes.kill
            )
        except OSError as error:
            self._bound.set_exception(error)
            return
        self._bound.set_result(address)
        self._planner = asyncio.create_task(self._plan_for_ever())
        publisher = asyncio.create_task(
            self._view.publish_for_ever(self._scheduler, self._stages_now)
        )
        self._shell.within(self.members.begin)
        await self._left.wait()
        self._planner.cancel()
        await server.stop(_STREAMS_GRACE_S)
        publisher.cancel()

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            logger.debug("the controller has stopped; a call was dropped")

    def _leave(self, reason: str) -> None:
        if self.members.end.leaving is not None:
            return
        self._planner.cancel()
        self._coordinator.deadlines.met("window")
        self._shell.within(self.members.leave, reason)

    # --- controller_interface.ControllerInterface ---

    def submit(self, submission: Submission) -> None:
        limit = self._config.scheduler.max_queued_requests
        with self._lock:
            is_full = self._num_queued >= limit and not submission.arrival.resumes
            self._num_queued += not is_full
        if is_full:
            message = f"max_queued_requests ({limit}) requests wait for the controller itself"
            self._coordinator.report_end(
                Ended(submission.request_id, FinishReason.REFUSED, message)
            )
        else:
            self._call(self._take, submission)

    def resubmitted(self) -> None:
        self._call(self._coordinator.owe, -1)

    def abort(self, request_id: int) -> None:
        self._call(self._coordinator.happened, AbortRequested(request_id))

    def refuse_blocks(self, blocks: RemoteBlocks) -> None:
        self._call(self._shell.within, self._coordinator.held.refuse, blocks)

    def _take(self, submission: Submission) -> None:
        with self._lock:
            self._num_queued -= 1
        self._coordinator.submitted(submission, _now_us())
        if submission.remote is not None:
            # The puller keeps the blocks from now on, also while the request waits.
            self._shell.settle()

    # --- the loop ---

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
                self.members.end.fail(f"the controller failed: {type(error).__name__}: {error}")
                return

    def _plan(self) -> None:
        events = self._coordinator.take_events()
        began_ns = time.monotonic_ns()
        plan: Plan | None = None
        try:
            plan = self._flights.plan(events, began_ns // 1000)
            num_new = sum(transfer.source is None for transfer in plan.transfers)
            transfers = self._coordinator.transfers
            self._metrics.scheduling.planned(
                (time.monotonic_ns() - began_ns) / 1e9,
                self._scheduler,
                plan.window is not None,
                num_new if transfers is None else transfers.num_prefilling + num_new,
            )
            self._view.planned(began_ns // 1000, events, plan, self._scheduler.noted)
            self._coordinator.carry_out(plan, began_ns // 1000)
            self._shell.settle()
            if (experts := self._flights.experts) is not None:
                # The window is on its way.
                until_ns = time.monotonic_ns() + _MOVES_NS
                experts.advance(lambda: time.monotonic_ns() < until_ns)
                self._shell.settle()
        finally:
            # The plan is on its way: nothing waits for the log. A call in which the scheduler fails
            # is written too.
            if self._event_log is not None:
                self._event_log.write(began_ns // 1000, events, plan)
        if plan != _NOTHING and not self._flights.is_full:
            self._due.set()


_NOTHING = Plan(None)


def _now_us() -> int:
    """The clock is monotonic and in microseconds (protocol.md, one clock)."""
    return time.monotonic_ns() // 1000
