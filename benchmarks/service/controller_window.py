"""What the controller costs a window: the last report in, the plans of the next window out.

Enters: the service's own Controller and Scheduler, real gRPC streams, pretended instances in other
processes that run each window for as long as an H200's step is modelled. Leaves: a table, which
claims hold, and a list of lines {instances, rows, window_ms, wait_ms_p50, wait_ms_p99, share_p99,
loop_ms, process_ms, plan_ms, num_windows}. Does not know: tokens, KV: synthetic KV is there as soon
as a ticket is.

wait: from the moment at which the last instance hands its report to gRPC to that at which gRPC has
taken the last plan of the window planned on it. Two windows are in flight, so a wait shorter than a
window is hidden. loop and process: processor time of the controller's thread and of its whole
process a window; they hardly depend on the load of the machine, waits do.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.kit.bench import BenchRun, Claim, at_most, bench
from benchmarks.service.pretended_instances import Pretended, pretend
from control_plane.coordinator.flights.decode import DecodeFlights
from control_plane.observe.cluster_view import ClusterView
from control_plane.observe.metrics.registry import Metrics
from control_plane.ports.controller_interface import Submission
from control_plane.ports.member_streams import MemberStream, _NodeStream
from control_plane.ports.members_port import MemberSecrets
from control_plane.shell.controller import Controller
from nanocp.config.limits import LimitsConfig
from nanocp.config.prefill import PrefillConfig
from nanocp.config.service import ServiceConfig
from nanocp.config.whole import Config
from nanocp.serve.garbage import freeze_long_lived
from nanocp.simulator.costs.cluster_file import load_cluster_file
from nanocp.simulator.costs.cost import CostModel
from nanocp.simulator.loads.workload import Workload
from nanocp.simulator.outcome import percentile
from nanocp.simulator.simulation import scheduler_config
from nanocp.values.members import Member
from nanocp.values.plan import Arrival, InstancePlan, Placement
from nanocp.wire.members import TO_INSTANCE

WINDOW_MS = {45: 42.0, 256: 185.0}
"""Rows an instance -> about how long a step of them takes by the fitted cost model."""
SIZES = ((32, 45), (32, 256), (128, 256), (256, 256))
QUICK_SIZES = ((32, 45),)
MAX_SHARE = {(32, 256, "instance"): 0.25, (256, 256, "node"): 0.5}
"""Claim: p99 of the wait is at most this share of a window, at (instances, rows, streams)."""
POLICY = "dual_balanced"
MAX_LOAD = 1.0
"""Waits are judged if fewer other processes than this ran at the start."""
OUTPUT_LEN = 1_000
NUM_FRAMES = 65_536
NUM_PROCESSES = 4
INSTANCES_PER_NODE = 8
_WARM_WINDOWS = 10
_FILL_AT_A_TIME = 2_048
"""Requests that are submitted together before the first window that counts."""
_START_S = 300.0
_STOP_S = 10.0


class SizedCluster(NamedTuple):
    """What is measured."""

    instances: int
    rows: int
    num_windows: int

    @property
    def window_us(self) -> int:
        """How long an instance takes for a window."""
        return round(1e3 * WINDOW_MS[self.rows])


# --- the controller, in this process


class _NoClients:
    """The front end of a benchmark: it only counts requests that end, which none must.

    Only refused requests end here, the others when their tokens are planned.
    """

    def __init__(self) -> None:
        self.num_ended = 0

    def placed(self, placement: Placement, num_cached: int | None = None) -> None:
        """Nothing to do."""

    def ended(self, *what: Any) -> None:
        """Count it."""
        self.num_ended += 1

    preempted = interrupted = tokens_lost = ended


class _NoProcesses:
    """A lost member is an error here: it makes the benchmark end."""

    def kill(self, member: Member) -> None:
        """Nothing to do."""

    def start(self, member: Member, number: int, term: int) -> None:
        """Refuse."""
        raise RuntimeError(f"{member} was lost")

    def obstacle_to_more(self, num_instances: int) -> str:
        return "nothing starts processes here"


@dataclass(frozen=True, slots=True)
class _Stamps:
    """What was seen of each window on the controller's thread, in nanoseconds."""

    planned: dict[int, int] = field(default_factory=dict)
    """Processor time of the scheduler."""
    handed: dict[int, int] = field(default_factory=dict)
    """The monotonic clock when gRPC had taken the last of its plans."""


