"""Replays an event log with the same scheduler and compares the plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from control_plane.scheduler.explanation import Explainer, PlanWindow
from control_plane.scheduler.pipeline.pass_planner import PassPlanner
from control_plane.scheduler.scheduler import Scheduler
from control_plane.shell.event_log import Call, LogReader, digest
from nanocp.config.choices import require
from nanocp.values.passes import ServiceEvent
from nanocp.values.plan import Arrival, Plan

Watch = Callable[[int, Sequence[ServiceEvent], Plan, Mapping[int, str]], None]
"""(now_us, events, plan) of a call."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first call that is answered differently; replay stops there."""

    call: int
    """Counts from 1."""
    now_us: int
    fields: tuple[str, ...]
    recorded: dict[str, int | str] | None
    """None: the scheduler failed."""
    replayed: dict[str, int | str] | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Replayed:
    """Summary of a replay."""

    policy: str
    num_instances: int
    num_calls: int
    num_windows: int
    num_requests: int
    """Arrivals, but for those that resume."""
    span_us: int
    is_truncated: bool
    """The log's last record was cut off."""
    failure: str
    """The scheduler's failure in the last call, equal in the log and now. Empty: none."""
    difference: Difference | None


def replay(
    log: LogReader, explainer: Explainer | None = None, watch: Watch | None = None
) -> Replayed:
    """Play a log to its end or to the first difference.

    explainer: takes notes of some requests. watch: gets each call, its answer and Scheduler.noted.
    Raises ValueError for a damaged log, an unknown policy, and a pipeline's log with an explainer.
    """
    header, pipeline = log.header, log.header.pipeline
    scheduler: Scheduler | PassPlanner
    if pipeline is None:
        scheduler = Scheduler(header.cluster, header.scheduler, explainer)
    else:
        require(explainer is None, "the log is that of a pipeline, which places on no instances")
        scheduler = PassPlanner(header.cluster, header.scheduler, pipeline)
    plan_window: PlanWindow = scheduler.plan_window
    if explainer is not None:
        plan_window = explainer.around(plan_window)
    if watch is not None:
        plan_window = _watched(plan_window, scheduler, watch)
    num_calls = num_windows = num_requests = first_us = last_us = 0
    failure = ""
    difference = None
    for call in log:
        num_calls += 1
        num_requests += sum(
            isinstance(event, Arrival) and not (event.resumes or event.attempt)
            for _, event in call.events
        )
        first_us, last_us = first_us if num_calls > 1 else call.now_us, call.now_us
        answer, failure = _answer(plan_window, call)
        if answer != call.plan:
            difference = _difference(num_calls, call, answer, failure)
            break
        if answer is None:
            break
        num_windows += "window" in answer
    return Replayed(
        policy=pipeline.layer_policy if pipeline else header.scheduler.policy,
        num_instances=header.cluster.num_instances,
        num_calls=num_calls,
        num_windows=num_windows,
        num_requests=num_requests,
        span_us=last_us - first_us,
        is_truncated=log.is_truncated,
        failure="" if difference else failure,
        difference=difference,
    )


def _watched(
    plan_window: PlanWindow, scheduler: Scheduler | PassPlanner, watch: Watch
) -> PlanWindow:
    def plan_and_show(events: Sequence[ServiceEvent], now_us: int) -> Plan:
        plan = plan_window(events, now_us)
        watch(now_us, events, plan, scheduler.noted)
        return plan

    return plan_and_show


def _answer(plan_window: PlanWindow, call: Call) -> tuple[dict[str, int | str] | None, str]:
    """Plan a window: the digest, or None and the error that invented events may cause."""
    try:
        return digest(plan_window([event for _, event in call.events], call.now_us)), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _difference(
    number: int, call: Call, answer: dict[str, int | str] | None, error: str
) -> Difference:
    fields: tuple[str, ...] = ()
    if call.plan is not None and answer is not None:
        names = dict.fromkeys([*call.plan, *answer])
        fields = tuple(name for name in names if call.plan.get(name) != answer.get(name))
    return Difference(number, call.now_us, fields, call.plan, answer, error)
