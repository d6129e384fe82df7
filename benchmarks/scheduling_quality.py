"""The highest rate that each policy sustains, by workload: 99% of requests within 50 ms a token, queueing included.

    python benchmarks/scheduling_quality.py [--quick] [--constants fitted|peak] [--json]

A run begins with as many requests as run at the SLO, then warms up, then is measured. Prints a table, or one object:
{"max_rate": {WORKLOAD: {POLICY: requests a second}}, "p99_tpot_ms": the same shape, and more of that shape}.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from dataclasses import dataclass
from statistics import fmean

from nanocp.simulator.cluster_file import load_cluster_file
from nanocp.simulator.outcome import Run
from nanocp.simulator.sweep import Sustained, sweep
from nanocp.simulator.workload import Workload

SLO_US = 50_000
WORKLOADS = ("issue-0", "issue-1", "issue-5", "issue-100")
BASELINES = ("least_batch", "least_cache", "uniform_cp:2", "uniform_cp:4", "uniform_cp:8")
POLICIES = ("fluid", "dual_balanced", "dual_balanced_any_node", *BASELINES)
QUICK_WORKLOADS = ("issue-1",)
QUICK_POLICIES = ("fluid", "dual_balanced", "least_batch", "uniform_cp:4", "uniform_cp:8")
FIRST_RATES = {"issue-0": 90.0, "issue-1": 45.0, "issue-5": 18.0, "issue-100": 1.4}
"""About what is found: a search that begins near its answer is short."""


@dataclass(frozen=True)
class Task:
    """One search."""

    cluster: str
    constants: str
    workload: str
    policy: str
    seed: int
    warm_up_s: float
    measure_s: float
    precision: float


def search(task: Task) -> tuple[Task, Sustained, float]:
    """The highest sustained rate, and the wall seconds that finding it took."""
    began_s = time.perf_counter()
    file = load_cluster_file(task.cluster)
    workload = Workload(task.workload, FIRST_RATES[task.workload], task.seed, steady_tpot_us=SLO_US * 9 // 10)
    run = Run(round(task.warm_up_s * 1e6), round(task.measure_s * 1e6), SLO_US)
    found = sweep(file, task.constants, task.policy, workload, run, precision=task.precision)
    return task, found, time.perf_counter() - began_s


def tasks_of(options: argparse.Namespace) -> list[Task]:
    """Every search that the options ask for."""
    workloads = options.workloads or (QUICK_WORKLOADS if options.quick else WORKLOADS)
    policies = options.policies or (QUICK_POLICIES if options.quick else POLICIES)
    warm_up_s, measure_s, precision = (3.0, 6.0, 1.1) if options.quick else (options.warm_up, options.seconds, 1.03)
    return [
        Task(options.cluster, options.constants, workload, policy, seed, warm_up_s, measure_s, precision)
        for workload in workloads
        for policy in policies
        for seed in range(options.seed, options.seed + (1 if options.quick else options.seeds))
    ]


def collect(found: list[tuple[Task, Sustained]]) -> dict[str, dict[str, dict[str, float]]]:
    """Means over the seeds, by what is measured, workload and policy."""
    groups: dict[tuple[str, str], list[Sustained]] = {}
    for task, sustained in found:
        groups.setdefault((task.workload, task.policy), []).append(sustained)
    results: dict[str, dict[str, dict[str, float]]] = {}

    def put(name: str, workload: str, policy: str, value: float) -> None:
        results.setdefault(name, {}).setdefault(workload, {})[policy] = round(value, 4)

    for (workload, policy), group in groups.items():
        put("max_rate", workload, policy, fmean(sustained.rate_per_s for sustained in group))
        outcomes = [sustained.outcome for sustained in group if sustained.outcome is not None]
        for name, key in (
            ("p99_tpot_ms", "tpot_ms_p99"),
            ("kv_imbalance", "kv_imbalance"),
            ("row_imbalance", "row_imbalance"),
            ("cp_share", "cp_share"),
            ("plan_ms", "plan_ms_mean"),
        ):
            if outcomes:
                put(name, workload, policy, fmean(getattr(outcome, key) for outcome in outcomes))
    return results


def show(results: dict[str, dict[str, dict[str, float]]], constants: str) -> None:
    """A table for each workload."""
    from rich.console import Console
    from rich.table import Table

    console = Console() if sys.stdout.isatty() else Console(width=110)
    for workload, rates in results["max_rate"].items():
        table = Table(title=f"{workload}, {constants} constants")
        baselines = [rates[name] for name in BASELINES if name in rates]
        for column in ("policy", "requests/s", "x best baseline", "of fluid", "p99 TPOT ms", "KV imbal.", "row imbal."):
            table.add_column(column, justify="left" if column == "policy" else "right")
        for policy, rate in rates.items():
            of_baseline = f"{rate / max(baselines):.2f}" if baselines and max(baselines) else "-"
            of_fluid = f"{rate / rates['fluid']:.2f}" if rates.get("fluid") else "-"
            cells = [
                f"{results[name][workload][policy]:{form}}"
                if policy in results.get(name, {}).get(workload, {})
                else "-"
                for name, form in (("p99_tpot_ms", ".1f"), ("kv_imbalance", ".0%"), ("row_imbalance", ".0%"))
            ]
            table.add_row(policy, f"{rate:.1f}", of_baseline, of_fluid, *cells)
        console.print(table)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1%% long, fewer policies, short runs: under a minute")
    parser.add_argument("--cluster", default="h200x32-deepseek-v3")
    parser.add_argument("--constants", default="fitted")
    parser.add_argument("--workloads", nargs="*", choices=WORKLOADS)
    parser.add_argument("--policies", nargs="*")
    parser.add_argument("--seconds", type=float, default=240.0, help="measured, of each run")
    parser.add_argument("--warm-up", type=float, default=80.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found: list[tuple[Task, Sustained]] = []
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for task, sustained, wall_s in pool.imap_unordered(search, tasks_of(options)):
            found.append((task, sustained))
            print(
                f"{task.workload} {task.policy} seed {task.seed}: {sustained.rate_per_s:.1f}/s, "
                f"{sustained.num_runs} runs in {wall_s:.0f} s",
                file=sys.stderr,
            )
    order = {(task.workload, task.policy): index for index, task in enumerate(tasks_of(options))}
    results = collect(sorted(found, key=lambda pair: order[pair[0].workload, pair[0].policy]))
    if options.json:
        print(json.dumps(results))
    else:
        show(results, options.constants)


if __name__ == "__main__":
    main()
