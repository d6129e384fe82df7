"""The prefill with stages: one planner of passes over prompts, and stages of some layers each.

Several stages are processes, one alone is a thread. A lost stage ends the prefill, and a new one
takes its place.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import Empty, Queue, SimpleQueue
from typing import Any, Protocol

from data_plane.member.controller_link import ControllerLink, ControllerLost
from data_plane.member.heartbeat import Heartbeat
from data_plane.member.lifetime import (
    MemberLoop,
    MemberSpec,
    ShutdownRequested,
    places_in,
    run_under_controllers,
    running,
)
from data_plane.member.term_loop import LOOK, wake
from data_plane.prefill.prefill_stage import StageEnd, serve_stage
from data_plane.prefill.stage_messages import (
    BeginPrompt,
    CancelPrompt,
    JoinTerm,
    StageEnded,
    StageGaveUp,
    StageJoined,
    StageLoaded,
    StageLoading,
    StageRan,
    StageSpec,
    StageSuspects,
)
from nanocp.values.commands import CancelPrefill, Join, PagesArrived, PrefillRequest, Shutdown
from nanocp.values.members import Beat, Loading, Ready, Said, Suspect
from nanocp.values.offload import page_hashes
from nanocp.values.passes import PassDone, PassPlan, PipelinePlan
from nanocp.values.plan import AbortRequested, Arrival, TransferFailed

logger = logging.getLogger(__name__)

MAX_QUEUED_PROMPTS = 4096
"""More are given up at once."""
_LEAVE_S = 5.0


class PassScheduler(Protocol):
    """Plans passes over prompts; a request's id is its ticket."""

    def plan_pass(
        self, events: Sequence[Arrival | AbortRequested | PassDone], now_us: int
    ) -> PipelinePlan:
        """Apply the events; return the next pass, if one is due."""


def run_staged_prefill(spec: MemberSpec) -> None:
    """Run the prefill and its stages until the controller asks for a shutdown.

    `spec.planner` names a callable(config) that makes a PassScheduler, and `spec.factory` what
    makes a prefill_stage.PagesOfStage. Raises FailureReported or ControllerLost if the prefill, or
    one of its stages, failed.
    """
    with running(spec) as (link, held):
        own = spec.config.of_prefill_stages
        scheduler: PassScheduler = spec.make_planner(own.cluster, own.scheduler, own.pipeline)
        prefill = spec.config.prefill
        limit_ms = prefill.limit_ms(prefill.chunk_tokens)

        def begin_beats() -> None:
            held.callback(Heartbeat(lambda: link.send(Beat()), spec.config.limits).close)

        loop = StagedPrefillLoop(scheduler, link, prefill.stages, limit_ms, begin_beats)
        make_stages = StageProcesses if prefill.stages > 1 else StageThread
        stages = make_stages(spec, loop.report)
        held.callback(stages.close)
        loop.stages = stages
        run_under_controllers(spec, link, loop)


class StagePipes(Protocol):
    """The way to every stage."""

    def send(self, message: Any, stage: int | None = None) -> None:
        """Queue a message for one stage, or all. Never blocks."""

    def close(self) -> None:
        """End the stages in bounded time, or kill them. Idempotent."""


