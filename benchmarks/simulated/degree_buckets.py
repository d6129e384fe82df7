"""What CP degrees by length that were measured are worth to the paper's rule, dual_balanced.

Enters: the cluster of 32 H200 that ships. Leaves: a table, a claim, and a list of {workload, rate,
seed, buckets, step_ms, cp_share}. Does not know: how a degree is measured; `measured` are
the degrees that a service on GPUs has without a profile, `unmeasured` those of a CPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.kit.bench import BenchRun, Interval, bench
from nanocp.config.cost import GPU_DEGREES
from nanocp.config.scheduler import SchedulerConfig
from nanocp.simulator.costs.cluster_file import load_cluster_file
from nanocp.simulator.costs.cost import CostModel
from nanocp.simulator.loads.workload import Workload
from nanocp.simulator.outcome import Recorder
from nanocp.simulator.simulation import Simulation, scheduler_config
from nanocp.simulator.trial import Trial

POLICY = "dual_balanced"
UNMEASURED = {name: getattr(SchedulerConfig(), name) for name in GPU_DEGREES}
BUCKETS: dict[str, dict[str, Any]] = {"unmeasured": UNMEASURED, "measured": GPU_DEGREES}
CASES = (("issue-1", 20.0), ("issue-5", 12.0), ("issue-5", 16.0))
"""Workloads with long requests, and requests a second."""
SEEDS = range(12)
MAX_SHARE = 0.95
"""Claim: with measured degrees a step takes at most this share of its time."""


@bench("One seed, 60 s of each case; it judges nothing.")
def main(run: BenchRun) -> None:
    """Simulate each case with both, on equal requests."""
    cases = [(*case, seed) for seed in (SEEDS[:1] if run.is_quick else SEEDS) for case in CASES]
    ratios = []
    for workload, rate, seed in run.track(cases, "simulating"):
        trial = Trial(
            load_cluster_file("h200x32-deepseek-v3"),
            POLICY,
            Workload(workload, rate, num_instances=32, instances_per_node=8, seed=seed),
        )
        if run.is_quick:
            trial = replace(trial, measure_us=60_000_000)
        trial = trial.filled()
        steps_ms = []
        for name, buckets in BUCKETS.items():
            model = CostModel(trial.charged, trial.constants, wire_form=trial.form)
            config = replace(scheduler_config(trial.charged, model, POLICY), **buckets)
            simulation = Simulation(trial.charged, config, model, Recorder(trial.run))
            outcome = simulation.run(trial.requests())
            steps_ms.append(outcome.step_ms_mean)
            about = {"step_ms": outcome.step_ms_mean, "cp_share": outcome.cp_share}
            run.keep({"workload": workload, "rate": rate, "seed": seed, "buckets": name, **about})
        ratios.append(steps_ms[1] / steps_ms[0])
    formats = {"rate": ".0f", "seed": "", "buckets": "", "step_ms": ".2f", "cp_share": ".3f"}
    run.table("CP degrees by length", run.results, workload="", **formats)
    claim = Interval.of(ratios).at_most("a step with measured degrees over one without", MAX_SHARE)
    run.judge([claim], run.too_quick)


if __name__ == "__main__":
    main()
