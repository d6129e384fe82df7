"""Discrete-event simulation of a pipeline under the service's own scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from control_plane.scheduler.pipeline.layer_policies import make_layer_policy
from control_plane.scheduler.pipeline.pass_rows import PassRows
from control_plane.scheduler.pipeline.pipeline_scheduler import PipelineEvent, PipelineScheduler
from control_plane.scheduler.pipeline.predictor import predict_pass
from nanocp.config.choices import require
from nanocp.config.cluster import BoundsConfig, ClusterConfig
from nanocp.config.passes import PassCosts
from nanocp.config.pipeline import PipelineConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.simulator.loads.workload_request import WorkloadRequest
from nanocp.simulator.outcome import Slo
from nanocp.simulator.pipeline.fit import MeasuredPass, draw_mixes, fit_costs
from nanocp.simulator.pipeline.outcome import PipelineOutcome, PipelineRecorder
from nanocp.simulator.pipeline.pipeline_file import PipelineFile
from nanocp.simulator.pipeline.stages import EventHeap, Stages, TimedPass
from nanocp.values.passes import (
    LayerMoves,
    LayersMoved,
    PassDone,
    PassPlan,
    PipelinePlan,
    Span,
    StageWorked,
    even_split,
)
from nanocp.values.plan import PAGE_SIZE, Arrival, Finished, FinishReason, Preempted

FLUID = "fluid"
"""The bound: every stage has an equal share of all layers and of sampling."""
SPREAD = ("spread_sampling", "spread_sampling:passes", "spread_sampling:vocabulary")
"""Static layouts with lm_head on every stage: sampling is split by rows, by passes, or by
vocabulary."""
_NUM_MIXES = 300
MakeRows = Callable[[int, int, Callable[[], float]], PassRows]
"""Makes rows of (stages, most tokens of a pass, share of free frames)."""


@dataclass(frozen=True, slots=True)
class PipelineTrial:
    """The simulated pipeline, its load and its SLO."""

    file: PipelineFile
    policy: str = "level"
    """A layer policy, one of SPREAD, or fluid."""
    constants: str = "fitted"
    make_rows: MakeRows | None = None
    """Another way of forming passes; None: the service's."""
    predictor: str = "ours"
    """Form of the predictor: a name of fit.FORMS."""
    layout_window: int = 25
    copy_ahead: bool = True
    max_pass_tokens: int = 2048
    slow_stages: tuple[tuple[int, float], ...] = ()
    """(stage, slowdown factor)."""
    moves_are_free: bool = False
    """Policy level takes moving for free."""
    warm_up_us: int = 0
    slo: Slo = field(default_factory=Slo)

    def play(self, requests: Iterator[WorkloadRequest]) -> PipelineOutcome:
        """Simulate all these requests to their ends; raises as PipelineSimulation does."""
        return PipelineSimulation(self).run(requests)

    def predicted_costs(self) -> PassCosts:
        """Constants of the predictor, fitted to the file's times of random passes."""
        costs = self.file.costs_of(self.constants)
        measured = []
        for spans in draw_mixes(_NUM_MIXES):
            sample_us = costs.sample_us(sum(span.samples for span in spans))
            measured.append(MeasuredPass(spans, self.file.layer_us(costs, spans), sample_us))
        return fit_costs(self.predictor, measured)

    def pipeline(self) -> PipelineConfig:
        """The configuration of the pipeline's scheduler."""
        file, costs = self.file, self.file.costs_of(self.constants)
        num_layers = file.model.num_layers
        layers_move = self.policy.partition(":")[0] in ("delta", "level", "chaos_layers")
        is_layout = self.policy != FLUID and self.policy not in SPREAD
        frame_bytes = PAGE_SIZE * file.model.kv_bytes
        config = PipelineConfig(
            num_stages=file.num_stages,
            num_layers=num_layers,
            max_layers=file.max_layers if layers_move else 0,
            max_pass_tokens=self.max_pass_tokens,
            layer_policy=self.policy if is_layout else "even",
            layout_window=self.layout_window,
            copy_ahead=self.copy_ahead,
            frame_move_us=0.0 if self.moves_are_free else 1e-3 * frame_bytes / costs.link_gb_per_s,
            costs=self.predicted_costs(),
        )
        make_layer_policy(config)
        return config

    def num_frames(self, pipeline: PipelineConfig) -> int:
        """Frames of every stage. Raises ValueError if the model does not fit."""
        places = pipeline.first_split
        if pipeline.max_layers:
            places = (pipeline.max_layers,) * pipeline.num_stages
        return self.file.num_frames(places, replicates_head=self.policy in SPREAD)


