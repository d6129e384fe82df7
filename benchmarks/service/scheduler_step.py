"""What the scheduler costs: `Scheduler.plan_window` (k = 1) under the load of a simulated service.

Enters: the paper's mix at 1% long on the simulated H200 cluster. Leaves: a table, and a list of
{instances, rows, policy, load, mean_ms, p50_ms, p99_ms, share_of_step, plan_bytes,
changes_per_step}. Does not know: sockets, members; nothing but the scheduler runs while the clock
does.

Arrivals, ends, re-bindings and moves come as often as they do in a service.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Annotated, Any

from benchmarks.kit.bench import BenchRun, Claim, at_most, bench
from control_plane.scheduler.policies.registry import make_policy
from nanocp.config.scheduler import SchedulerConfig
from nanocp.serve.garbage import freeze_long_lived
from nanocp.simulator.costs.cluster_file import load_cluster_file
from nanocp.simulator.drafted_rows import Speculation
from nanocp.simulator.loads.workload import Workload
from nanocp.simulator.outcome import percentile
from nanocp.simulator.trial import Trial
from nanocp.values.plan import Event, Plan
from nanocp.wire.members import TO_INSTANCE

CLAIMS_MS = {
    ("dual_balanced", 45): 0.30,
    ("cost_aware", 45): 0.45,
    ("dual_balanced", 256): 1.0,
    ("cost_aware", 256): 1.25,
}
"""Claim: with that many rows an instance, the mean of a call is at most this."""
DRAFTS, DRAFT_ROWS = "1:.85:always", 32
"""With so many rows an instance calls are measured with drafts; see simulate --speculate."""
MAX_DRAFTS_MS = 0.4
"""Claim: then the mean of a call of dual_balanced is at most this."""
MAX_SHARE_OF_STEP = 0.01
"""Claim: with 256 rows an instance, a call takes at most this share of a step."""
NUM_INSTANCES = 32
TPOT_US = {32: 36_000, 45: 42_000, 256: 185_000}
"""Rows an instance -> about how long a step of them takes by the fitted cost model."""
_OUTPUT_LEN = 1_000
_NUM_FRAMES = 65_536
"""Frames of each instance: 256 rows of the mix hold more KV than an H200 does."""


@bench("Under a minute: shorter runs.")
def main(
    run: BenchRun,
    policy: Annotated[list[str] | None, "Again for more; default: both claimed ones."] = None,
) -> None:
    """Measure every point in turn."""
    policies = policy or ["dual_balanced", "cost_aware"]
    for name in policies:
        try:
            make_policy(SchedulerConfig(policy=name))
        except ValueError as error:
            run.refuse(f"--policy: {error}")
    warm_up_s, seconds = (1.0, 2.0) if run.is_quick else (5.0, 20.0)
    for name in policies:
        for rows in (45, 256):
            run.keep(measure(rows, name, warm_up_s, seconds))
        run.keep(measure(DRAFT_ROWS, name, warm_up_s, seconds, DRAFTS))
    run.table("plan_window; share: of a step by the fitted cost model", run.results)
    run.judge(claims(run.results))


def measure(
    rows: int, policy: str, warm_up_s: float, seconds: float, drafts: str = ""
) -> dict[str, Any]:
    """Play 1% long with about `rows` rows an instance, and time every call that plans a window."""
    file = load_cluster_file("h200x32-deepseek-v3")
    bounds = replace(file.cluster.bounds, max_rows=2 * rows)
    cluster = replace(file.cluster, num_frames=_NUM_FRAMES, bounds=bounds)
    rate = NUM_INSTANCES * rows / (_OUTPUT_LEN * TPOT_US[rows] / 1e6)
    trial = Trial(
        replace(file, cluster=cluster, row_buckets=(*file.row_buckets, 512)),
        policy,
        Workload("issue-1", rate, steady_tpot_us=TPOT_US[rows]),
        speculation=Speculation.read(drafts) if drafts else None,
        warm_up_us=round(warm_up_s * 1e6),
        measure_us=round(seconds * 1e6),
    )
    simulation = trial.simulation()
    calls = _Calls(simulation._plan_window, trial.warm_up_us)
    simulation._plan_window = calls.plan_window
    outcome = simulation.run(trial.requests())
    times_ms = sorted(ns / 1e6 for ns in calls.times_ns)
    return {
        "instances": NUM_INSTANCES,
        "rows": round(outcome.num_rows_mean / NUM_INSTANCES),
        "policy": policy,
        "load": f"simulated, {rows} rows" + (", drafts" if drafts else ""),
        "mean_ms": round(fmean(times_ms), 4),
        "p50_ms": round(percentile(times_ms, 50), 4),
        "p99_ms": round(percentile(times_ms, 99), 4),
        "share_of_step": round(fmean(times_ms) / outcome.step_ms_mean, 5),
        "plan_bytes": round(fmean(calls.sizes)),
        "changes_per_step": {
            name: round(count / len(times_ms), 2) for name, count in calls.num_changes.items()
        },
    }


class _Calls:
    """Stands before `plan_window`; a call that plans no window is added to the next one."""

    def __init__(self, plan_window: Any, from_us: int) -> None:
        self._plan_window = plan_window
        self._from_us = from_us
        self._owed_ns = 0
        self.times_ns: list[int] = []
        self.sizes: list[int] = []
        self.num_changes: Counter[str] = Counter()

    def plan_window(self, events: list[Event], now_us: int) -> Plan:
        """Time one call, on the processor."""
        if not self.times_ns:
            freeze_long_lived()  # as `nanocp serve` does
        began_ns = time.thread_time_ns()
        plan: Plan = self._plan_window(events, now_us)
        self._owed_ns += time.thread_time_ns() - began_ns
        if plan.window is not None:
            if now_us >= self._from_us:
                self._note(plan)
            self._owed_ns = 0
        return plan

    def _note(self, plan: Plan) -> None:
        self.times_ns.append(self._owed_ns)
        self.sizes.append(sum(len(TO_INSTANCE.encode(own)) for own in plan.instances))
        self.num_changes["started"] += sum(len(own.starts) for own in plan.instances)
        self.num_changes["ended"] += sum(len(own.ends) for own in plan.instances)
        self.num_changes["transfers"] += sum(t.source is None for t in plan.transfers)
        self.num_changes["moves"] += sum(t.source is not None for t in plan.transfers)


def claims(results: Sequence[dict[str, Any]]) -> Iterator[Claim]:
    """What is claimed of the points that were measured."""
    for result in results:
        if (result["policy"], result["load"][-6:]) == ("dual_balanced", "drafts"):
            at = f"dual_balanced, {DRAFT_ROWS} rows with drafts: a call takes {{}} ms"
            yield at_most(at, result["mean_ms"], MAX_DRAFTS_MS)
        for (policy, rows), most in CLAIMS_MS.items():
            if (result["policy"], result["load"]) == (policy, f"simulated, {rows} rows"):
                at = f"{policy}, {rows} rows: a call takes {{}}"
                yield at_most(f"{at} ms", result["mean_ms"], most)
                if rows == 256:
                    yield at_most(f"{at} of a step", result["share_of_step"], MAX_SHARE_OF_STEP)


if __name__ == "__main__":
    main()
