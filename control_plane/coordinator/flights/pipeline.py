"""Passes of a pipeline, and layers that move; the controller sees one instance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from control_plane.coordinator.flights.flights import Flights
from control_plane.coordinator.flights.stages import StageLayouts
from control_plane.coordinator.members.members import Members
from control_plane.observe.metrics.stages import StageMetrics
from control_plane.ports.controller_interface import Submission
from control_plane.scheduler.pipeline.invariants import check_pipeline
from control_plane.scheduler.pipeline.pass_planner import PassPlanner
from nanocp.config.pipeline import PipelineConfig
from nanocp.config.whole import Config
from nanocp.values.commands import StagePrompt, ToInstance
from nanocp.values.members import Member, Report
from nanocp.values.passes import LayersMoved, PassesPlan, PassPlan, ServiceEvent
from nanocp.values.plan import ClusterLost, Plan, Regrouped, WindowDone
from nanocp.values.table import InstanceTable


class PipelineFlights(Flights):
    """The passes of a pipeline; see flights.Flights for every method."""

    def __init__(
        self, config: Config, members: Members, num_layers: int, metrics: StageMetrics
    ) -> None:
        """Raises ValueError if the configuration and the model do not fit."""
        num_stages = config.cluster.num_instances
        self.pipeline = PipelineConfig.of(config.pipeline, num_stages, num_layers)
        self._last = self.pipeline.num_stages - 1
        self._planner = PassPlanner(config.cluster, config.scheduler, self.pipeline)
        self.scheduler = self._planner.scheduler
        self.stages: StageLayouts = StageLayouts(self.pipeline, self.scheduler.layouts, metrics)
        self._members, self._metrics = members, metrics
        self._table = InstanceTable(0, 1)
        """The stages' table after all passes that were sent."""
        self._next_reports = [0] * self.pipeline.num_stages
        """For each stage, the oldest pass that it has not reported."""
        self._after_rest: set[int] = set()
        """Passes that were sent when none was in flight, until every stage has reported them."""
        self._unmoved: set[tuple[int, int]] = set()
        """(stage, number of its layer moves) that it has not reported."""
        self._is_between_terms = False
        """Whether a term has ended, and the scheduler knows of no other one."""

    def __len__(self) -> int:
        return 0 if self._is_between_terms else self.scheduler.num_in_flight

    @property
    def is_full(self) -> bool:
        # One more than there are stages waits at the first one.
        return len(self) > self.pipeline.num_stages

    @property
    def oldest(self) -> int | None:
        return self._next_reports[-1] if len(self) else None

    @property
    def newest_ticket(self) -> int:
        return 0

    def missing(self) -> list[int]:
        oldest = self._next_reports[-1]
        return [stage for stage, number in enumerate(self._next_reports) if number <= oldest]

    def plan(self, events: Sequence[ServiceEvent], now_us: int) -> Plan:
        plan = self._planner.plan_window(events, now_us)
        for event in events:
            match event:
                case Regrouped():
                    self._is_between_terms = False
                case ClusterLost():
                    self.stages.answer(RuntimeError(event.message))
        self.stages.answer_operator()
        return plan

    def prepare(self, plan: Plan, submitted: Mapping[int, Submission]) -> tuple[()]:
        """Let layers move, and give the first stage the prompts.

        The last one gets those whose log probabilities it reports.
        """
        if isinstance(plan, PassesPlan) and plan.layer_moves is not None:
            stages = range(self.pipeline.num_stages)
            self._unmoved = {(stage, plan.layer_moves.number) for stage in stages}
            self._to_all(plan.layer_moves)
        for placement in plan.placements:
            submission = submitted[placement.request_id]
            prompt = StagePrompt(
                submission.request_id,
                submission.prompt_ids,
                submission.prompt_logprobs,
                submission.front_end,
            )
            is_asked = submission.prompt_logprobs is not None
            for stage in {0, self._last} if is_asked else {0}:
                self._members.send(Member("instance", stage), prompt)
        return ()

    def cached_tokens(self, plan: Plan) -> Mapping[int, int]:
        return {span.request_id: span.first for span in reversed(_pass_of(plan).spans)}

    def send(self, plan: Plan) -> None:
        pass_plan = _pass_of(plan)
        self._table.apply(pass_plan.table.changes)
        if len(self) == 1:
            oldest = min(self._next_reports)
            self._after_rest = {number for number in self._after_rest if number >= oldest}
            self._after_rest.add(pass_plan.number)
        self._to_all(pass_plan)

    def _to_all(self, message: ToInstance) -> None:
        for stage in range(self.pipeline.num_stages):
            self._members.send(Member("instance", stage), message)

    def window_done(self, done: WindowDone) -> bool:
        """Take a report; a pass is over when the last stage has run it."""
        stage = done.instance
        if done.window != self._next_reports[stage]:
            raise ValueError(f"stage {stage} reported pass {done.window}, which it was not running")
        self._next_reports[stage] += 1
        self.stages.reports[stage] = done
        self._metrics.ran(done, done.window in self._after_rest)
        return stage == self._last

    def reported(self, member: Member, report: Report) -> ServiceEvent | None:
        if not isinstance(report, LayersMoved):
            raise ValueError(f"{member} says {report}, which has no meaning here")
        moved = report.stage, report.number
        if moved not in self._unmoved:
            raise ValueError(f"stage {moved[0]} reported layers {moved[1]}, which nobody moves")
        self._unmoved.remove(moved)
        return report

    # --- terms

    def begin_term(self, seats: Sequence[int], keeps_rows: bool) -> None:
        self._table = InstanceTable(0, 1)
        self._next_reports = [0] * self.pipeline.num_stages

    def end_term(self) -> None:
        self._is_between_terms = True
        self._after_rest.clear()
        self._unmoved.clear()

    def check(self) -> None:
        check_pipeline(self.scheduler, self._table)


def _pass_of(plan: Plan) -> PassPlan:
    assert isinstance(plan, PassesPlan) and plan.pass_plan is not None
    return plan.pass_plan