class StagedPrefillLoop(MemberLoop):
    """Plans passes over the prompts for the stages, in the caller's thread."""

    stages: StagePipes

    def __init__(
        self,
        scheduler: PassScheduler,
        link: ControllerLink,
        num_stages: int,
        limit_ms: float,
        all_loaded: Callable[[], None],
    ) -> None:
        """limit_ms: longest time of the stages for a pass."""
        self._link = link
        self._all_loaded = all_loaded
        self._scheduler = scheduler
        self._num_stages = num_stages
        self._limit_ms = limit_ms
        self._reports: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        self._term = 0
        self._num_failed = 0
        """Failed passes; pages may be missing after one."""
        self._waiting: dict[int, PrefillRequest] = {}
        """Ticket -> request, before its first pass."""
        self._open: set[int] = set()
        """Neither cancelled nor complete."""
        self._events: list[Arrival | AbortRequested | PassDone] = []
        self._unloaded = set(range(num_stages))
        self._unjoined: set[int] = set()
        self._percents = [0] * num_stages
        self._next_runs = [0] * num_stages
        """Each stage's oldest pass to run."""
        self._num_planned = 0
        self._deadline_s = 0.0
        """Latest time of a stage's next pass."""

    def report(self, stage: int, message: Any) -> None:
        """Take a stage's report, from any thread."""
        self._reports.put((stage, message))
        wake(self._link)

    def run(self) -> None:
        while True:
            while not self._reports.empty():
                self._reported(*self._reports.get())
            self._plan()
            message = self._next_message()
            if message is not LOOK:
                self._take(message)

    def forget_term(self) -> None:
        for ticket in list(self._open):
            self._cancel(ticket)

    def _next_message(self) -> Any:
        is_in_flight = self._next_runs[-1] < self._num_planned
        # Unbounded on purpose if nothing is in flight: keepalive proves the controller's stream.
        left_s = max(0.0, self._deadline_s - time.monotonic()) if is_in_flight else None
        try:
            return self._link.inbox.get(timeout=left_s)
        except Empty:
            if not self._reports.empty():
                return LOOK
            stage = self._next_runs.index(min(self._next_runs))
            raise RuntimeError(
                f"stage {stage} of the prefill did not run pass {self._next_runs[stage]} in "
                f"{self._limit_ms / 1000:.0f} s"
            ) from None

    # --- messages of the controller

    def _take(self, envelope: Any) -> None:
        if envelope is None:
            raise ControllerLost("the controller's stream ended")
        match envelope.message:
            case PrefillRequest() as request:
                self._queue(request)
            case CancelPrefill(ticket):
                self._cancel(ticket)
            case PagesArrived(ticket):
                self._open.discard(ticket)
            case Join() as join:
                self.forget_term()
                self._term = envelope.term
                self._unjoined = set(range(self._num_stages))
                self.stages.send(JoinTerm(self._term, tuple(places_in(join))))
            case Shutdown(reason):
                raise ShutdownRequested(reason)
            case message:
                raise AssertionError(f"the controller sent {message} to a running prefill")

    def _queue(self, request: PrefillRequest) -> None:
        transfer = request.transfer
        if len(self._waiting) >= MAX_QUEUED_PROMPTS:
            self._give_up(transfer.ticket, f"{MAX_QUEUED_PROMPTS} prompts wait for the prefill")
            return
        self._waiting[transfer.ticket] = request
        self._open.add(transfer.ticket)
        self._events.append(self._arrival(request))

    def _arrival(self, request: PrefillRequest, attempt: int = 0) -> Arrival:
        ticket, num_tokens = request.transfer.ticket, request.transfer.num_tokens
        hashes: tuple[bytes, ...] = ()
        if request.prompt_logprobs is None:  # else every token is computed
            salt = request.salt + b"%d" % self._num_failed
            hashes = page_hashes(request.token_ids[:num_tokens], salt)
        return Arrival(ticket, num_tokens, max_tokens=1, page_hashes=hashes, attempt=attempt)

    def _cancel(self, ticket: int) -> None:
        if ticket in self._open:
            self._open.remove(ticket)
            self._events.append(AbortRequested(ticket))
            if self._waiting.pop(ticket, None) is None:
                self.stages.send(CancelPrompt(ticket))

    def _send(self, message: Said) -> None:
        self._link.send(message, self._term)

    def _give_up(self, ticket: int, message: str) -> None:
        self._send(TransferFailed(ticket, message))

    # --- passes

    def _plan(self) -> None:
        while True:
            events, self._events = self._events, []
            plan = self._scheduler.plan_pass(events, time.monotonic_ns() // 1000)
            for ended in plan.ended:
                if ended.request_id in self._open:
                    self._open.remove(ended.request_id)
                    self._waiting.pop(ended.request_id, None)
                    self._give_up(ended.request_id, f"prefill failed: {ended.message}")
            if plan.pass_plan is None:
                return
            self._send_pass(plan.pass_plan)

    def _send_pass(self, plan: PassPlan) -> None:
        if self._next_runs[-1] == self._num_planned:
            self._restart_clock()
        self._num_planned += 1
        for start in plan.table.starts:
            request = self._waiting.pop(start.request_id)
            transfer, ids = request.transfer, tuple(request.token_ids)
            begins = [BeginPrompt(transfer, ())] * self._num_stages
            begins[0] = BeginPrompt(transfer, ids)
            if len(ids) > transfer.num_tokens:  # the last stage has the KV for drafts
                begins[-1] = begins[0]
            if request.prompt_logprobs is not None:
                num_top, front_end = request.prompt_logprobs, request.front_end
                begins[-1] = BeginPrompt(transfer, ids, num_top, front_end)
            for stage, begin in enumerate(begins):
                self.stages.send(begin, stage)
        self.stages.send(plan)

    def _restart_clock(self) -> None:
        self._deadline_s = time.monotonic() + self._limit_ms / 1000

    # --- reports of stages

    def _reported(self, stage: int, message: Any) -> None:
        match message:
            case StageLoading(percent):
                self._percents[stage] = percent
                self._link.send(Loading(sum(self._percents) // self._num_stages))
            case StageLoaded():
                self._unloaded.discard(stage)
                if not self._unloaded:
                    self._all_loaded()
            case StageJoined(term) if term == self._term:
                self._unjoined.discard(stage)
                if not self._unjoined:
                    self._send(Ready((f"process {os.getpid()}",)))
            case StageRan(number, has_failed):
                if has_failed:
                    self._num_failed += 1
                    again = self._waiting.values()
                    self._events += (self._arrival(each, self._num_failed) for each in again)
                self._next_runs[stage] = number + 1
                self._restart_clock()
                if stage == self._num_stages - 1:
                    self._events.append(PassDone(number))
            case StageGaveUp(ticket, reason) if ticket in self._open:
                self._cancel(ticket)
                self._give_up(ticket, f"prefill failed: {reason}")
            case StageSuspects(term, instance, is_gone, reason) if term == self._term:
                logger.info("stage %d: %s", stage, reason)
                self._send(Suspect(instance, is_gone, reason))
            case StageEnded(reason):
                raise RuntimeError(f"stage {stage} of the prefill: {reason}")


def _spec_of(prefill: MemberSpec, stage: int) -> StageSpec:
    return StageSpec(prefill, stage, f"{prefill.cluster_id}.prefill{os.getpid()}")


class StageThread(StagePipes):
    """The only stage, in a thread of the prefill's own process."""

    def __init__(self, spec: MemberSpec, report: Callable[[int, Any], None]) -> None:
        """Start the thread. report: as of StageProcesses."""
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        end = StageEnd(self._inbox.get, partial(report, 0))
        self._thread = threading.Thread(
            target=serve_stage, args=(end, _spec_of(spec, 0)), name="prefill stage", daemon=True
        )
        self._thread.start()

    def send(self, message: Any, stage: int | None = None) -> None:
        self._inbox.put(message)

    def close(self) -> None:
        self.send(None)
        self._thread.join(_LEAVE_S)


class StageProcesses(StagePipes):
    """The processes of the stages: a pipe to each, and two threads to serve it."""

    def __init__(self, spec: MemberSpec, report: Callable[[int, Any], None]) -> None:
        """report: called with a stage and its report, from any thread."""
        self._report = report
        self._outboxes: list[Queue[Any]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        for stage in range(spec.config.prefill.stages):
            own, theirs = Pipe()
            command = [sys.executable, "-m", "data_plane.prefill.prefill_stage"]
            process = subprocess.Popen(
                [*command, str(theirs.fileno()), f"prefill stage {stage}"],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
            theirs.close()
            outbox: Queue[Any] = Queue()
            outbox.put(_spec_of(spec, stage))
            self._outboxes.append(outbox)
            self._processes.append(process)
            for work in (self._write, self._read):
                threading.Thread(target=work, args=(stage, own), daemon=True).start()

    def send(self, message: Any, stage: int | None = None) -> None:
        for outbox in self._outboxes if stage is None else [self._outboxes[stage]]:
            outbox.put(message)

    def close(self) -> None:
        self.send(None)
        deadline = time.monotonic() + _LEAVE_S
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.wait()

    def _write(self, stage: int, pipe: Connection) -> None:
        with contextlib.suppress(OSError):  # the reader says why
            while True:
                message = self._outboxes[stage].get()
                pipe.send(message)
                if message is None:
                    return

    def _read(self, stage: int, pipe: Connection) -> None:
        try:
            while True:
                self._report(stage, pipe.recv())
        except (EOFError, OSError):
            status = self._processes[stage].wait()
            self._report(stage, StageEnded(f"its process ended with status {status}"))