def _watch(controller: Controller) -> _Stamps:
    """Stamp every plan from now on."""
    stamps = _Stamps()
    plan_window, messages = controller._scheduler.plan_window, MemberStream.messages

    def timed(events: Any, now_us: int) -> Any:
        began_ns = time.thread_time_ns()
        plan = plan_window(events, now_us)
        if plan.window is not None:
            stamps.planned[plan.window] = time.thread_time_ns() - began_ns
        return plan

    async def stamped(stream: MemberStream) -> AsyncIterator[Any]:
        async for message in messages(stream):
            yield message
            if isinstance(message.message, InstancePlan):
                stamps.handed[message.message.window] = time.monotonic_ns()

    of_nodes = _NodeStream.messages

    async def stamped_of_nodes(node: _NodeStream) -> AsyncIterator[Any]:
        async for message in of_nodes(node):
            yield message
            at_ns = time.monotonic_ns()
            sent = (item.message for item in message.items if item.message)
            plans = [each for each in sent if TO_INSTANCE.name(each) == InstancePlan.__name__]
            if plans:
                stamps.handed[TO_INSTANCE.decode(plans[-1]).window] = at_ns

    _NodeStream.messages = stamped_of_nodes  # type: ignore[method-assign, assignment]
    controller._scheduler.plan_window = timed  # type: ignore[method-assign]
    MemberStream.messages = stamped  # type: ignore[method-assign, assignment]
    return stamps


def _config(point: SizedCluster) -> Config:
    """The service's configuration, with the scheduler of a simulated cluster of that size."""
    file = load_cluster_file("h200x32-deepseek-v3")
    bounds = replace(file.cluster.bounds, max_rows=2 * point.rows)
    cluster = replace(
        file.cluster, num_instances=point.instances, num_frames=NUM_FRAMES, bounds=bounds
    )
    return Config(
        cluster=cluster,
        scheduler=scheduler_config(file, CostModel(file, "fitted"), POLICY),
        prefill=PrefillConfig(synthetic_kv=True),
        limits=LimitsConfig(
            start_timeout_ms=round(1e3 * _START_S),
            suspect_ms=60_000,
            exchange_timeout_ms=240_000,
            plan_timeout_ms=120_000,
        ),
        service=ServiceConfig(grpc_port=0, http_port=0, metrics_port=0),
    )


def _submissions(point: SizedCluster, max_model_len: int) -> Iterator[tuple[float, Submission]]:
    """(second, request), without an end: those of second 0 keep every instance busy from then on.

    Prompts are the mix's with 1% of long ones; they have a length and no tokens.
    """
    rate = point.instances * point.rows / (OUTPUT_LEN * point.window_us / 1e6)
    workload = Workload("issue-1", rate, steady_tpot_us=point.window_us)
    for number, request in enumerate(workload.requests(max_model_len), start=1):
        length = request.prompt_len
        submission = Submission(Arrival(number, length, request.output_len), range(length))
        yield request.arrival_us / 1e6, submission


def measure(point: SizedCluster, node_streams: bool) -> dict[str, Any]:
    """Start a controller and its instances, fill them, and watch it for some windows."""
    config, secrets, front_end = _config(point), MemberSecrets(), _NoClients()
    metrics = Metrics(config.cluster, config.scheduler)
    controller = Controller(
        config,
        _NoProcesses(),
        secrets,
        front_end,
        metrics,
        ClusterView(config.cluster, config.scheduler.policy, lambda: (0, 0.0)),
        lambda members: DecodeFlights(config.cluster, config.scheduler, members, metrics),
    )
    stamps = _watch(controller)
    address = controller.start(lambda line: None, lambda member, percent: None)
    context = multiprocessing.get_context("spawn")
    processes, pipes = [], []
    nodes = range(point.instances // INSTANCES_PER_NODE)
    for index in range(NUM_PROCESSES):
        own_nodes = nodes[index::NUM_PROCESSES]
        own = Pretended(
            address,
            {
                instance: secrets.issue(f"instance {instance}")
                for node in own_nodes
                for instance in range(node * INSTANCES_PER_NODE, (node + 1) * INSTANCES_PER_NODE)
            },
            {node: secrets.issue(f"node {node}") for node in own_nodes if node_streams},
            INSTANCES_PER_NODE,
            point.window_us,
        )
        receiver, sender = context.Pipe(duplex=False)
        processes.append(context.Process(target=pretend, args=(own, sender)))
        pipes.append(receiver)
    for process in processes:
        process.start()
    try:
        controller.members.start.wait()
        upcoming = _fill(controller, _submissions(point, config.cluster.max_model_len))
        clocks = _play(controller, upcoming, stamps, point)
    finally:
        controller.leave("the benchmark is over")
        reported = [pipe.recv() if pipe.poll(_STOP_S) else {} for pipe in pipes]
        for process in processes:
            process.join(_STOP_S)
            process.kill()
        controller.stop()
    if front_end.num_ended or controller.members.end.failure.done():
        raise RuntimeError(f"{front_end.num_ended} requests ended, or a member was lost")
    return _line(point, node_streams, clocks, stamps, reported)


def _fill(
    controller: Controller, upcoming: Iterator[tuple[float, Submission]]
) -> Iterator[tuple[float, Submission]]:
    """Submit what runs from the start, and wait until all of it is placed. Returns the rest.

    Not all at once: that many placements in one window would stall every instance.
    """
    num_running = 0
    deadline_s = time.monotonic() + _START_S
    for at_s, submission in upcoming:
        if at_s > 0:
            break
        controller.submit(submission)
        num_running += 1
        if num_running % _FILL_AT_A_TIME == 0:
            _wait_placed(controller, num_running, deadline_s)
    _wait_placed(controller, num_running, deadline_s)
    freeze_long_lived()  # as `nanocp serve` does
    return upcoming


def _wait_placed(controller: Controller, num_submitted: int, deadline_s: float) -> None:
    """Wait until nothing waits, and at least half of what was submitted still runs."""
    while (
        controller._scheduler.requests.num_waiting
        or controller._scheduler.requests.num_running < (num_submitted / 2)
    ):
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"{num_submitted} requests did not start in {_START_S:.0f} s")
        time.sleep(0.05)


