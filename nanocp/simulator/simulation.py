"""Discrete-event simulation: the service's own scheduler with a cost model in place of the cluster.

As in the service, at most two windows are in flight. Times are integer microseconds.
"""

from __future__ import annotations

import heapq
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from control_plane.scheduler.explanation import Explainer
from control_plane.scheduler.scheduler import Scheduler
from control_plane.scheduler.windows.row_windows import MAX_WINDOWS_IN_FLIGHT
from control_plane.shell.event_log import EventLog
from nanocp.config.cluster import BoundsConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.overlap.schedule import Schedule
from nanocp.simulator.costs.cluster_file import ClusterFile
from nanocp.simulator.costs.cost import CostModel, Loads, StepTime, profile_cp_degrees
from nanocp.simulator.costs.nano_batches import ScheduledSteps
from nanocp.simulator.decided import DecidedLoads
from nanocp.simulator.drafted_rows import Speculation, come
from nanocp.simulator.loads.workload_request import Upcoming, WorkloadRequest
from nanocp.simulator.nics import Nics
from nanocp.simulator.outcome import Outcome, Recorder, Run
from nanocp.values.plan import (
    PAGE_SIZE,
    Arrival,
    Event,
    Finished,
    FinishReason,
    InstancePlan,
    Plan,
    Transfer,
    TransferDone,
    WindowDone,
)

FLUID = "fluid"
"""The bound: loads spread evenly, exchange free, one pool of frames. It is no service policy."""
_NOTHING = Plan(None)