@dataclass(slots=True)
class _Asked:
    request: WorkloadRequest
    num_tokens: int = 0
    first_us: float = 0.0


class PipelineSimulation:
    """One run."""

    def __init__(self, trial: PipelineTrial) -> None:
        """Raises ValueError for unknown names and for a model that does not fit."""
        for stage, slowness in trial.slow_stages:
            require(
                0 <= stage < trial.file.num_stages and slowness > 0,
                f"slow_stages has {stage}:{slowness:g}; it must be a stage from 0 to "
                f"{trial.file.num_stages - 1} and a number above 0",
            )
        self._file, self._costs = trial.file, trial.file.costs_of(trial.constants)
        self._policy = trial.policy
        self.pipeline = trial.pipeline()
        self._num_frames = trial.num_frames(self.pipeline)
        self.scheduler = self._make_scheduler(trial.make_rows)
        self._heap = EventHeap()
        self._stages = Stages(
            self._heap,
            self.pipeline.first_split,
            self._move_us,
            self._pass_done,
            self._layers_moved,
            lambda *worked: self._events.append(StageWorked(*worked)),
            slowness=dict(trial.slow_stages),
            is_fluid=trial.policy == FLUID,
        )
        self._recorder = PipelineRecorder(trial.warm_up_us, trial.slo)
        self._asked: dict[int, _Asked] = {}
        self._events: list[PipelineEvent] = []
        self._in_flight: dict[int, tuple[Span, ...]] = {}
        self._num_requests = 0

    def run(self, requests: Iterator[WorkloadRequest]) -> PipelineOutcome:
        """Play all requests to their ends; they are in order of arrival."""
        self._requests = requests
        self._next_arrival()
        while (call := self._heap.next()) is not None:
            self._stages.count_idle(bool(self._in_flight))
            call()
        require(not self._asked, f"{len(self._asked)} requests have not ended")
        layouts = self.scheduler.layouts
        return self._recorder.outcome(
            self._heap.now_us,
            self._stages.stages,
            layouts.places.split,
            self._num_frames,
            layouts.num_changes,
            self._stages.stall_us,
        )

    def _make_scheduler(self, make_rows: MakeRows | None) -> PipelineScheduler:
        file, pipeline, num_frames = self._file, self.pipeline, self._num_frames
        cluster = ClusterConfig(
            num_instances=1,
            instances_per_node=1,
            num_frames=num_frames,
            max_model_len=file.max_model_len,
            bounds=BoundsConfig(max_rows=file.max_rows, max_attention_rows=file.max_rows),
        )
        # The queue is measured here, so nothing is refused for its length.
        config = SchedulerConfig(
            prefix_sharing=False, max_queued_requests=1_000_000, max_queued_tokens=10**12
        )
        rows: PassRows | None = None
        if make_rows is not None:
            sizes = pipeline.num_stages, pipeline.max_pass_tokens
            rows = make_rows(*sizes, lambda: scheduler.load.frames_free / num_frames)
        scheduler = PipelineScheduler(cluster, config, pipeline, rows)
        return scheduler

    # --- requests

    def _next_arrival(self) -> None:
        request = next(self._requests, None)
        if request is not None:
            self._heap.at(max(request.arrival_us, self._heap.now_us), self._arrive, request)

    def _arrive(self, request: WorkloadRequest) -> None:
        self._num_requests += 1
        self._asked[self._num_requests] = _Asked(request)
        self._events.append(Arrival(self._num_requests, request.prompt_len, request.max_tokens))
        self._next_arrival()
        # Else the scheduler can plan nothing: it hears of the request with the next pass's end.
        if self.scheduler.num_in_flight <= self.pipeline.num_stages:
            self._plan()

    def _come_back(self, preempted: Preempted) -> None:
        asked = self._asked[preempted.request_id]
        self._recorder.num_preempted += 1
        left = asked.request.max_tokens - asked.num_tokens
        self._events.append(Arrival(preempted.request_id, preempted.num_tokens, left, resumes=True))

    def _token(self, request_id: int) -> Finished | None:
        asked = self._asked.get(request_id)
        if asked is None:  # it stopped while later passes had its row
            return None
        asked.num_tokens += 1
        self._recorder.num_tokens += 1
        if asked.num_tokens == 1:
            asked.first_us = self._heap.now_us
        request = asked.request
        if asked.num_tokens < request.output_len:
            return None
        del self._asked[request_id]
        self._recorder.finished(request, asked.first_us, self._heap.now_us)
        if request.output_len == request.max_tokens:
            return None
        return Finished(request_id, request.output_len, FinishReason.STOP)

    # --- passes

    def _plan(self) -> None:
        while True:
            events, self._events = self._events, []
            plan = self.scheduler.plan_pass(events, int(self._heap.now_us))
            self._carry_out(plan)
            if plan.pass_plan is None and not self._events:
                return

    def _carry_out(self, plan: PipelinePlan) -> None:
        if plan.layer_moves is not None:
            self._send_moves(plan.layer_moves)
        if plan.pass_plan is not None:
            self._send_pass(plan.pass_plan)
        for ended in plan.ended:
            self._recorder.refused(self._asked.pop(ended.request_id).request)
        for preempted in plan.preempted:
            self._come_back(preempted)

    def _send_pass(self, plan: PassPlan) -> None:
        spans, costs = plan.spans, self._costs
        num_sampled = sum(span.samples for span in spans)
        layer_us = self._file.layer_us(costs, spans)
        sample_us = costs.sample_us(num_sampled)
        predicted_us = predict_pass(spans, self.pipeline.costs)
        self._recorder.passed(self._heap.now_us, (layer_us, sample_us), predicted_us[:2])
        hidden_bytes = sum(span.num_tokens for span in spans) * self._file.model.hidden_bytes
        shares_us = self._shares_us(plan.number, num_sampled) if num_sampled else ()
        timed = TimedPass(
            plan.number,
            plan.after,
            layer_us,
            0.0 if shares_us else sample_us,
            shares_us,
            costs.hop_us + 1e-3 * hidden_bytes / costs.link_gb_per_s,
        )
        self._in_flight[plan.number] = spans
        self._stages.send(timed)

    def _shares_us(self, number: int, num_sampled: int) -> tuple[float, ...]:
        """Sampling time per stage if it is spread, else empty."""
        costs, num_stages = self._costs, self.pipeline.num_stages
        all_us = costs.sample_us(num_sampled)
        match self._policy:
            case "spread_sampling":
                shares = even_split(num_sampled, num_stages)
                return tuple(map(costs.sample_us, shares))
            case "spread_sampling:passes":
                return tuple(all_us * (s == number % num_stages) for s in range(num_stages))
            case "spread_sampling:vocabulary":
                return (all_us / num_stages,) * num_stages
        return ()

    def _pass_done(self, number: int) -> None:
        spans = self._in_flight.pop(number)
        ended = [self._token(span.request_id) for span in spans if span.samples]
        self._events.append(PassDone(number, tuple(one for one in ended if one is not None)))
        self._heap.at(self._heap.now_us, self._plan)

    # --- layers

    def _send_moves(self, moves: LayerMoves) -> None:
        num_frames = sum(count for move in moves.moves for _, count in move.frames)
        self._recorder.num_moved_bytes += num_frames * PAGE_SIZE * self._file.model.kv_bytes
        if moves.split is not None:
            self._recorder.num_moved_layers += len(moves.moves)
        self._stages.send(moves)

    def _move_us(self, num_frames: int) -> float:
        frame_bytes = PAGE_SIZE * self._file.model.kv_bytes
        return self._costs.hop_us + 1e-3 * num_frames * frame_bytes / self._costs.link_gb_per_s

    def _layers_moved(self, stage: int, number: int) -> None:
        self._events.append(LayersMoved(stage, number))
        self._heap.at(self._heap.now_us, self._plan)