class _Clocks(NamedTuple):
    """Processor nanoseconds between the first and the last window that count."""

    first_window: int
    last_window: int
    loop_ns: int
    process_ns: int


def _play(
    controller: Controller,
    upcoming: Iterator[tuple[float, Submission]],
    stamps: _Stamps,
    point: SizedCluster,
) -> _Clocks:
    """Submit requests as they arrive until enough windows have been planned."""
    ident = controller._thread.ident
    assert ident is not None
    clock = time.pthread_getcpuclockid(ident)
    first = max(stamps.handed, default=0) + _WARM_WINDOWS
    began_s = time.monotonic()
    before: tuple[int, int] | None = None
    for at_s, submission in upcoming:
        while (left_s := began_s + at_s - time.monotonic()) > 0 or at_s == 0:
            now = max(stamps.handed, default=0)
            if before is None and now >= first:
                first = now
                before = time.clock_gettime_ns(clock), time.process_time_ns()
            if before is not None and now >= first + point.num_windows:
                loop_ns = time.clock_gettime_ns(clock) - before[0]
                return _Clocks(first, now, loop_ns, time.process_time_ns() - before[1])
            if controller.members.end.failure.done():
                raise RuntimeError(controller.members.end.failure.result())
            time.sleep(min(left_s, point.window_us / 4e6))
        controller.submit(submission)
    raise AssertionError("a mix has no end")


def _line(
    point: SizedCluster,
    node_streams: bool,
    clocks: _Clocks,
    stamps: _Stamps,
    reported: Sequence[dict[int, int]],
) -> dict[str, Any]:
    """Numbers of the windows that count; each is planned on the reports of the one two before."""
    num_windows = clocks.last_window - clocks.first_window
    windows = range(clocks.first_window + 1, clocks.last_window + 1)
    waits_ms = sorted(
        (stamps.handed[window] - max(ns[window - 2] for ns in reported if ns)) / 1e6
        for window in windows
    )
    window_ms = point.window_us / 1e3
    p99_ms = percentile(waits_ms, 99)
    return {
        "instances": point.instances,
        "rows": point.rows,
        "policy": POLICY,
        "streams": "node" if node_streams else "instance",
        "window_ms": window_ms,
        "wait_ms_p50": round(percentile(waits_ms, 50), 2),
        "wait_ms_p99": round(p99_ms, 2),
        "share_p99": round(p99_ms / window_ms, 4),
        "loop_ms": round(clocks.loop_ns / num_windows / 1e6, 2),
        "process_ms": round(clocks.process_ns / num_windows / 1e6, 2),
        "plan_ms": round(fmean(stamps.planned[window] for window in windows) / 1e6, 3),
        "num_windows": num_windows,
    }


@bench("Under a minute: 32 instances only, few windows; judges no claim.")
def main(run: BenchRun) -> None:
    """Measure every size in turn."""
    num_windows = 60 if run.is_quick else 300
    for size in QUICK_SIZES if run.is_quick else SIZES:
        for node_streams in (False, True):
            run.keep(measure(SizedCluster(*size, num_windows), node_streams), is_quick=run.is_quick)
    run.table("the controller, ms a window; wait: last report in to last plan out", run.results)
    is_busy = run.load_before > MAX_LOAD
    unless = f"a load of {run.load_before:.1f}" if is_busy else ""
    run.judge(claims(run.results), run.too_quick or unless)


def claims(lines: Sequence[dict[str, Any]]) -> Iterator[Claim]:
    """What is claimed of some sizes."""
    for line in lines:
        most = MAX_SHARE.get((line["instances"], line["rows"], line["streams"]))
        if most is not None:
            size = f"{line['instances']} x {line['rows']}, a stream for each {line['streams']}"
            what = f"{size}: p99 of the wait is {{}} of a window"
            yield at_most(what, line["share_p99"], most)


if __name__ == "__main__":
    main()
