"""The scheduler of a pipeline as a controller calls it: one instance, whose windows are passes.

Equal events at equal times give equal plans, for the event log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from control_plane.scheduler.pipeline.pipeline_scheduler import PipelineEvent, PipelineScheduler
from nanocp.config.cluster import ClusterConfig
from nanocp.config.pipeline import PipelineConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.values.passes import (
    LayersMoved,
    LayoutWanted,
    PassDone,
    PassesPlan,
    ServiceEvent,
    StageWorked,
)
from nanocp.values.plan import (
    AbortRequested,
    Arrival,
    ClusterLost,
    InstanceLost,
    Placement,
    Plan,
    Regrouped,
    Resubmitted,
    TermEnded,
    WindowDone,
)


class PassPlanner:
    """A PipelineScheduler with the events and answers of every scheduler."""

    def __init__(
        self, cluster: ClusterConfig, scheduler: SchedulerConfig, pipeline: PipelineConfig
    ) -> None:
        """cluster: its instances are the stages. Raises ValueError for an unknown layer policy."""
        self._last = pipeline.num_stages - 1
        self.scheduler = PipelineScheduler(replace(cluster, num_instances=1), scheduler, pipeline)

    @property
    def noted(self) -> Mapping[int, str]:
        """The reasons why requests were not placed in the latest call."""
        return self.scheduler.noted

    def plan_window(self, events: Sequence[ServiceEvent], now_us: int) -> Plan:
        """Take events in order and decide; a PassesPlan, if there is anything to do."""
        taken = [taken for event in events for taken in self._events_of(event)]
        planned = self.scheduler.plan_pass(taken, now_us)
        pass_plan = planned.pass_plan
        plan = PassesPlan(
            None if pass_plan is None else pass_plan.number,
            () if pass_plan is None else (pass_plan.table,),
            ended=planned.ended,
            preempted=planned.preempted,
            pass_plan=pass_plan,
            layer_moves=planned.layer_moves,
        )
        if pass_plan is not None:
            holders = ((0, self._last),)
            placements = tuple(
                Placement(start.request_id, self._last, start.position + 1, holders)
                for start in pass_plan.table.starts
            )
            return replace(plan, placements=placements)
        return Plan(None) if plan == PassesPlan(None) else plan

    def _events_of(self, event: ServiceEvent) -> list[PipelineEvent]:
        match event:
            case WindowDone(stage, window, finished):
                worked = StageWorked(stage, window, float(event.step_us - event.exchange_us))
                # The last one runs a pass last.
                return [worked, PassDone(window, finished)] if stage == self._last else [worked]
            case (
                Arrival()
                | AbortRequested()
                | LayersMoved()
                | LayoutWanted()
                | InstanceLost()
                | TermEnded()
                | Regrouped()
                | Resubmitted()
                | ClusterLost()
            ):
                return [event]
        return []  # of a prefill's tickets, and of seats: all must be taken