@dataclass(slots=True)
class _Window:
    number: int
    ends_us: int
    step: StepTime
    rows: dict[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mechanisms:
    """Features of a simulated cluster besides its policy; the fluid bound has the first three."""

    steps_per_window: int = 1
    prefix_sharing: bool = True
    wire_form: str = ""
    """Wire form between instances; empty: the cheaper one."""
    lanes: bool = False
    """Whether windows run in two lanes where the cost model says that they pay."""
    schedule: Schedule | None = None
    """Schedule of the layers' operations, used where it pays; None: program order."""
    host_pages: int = 0
    """Full pages of prompts that each instance keeps outside its frames."""
    speculation: Speculation | None = None
    """Drafts of rows; None: none."""


def make_simulation(
    file: ClusterFile,
    constants: str,
    policy: str,
    run: Run,
    mechanisms: Mechanisms = Mechanisms(),
    recorder: Recorder | None = None,
    event_log: Path | None = None,
    explainer: Explainer | None = None,
) -> Simulation:
    """Make a simulation of a policy, or of the fluid bound.

    recorder: replaces the default. event_log: takes every call of the scheduler. explainer: takes
    notes of some requests. Raises ValueError for an unknown policy or constants, OSError for an
    unwritable event log.
    """
    is_fluid = policy == FLUID
    num_shares = file.cluster.num_instances if is_fluid else 1
    model = CostModel(file, constants, num_shares, mechanisms.wire_form)
    scheduler = replace(
        scheduler_config(file, model, "dual_balanced" if is_fluid else policy),
        steps_per_window=mechanisms.steps_per_window,
        prefix_sharing=mechanisms.prefix_sharing,
    )
    if file.model.num_linear_layers and any(
        (mechanisms.lanes, mechanisms.schedule, mechanisms.speculation, mechanisms.host_pages)
    ):
        raise ValueError(
            f"{file.model.num_linear_layers} layers are linear attention; lanes, schedules, drafts "
            "and offloaded pages are simulated only for models without them"
        )
    if mechanisms.lanes and not is_fluid:
        table = model.lane_table(file.cluster)
        scheduler = replace(scheduler, lanes="measured", lane_table=table)
    if mechanisms.speculation is not None and not is_fluid:
        file, scheduler = _with_drafts(file, scheduler, model, mechanisms.speculation)
    if mechanisms.host_pages and not is_fluid:
        scheduler = replace(scheduler, offload_host_pages=mechanisms.host_pages)
    time_of: Callable[[Loads], StepTime] = model.step
    if mechanisms.schedule is not None and not is_fluid:
        time_of = ScheduledSteps(model, file, mechanisms.schedule).step
    notes = recorder or Recorder(run)
    speculation = None if is_fluid else mechanisms.speculation
    return Simulation(
        _as_one_instance(file) if is_fluid else file,
        scheduler,
        model,
        notes,
        event_log,
        explainer,
        time_of,
        speculation,
    )


def _with_drafts(
    file: ClusterFile, config: SchedulerConfig, model: CostModel, speculation: Speculation
) -> tuple[ClusterFile, SchedulerConfig]:
    num, layers = len(speculation.shares), file.model.num_layers
    num_frames = file.cluster.num_frames * layers // (layers + 1)
    file = replace(file, cluster=replace(file.cluster, num_frames=num_frames))
    return file, replace(
        config,
        num_drafts=num,
        drafting="measured" if speculation.is_measured else "always",
        draft_table=model.draft_table(file.cluster, num),
        costs=model.in_tokens(num),
        cp_degree_buckets=profile_cp_degrees(
            model, file.cp_degrees, file.cluster.max_model_len, num
        ),
    )


def scheduler_config(file: ClusterFile, model: CostModel, policy: str) -> SchedulerConfig:
    """The scheduler's configuration on a simulated cluster; raises ValueError if invalid."""
    return SchedulerConfig(
        policy=policy,
        cp_degree_buckets=profile_cp_degrees(model, file.cp_degrees, file.cluster.max_model_len),
        cp_degree_max=max(file.cp_degrees),
        costs=model.in_tokens(),
        ttft_targets=file.ttft_targets if policy == "cost_aware" else (),
        tpot_target_ms=file.tpot_target_ms,
        # The queue is measured here, so nothing is refused for its length.
        max_queued_requests=1_000_000,
        max_queued_tokens=10**12,
    )


class Simulation:
    """One run."""

    def __init__(
        self,
        file: ClusterFile,
        config: SchedulerConfig,
        model: CostModel,
        recorder: Recorder,
        event_log: Path | None = None,
        explainer: Explainer | None = None,
        time_of: Callable[[Loads], StepTime] | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        """time_of: duration of a one-lane step; by default the cost model's."""
        self._speculation = speculation
        self._file = file
        self.model = model
        self._time_of = time_of or model.step
        self._num_steps = config.steps_per_window
        self.scheduler = Scheduler(file.cluster, config, explainer)
        plan_window = self.scheduler.plan_window
        self._plan_window = explainer.around(plan_window) if explainer else plan_window
        self._event_log = EventLog(event_log, file.cluster, config) if event_log else None
        self._decided = DecidedLoads(file.cluster)
        self._recorder = recorder
        self._heap: list[tuple[int, int, Event | None]] = []
        """(time, order of insertion, event); None is the end of the oldest window."""
        self._num_pushed = 0
        self._windows: deque[_Window] = deque()
        self._requests: dict[int, WorkloadRequest] = {}
        self._num_tokens: dict[int, int] = {}
        """Tokens generated before the row's present stay in the windows."""
        self._joined_step: dict[int, int] = {}
        self._last_window: dict[int, list[int]] = {}
        """Window -> requests that get their last token in it, unless their row leaves before."""
        self._nics = Nics(file)

    def run(
        self, requests: Iterator[Upcoming], on_progress: Callable[[int], None] | None = None
    ) -> Outcome:
        """Play until the run ends, or no event is left; on_progress gets the simulated us."""
        recorder = self._recorder
        upcoming = next(requests, None)
        events: list[Event] = []
        while True:
            times_us = [self._nics.next_us, upcoming.arrival_us if upcoming else None]
            times_us.append(self._heap[0][0] if self._heap else None)
            now_us = min((at_us for at_us in times_us if at_us is not None), default=None)
            if now_us is None:
                break
            if now_us >= recorder.run.end_us or recorder.is_hopeless:
                break
            recorder.at(now_us)
            while upcoming is not None and upcoming.arrival_us == now_us:
                if isinstance(upcoming, WorkloadRequest):
                    events.append(self._arrive(upcoming))
                upcoming = next(requests, None)
            if self._nics.next_us == now_us:
                events += [TransferDone(*share) for share in self._nics.arrived(now_us)]
            is_window_over = False
            while self._heap and self._heap[0][0] == now_us:
                _, _, event = heapq.heappop(self._heap)
                if event is not None:
                    events.append(event)
                else:
                    is_window_over = True
                    events += self._end_window()
            if is_window_over or len(self._windows) < MAX_WINDOWS_IN_FLIGHT:
                self._plan(events, now_us)
                events = []
            if is_window_over and on_progress is not None:
                on_progress(now_us)
        if self._event_log is not None:
            self._event_log.close()
        sharing, offload = self.scheduler.prefix_sharing, self.scheduler.offload
        return replace(
            recorder.outcome(),
            prefix_hit_rate=sharing.hit_rate,
            host_hit_rate=offload.num_hit_tokens / max(sharing.num_queried_tokens, 1),
        )

    def _arrive(self, request: WorkloadRequest) -> Arrival:
        request_id = self._recorder.arrived(request)
        self._requests[request_id] = request
        return request.arrival(request_id)

    # --- the controller's part

    def _plan(self, events: list[Event], now_us: int) -> None:
        while True:
            began_ns = time.thread_time_ns()
            plan = self._plan_window(events, now_us)
            self._recorder.planned(time.thread_time_ns() - began_ns, plan)
            if self._event_log is not None:
                self._event_log.write(now_us, events, plan)
            self._carry_out(plan, now_us)
            events = []
            if plan == _NOTHING or len(self._windows) >= MAX_WINDOWS_IN_FLIGHT:
                return

    def _carry_out(self, plan: Plan, now_us: int) -> None:
        for transfer in plan.transfers:
            self._start_transfer(transfer, now_us)
        for stow in plan.stows:
            # A copy into memory is taken to be as fast as what comes in; what is fetched arrives
            # as a prompt does.
            num_bytes = len(stow.pages) * PAGE_SIZE * self._file.model.kv_bytes_per_token
            copied_us = now_us + ceil(num_bytes / (1e3 * self._file.ingest_gb_per_s))
            self._push(copied_us, TransferDone(stow.ticket, stow.instance))
        for ended in plan.ended:
            self._recorder.refused(ended.request_id)
            del self._requests[ended.request_id]
            self._num_tokens.pop(ended.request_id, None)
            self._decided.request_ended(ended.request_id)
        for request_id, num_tokens in plan.preempted:
            self._decided.request_ended(request_id)
            request = self._requests[request_id]
            num_left = request.prompt_len + request.max_tokens - num_tokens
            again = replace(request.arrival(request_id), prompt_len=num_tokens, max_tokens=num_left)
            self._push(now_us, replace(again, needs_prefill=True, resumes=True))
        if plan.window is not None:
            self._send_window(plan.window, plan.instances, now_us)

    def _start_transfer(self, transfer: Transfer, now_us: int) -> None:
        # Pages that move are all there; of a prompt's, prefill may have sent some before.
        is_from_prefill = transfer.source is None
        share = self._file.ingest_tail_share if is_from_prefill else 1.0
        num_bytes = share * self._file.model.kv_bytes_per_token
        for instance, tokens in sorted(self._decided.transfer_started(transfer).items()):
            self._nics.start(transfer.ticket, instance, tokens * num_bytes, is_from_prefill, now_us)

    def _send_window(self, window: int, plans: tuple[InstancePlan, ...], now_us: int) -> None:
        joined, left = self._decided.window_sent(plans)
        for request_id in left:
            self._row_leaves(request_id, window)
        instance_loads = self.scheduler.requests.loads()
        loads = self._decided.loads(instance_loads)
        time_of = self.model.step_in_two_lanes if plans[0].two_lanes else self._time_of
        num_drafts = plans[0].num_drafts
        step = self.model.step_with_drafts(loads, num_drafts) if num_drafts else time_of(loads)
        begins_us = self._windows[-1].ends_us if self._windows else now_us
        for request_id in joined:
            if not self._num_tokens.get(request_id):
                self._recorder.first_token(request_id, begins_us + step.step_us)
            self._row_joins(request_id, window)
        ends_us = begins_us + step.step_us * self._num_steps
        rows = dict(self._decided.instance_of) if self._speculation else {}
        self._windows.append(_Window(window, ends_us, step, rows))
        self._push(self._windows[-1].ends_us, None)
        self._recorder.window(
            begins_us,
            step,
            self._num_steps,
            loads,
            instance_loads,
            self.scheduler.requests.num_waiting,
        )

    def _row_joins(self, request_id: int, window: int) -> None:
        if self._speculation:
            self._num_tokens.setdefault(request_id, 0)
            return
        self._joined_step[request_id] = window * self._num_steps
        self._num_tokens.setdefault(request_id, 0)
        self._last_window.setdefault(self._last_step(request_id) // self._num_steps, []).append(
            request_id
        )

    def _row_leaves(self, request_id: int, window: int) -> None:
        if self._speculation:
            return
        if request_id in self._requests and self._last_step(request_id) >= window * self._num_steps:
            self._num_tokens[request_id] += window * self._num_steps - self._joined_step.pop(
                request_id
            )

    def _last_step(self, request_id: int) -> int:
        num_left = self._requests[request_id].output_len - self._num_tokens[request_id]
        return self._joined_step[request_id] + num_left - 1

    # --- the instances' part

    def _end_window(self) -> list[Event]:
        window = self._windows.popleft()
        if self._speculation:
            return self._end_window_with_drafts(window, self._speculation.shares)
        finished: dict[int, list[Finished]] = {}
        for request_id in self._last_window.pop(window.number, ()):
            # A row that was parked since is listed under a later window too, or will be.
            if (
                request_id not in self._joined_step
                or self._last_step(request_id) // self._num_steps != window.number
            ):
                continue
            num_unused = (window.number + 1) * self._num_steps - 1 - self._last_step(request_id)
            self._recorder.finished(request_id, window.ends_us - num_unused * window.step.step_us)
            stopped = Finished(request_id, self._requests[request_id].output_len, FinishReason.STOP)
            # The scheduler has let a row go already that got all of max_tokens, and does not ask
            # which instance reports its length.
            finished.setdefault(self._decided.instance_of.get(request_id, 0), []).append(stopped)
            for table in (self._requests, self._joined_step, self._num_tokens):
                del table[request_id]
        return [
            WindowDone(instance, window.number, tuple(finished[instance]))
            if instance in finished
            else WindowDone(instance, window.number)
            for instance in range(self._file.cluster.num_instances)
        ]

    def _end_window_with_drafts(self, window: _Window, shares: Sequence[float]) -> list[Event]:
        num_steps, num_drafts = self._num_steps, window.step.num_drafts
        finished: dict[int, list[Finished]] = defaultdict(list)
        advanced: dict[int, list[int]] = defaultdict(list)
        counts = [[0, 0] for _ in range(num_drafts)]
        for request_id, instance in window.rows.items():
            if request_id not in self._num_tokens:
                continue  # it stopped in the window before
            request, num_done = self._requests[request_id], self._num_tokens[request_id]
            first_step, num_left = window.number * num_steps, request.output_len - num_done
            came = come(shares[:num_drafts], request_id, first_step, num_steps, num_left, counts)
            self._num_tokens[request_id] += came.num_tokens
            if came.last_step is None:
                advanced[instance] += [request_id] * (came.num_tokens - num_steps)
                continue
            unused_us = (num_steps - 1 - came.last_step) * window.step.step_us
            self._recorder.finished(request_id, window.ends_us - unused_us)
            finished[instance].append(Finished(request_id, request.output_len, FinishReason.STOP))
            del self._requests[request_id], self._num_tokens[request_id]
        reported = tuple((checked, accepted) for checked, accepted in counts)
        return [
            WindowDone(
                instance,
                window.number,
                tuple(finished.get(instance, ())),
                advanced=tuple(advanced.get(instance, ())),
                drafts=() if instance else reported,
            )
            for instance in range(self._file.cluster.num_instances)
        ]

    def _push(self, at_us: int, event: Event | None) -> None:
        self._num_pushed += 1
        heapq.heappush(self._heap, (at_us, self._num_pushed, event))


def _as_one_instance(file: ClusterFile) -> ClusterFile:
    num = file.cluster.num_instances
    bounds = file.cluster.bounds
    cluster = replace(
        file.cluster,
        num_instances=1,
        num_frames=num * file.cluster.num_frames,
        bounds=replace(
            bounds,
            max_rows=num * bounds.max_rows,
            max_attention_rows=num * bounds.max_attention_rows,
        ),
    )
    assert isinstance(cluster.bounds, BoundsConfig)
    buckets = (*file.row_buckets[:-1], max(file.row_buckets[-1], cluster.bounds.max_rows))
    return replace(
        file,
        cluster=cluster,
        ingest_gb_per_s=num * file.ingest_gb_per_s,
        cp_degrees=(1,),
        row_buckets=buckets,
        memory=None,
    )
