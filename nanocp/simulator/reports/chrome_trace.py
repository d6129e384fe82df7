"""A run in the Trace Event format, for Perfetto (ui.perfetto.dev) or chrome://tracing.

A policy is a process, an instance a track; times are simulated microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nanocp.simulator.costs.cluster_file import ModelShape
from nanocp.simulator.costs.cost import CostModel
from nanocp.simulator.reports.timeline import RequestTimes, Sample, TimelineRecorder

TraceEvent = dict[str, Any]


def write_trace(
    path: Path, runs: dict[str, tuple[TimelineRecorder, CostModel]], shape: ModelShape
) -> None:
    """Write the runs, by policy. Raises OSError if the file cannot be written."""
    events = [
        event
        for number, (policy, (timeline, model)) in enumerate(runs.items(), start=1)
        for event in trace_events(number, policy, timeline, model, shape)
    ]
    trace = {"displayTimeUnit": "ms", "traceEvents": events}
    path.write_text(json.dumps(trace, separators=(",", ":")), encoding="utf-8")


def trace_events(
    process: int, policy: str, timeline: TimelineRecorder, model: CostModel, shape: ModelShape
) -> Iterator[TraceEvent]:
    """Yield the events of one run; a phase's time is the sum over layers."""
    yield _named("process_name", policy, pid=process)
    for instance in range(len(timeline.samples[0].frames_free) if timeline.samples else 0):
        yield _named("thread_name", f"instance {instance}", pid=process, tid=instance)
    for sample in timeline.samples:
        for instance in range(len(sample.frames_free)):
            yield from _step_slices(process, instance, sample, model, shape)
        yield _counter(process, sample, "requests waiting", sample.num_waiting)
        yield _counter(process, sample, "free frames", sum(sample.frames_free))
        yield _counter(process, sample, "most free frames on one instance", max(sample.frames_free))
        yield _counter(process, sample, "requests with CP", sample.num_with_cp)
    for request_id, times in timeline.requests.items():
        if times.ended_us is None or times.ended_us >= timeline.run.warm_up_us:
            yield from _request(process, request_id, times, timeline.run.end_us)


def _step_slices(
    process: int, instance: int, sample: Sample, model: CostModel, shape: ModelShape
) -> Iterator[TraceEvent]:
    own, slowest, loads = model.layer_of(sample.loads, instance), sample.step.layer, sample.loads
    track = {"ph": "X", "pid": process, "tid": instance}
    yield {
        **track,
        "name": "step",
        "ts": sample.begins_us,
        "dur": sample.step.step_us,
        "args": {
            "kv_tokens": loads.kv_tokens[instance],
            "rows": loads.rows[instance],
            "attention_rows": loads.attention_rows[instance],
            "links": loads.links[instance],
        },
    }
    first = slowest.attention_us + slowest.exchange_us + slowest.other_us
    waits_us = first - own.attention_us - own.exchange_us - own.other_us
    linear_us = own.other_us + loads.rows[instance] * shape.linear_us_per_row
    linear_wait_us = slowest.other_us + max(loads.rows) * shape.linear_us_per_row - linear_us
    phases = (
        ("attention", shape.num_full_layers, own.attention_us),
        ("exchange", shape.num_full_layers, own.exchange_us),
        ("other", shape.num_full_layers, own.other_us),
        ("wait for the slowest", shape.num_full_layers, waits_us),
        ("linear attention", shape.num_linear_layers, linear_us),
        ("wait for the slowest", shape.num_linear_layers, max(linear_wait_us, 0.0)),
        ("dispatch + combine", shape.num_moe_layers, own.dispatch_combine_us),
        (
            "wait for the slowest",
            shape.num_moe_layers,
            slowest.dispatch_combine_us - own.dispatch_combine_us,
        ),
        ("experts", shape.num_moe_layers, own.expert_us),
    )
    since_us = 0.0
    for name, num_layers, layer_us in phases:
        # Edges are rounded, not durations, so that neighbours meet.
        begins_us, since_us = round(since_us), since_us + num_layers * layer_us
        if round(since_us) > begins_us:
            place = {"ts": sample.begins_us + begins_us, "dur": round(since_us) - begins_us}
            yield {**track, "name": name, **place}
    begins_us = round(since_us)
    if sample.step.step_us > begins_us:
        place = {"ts": sample.begins_us + begins_us, "dur": sample.step.step_us - begins_us}
        yield {**track, "name": "lm_head + sampling", **place}


def _request(
    process: int, request_id: int, times: RequestTimes, end_us: int
) -> Iterator[TraceEvent]:
    shared = {"cat": "request", "id": f"{process}.{request_id}", "pid": process, "tid": 0}
    ended_us = end_us if times.ended_us is None else times.ended_us
    placed_us = ended_us if times.placed_us is None else times.placed_us
    args = {
        "prompt_len": times.request.prompt_len,
        "output_len": times.request.output_len,
        "cp_degree": times.cp_degree,
        "end": "still there"
        if times.ended_us is None
        else "refused"
        if times.is_refused
        else "last token",
    }
    yield {**shared, "ph": "b", "name": "request", "ts": times.request.arrival_us, "args": args}
    first_us = ended_us if times.first_token_us is None else min(times.first_token_us, ended_us)
    for name, begins_us, ends_us in (
        ("waiting", times.request.arrival_us, placed_us),
        ("to the first token", placed_us, first_us),
        ("later tokens", first_us, ended_us),
    ):
        if ends_us > begins_us:
            yield {**shared, "ph": "b", "name": name, "ts": begins_us}
            yield {**shared, "ph": "e", "name": name, "ts": ends_us}
    yield {**shared, "ph": "e", "name": "request", "ts": ended_us}


def _counter(process: int, sample: Sample, name: str, value: int) -> TraceEvent:
    return {
        "ph": "C",
        "pid": process,
        "tid": 0,
        "name": name,
        "ts": sample.begins_us,
        "args": {"value": value},
    }


def _named(what: str, name: str, **track: int) -> TraceEvent:
    return {"ph": "M", "name": what, **track, "args": {"name": name}}
