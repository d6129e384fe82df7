"""The highest rate that each policy sustains: 99% of requests within 50 ms a token, queueing and
transfer included.

    python benchmarks/scheduling_quality.py [--quick] [--mooncake FILE] [--json PATH]

Enters: the simulator. Leaves: a table for each workload, which claims hold, and one object:
{"max_rate": {WORKLOAD: {POLICY: requests a second}}, "p99_tpot_ms": the same shape, and more of
that shape}; under the peak constants a workload is called WORKLOAD@peak. Exit status 1 if a claim
does not hold. Does not know: how a policy decides.

Every run begins empty, warms up, then is measured. A search that was interrupted goes on with
--resume.
"""

from __future__ import annotations

import json as json_format
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer
from machine import describe
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from nanocp.simulator.cluster_file import load_cluster_file
from nanocp.simulator.outcome import Run
from nanocp.simulator.sweep import Sustained, sweep
from nanocp.simulator.workload import MIXES, Workload

SLO_US = 50_000
BASELINES = ("least_batch", "least_cache", "uniform_cp:2", "uniform_cp:4", "uniform_cp:8")
POLICIES = ("fluid", "cost_aware", "dual_balanced", "dual_balanced_any_node", *BASELINES)
QUICK_POLICIES = ("fluid", "cost_aware", "dual_balanced", "least_batch", "uniform_cp:4")
FIRST_RATES = {
    "issue-0": 42.0,
    "issue-1": 25.0,
    "issue-5": 12.0,
    "issue-100": 1.2,
    "mooncake": 35.0,
    "mooncake-x8": 3.0,
}
"""Where a search begins."""
PRECISION, TRACE_PRECISION, QUICK_PRECISION = 1.02, 1.05, 1.1
"""A rate is found to this factor. No claim is about the trace, whose runs are the longest."""
FIRST_STEP, NEXT_STEP = 1.3, 1.06
"""The first seed's search takes large steps; the others begin at its answer."""
STEADY_WARM_UP_S = 160.0
"""Runs begin empty, and a cluster fills for this long. With a shorter warm-up, rates are far above
what the cluster sustains (docs/log.md), so no claim is judged."""
MEASURES = {
    "p99_tpot_ms": "tpot_ms_p99",
    "kv_imbalance": "kv_imbalance",
    "row_imbalance": "row_imbalance",
    "cp_share": "cp_share",
    "plan_ms": "plan_ms_mean",
}
"""Name in the results -> field of an outcome. Beside them: cpu_s, processor seconds that a search
took."""
MAX_CPU_MINUTES = 2 * 45
"""Claim: of a full run, so that it takes at most 45 minutes on 2 cores."""

Results = dict[str, dict[str, dict[str, float]]]


@dataclass(frozen=True)
class Task:
    """The searches of one workload and policy, seed after seed."""

    cluster: str
    constants: str
    name: str
    """Of the workload, in the results."""
    workload: Workload
    policy: str
    num_seeds: int
    run: Run
    precision: float

    @property
    def key(self) -> str:
        """Of the workload, with its constants."""
        return self.name if self.constants == "fitted" else f"{self.name}@{self.constants}"


def search(task: Task) -> tuple[Task, list[Sustained], float]:
    """The highest sustained rate of each seed, and the processor seconds that finding them took."""
    began_s = time.process_time()
    file = load_cluster_file(task.cluster)
    found: list[Sustained] = []
    for number in range(task.num_seeds):
        first_rate = (
            found[-1].rate_per_s if found and found[-1].rate_per_s else task.workload.rate_per_s
        )
        workload = replace(task.workload, rate_per_s=first_rate, seed=task.workload.seed + number)
        step = NEXT_STEP if found else FIRST_STEP
        found.append(
            sweep(
                file,
                task.constants,
                task.policy,
                workload,
                task.run,
                precision=task.precision,
                step=step,
            )
        )
    return task, found, time.process_time() - began_s


def main(
    quick: Annotated[
        bool,
        typer.Option(
            help="1% long, fewer policies, one short run each: under a minute. Checks that the "
            "benchmark runs; nothing is judged."
        ),
    ] = False,
    cluster: Annotated[
        str, typer.Option(help="Name or path of a cluster file.")
    ] = "h200x32-deepseek-v3",
    constants: Annotated[
        list[str] | None, typer.Option(help="Sets of constants; both if not given.")
    ] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Of {', '.join(FIRST_RATES)}; all if not given, the trace's only with --mooncake."
        ),
    ] = None,
    policy: Annotated[list[str] | None, typer.Option(help="Policies; all if not given.")] = None,
    mooncake: Annotated[
        Path | None,
        typer.Option(help="The whole Mooncake trace (a sample is too short)."),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Measured, of each run.")] = 240.0,
    warm_up: Annotated[
        float,
        typer.Option(help="Seconds before that, from empty on; with fewer nothing is judged."),
    ] = STEADY_WARM_UP_S,
    seed: Annotated[int, typer.Option(help="The first.")] = 1,
    seeds: Annotated[int, typer.Option(help="How many.")] = 3,
    processes: Annotated[int, typer.Option(help="Searches at a time.")] = 2,
    json: Annotated[
        Path | None, typer.Option(help="Write the results here, the machine beside it.")
    ] = None,
    resume: Annotated[
        bool, typer.Option(help="Keep what the --json file has, and search for the rest.")
    ] = False,
) -> None:
    """Search, policy by policy, for the highest rate at which 99% of requests meet the SLO."""
    console, load_before = Console(), os.getloadavg()[0]
    known = [name for name in FIRST_RATES if mooncake or name in MIXES]
    names = workload or (["issue-1"] if quick else known)
    sets = constants or (["fitted"] if quick else ["fitted", "peak"])
    policies = policy or (QUICK_POLICIES if quick else POLICIES)
    warm_up_s, measure_s = (3.0, 6.0) if quick else (warm_up, seconds)
    results = (
        json_format.loads(json.read_text()) if resume and json is not None and json.exists() else {}
    )
    tasks = [
        Task(
            cluster,
            one_set,
            name,
            _workload(name, mooncake, seed, warm_up_s),
            one_policy,
            seeds if name in MIXES and not quick else 1,
            Run(round(warm_up_s * 1e6), round(measure_s * 1e6), SLO_US),
            QUICK_PRECISION if quick else PRECISION if name in MIXES else TRACE_PRECISION,
        )
        for one_set in sets
        for name in names
        for one_policy in policies
    ]

    def keep(results: Results) -> None:
        if json is not None:
            json.parent.mkdir(parents=True, exist_ok=True)
            json.write_text(json_format.dumps(results, indent=1) + "\n")

    results = collect(tasks, results, processes, console, keep)
    show(results, console)
    is_steady = warm_up_s >= STEADY_WARM_UP_S
    if not is_steady:
        console.print(
            f"No claim is judged: a run is steady after {STEADY_WARM_UP_S:g} s of warm-up, and this "
            f"one had {warm_up_s:g} s. The cluster was still filling: these rates are far above "
            "what it sustains."
        )
    broken = judge(results, console) if is_steady else 0
    if json is not None:
        about = {
            "cluster": cluster,
            "warm_up_s": warm_up_s,
            "is_steady": is_steady,
            "seconds": measure_s,
            "seed": seed,
            "seeds": seeds,
        }
        machine = describe(load_before) | about | {"mooncake": mooncake and mooncake.name}
        json.with_suffix(".machine.json").write_text(json_format.dumps(machine, indent=1) + "\n")
    if broken:
        raise typer.Exit(1)


def _workload(name: str, mooncake: Path | None, seed: int, warm_up_s: float) -> Workload:
    if name not in FIRST_RATES:
        raise typer.BadParameter(
            f"{name} is none of {', '.join(FIRST_RATES)}", param_hint="--workload"
        )
    if name in MIXES:
        return Workload(name, FIRST_RATES[name], seed)
    if mooncake is None:
        raise typer.BadParameter(f"{name} needs the trace", param_hint="--mooncake")
    scale = 8.0 if name.endswith("-x8") else 1.0
    workload = Workload(f"mooncake:{mooncake}", FIRST_RATES[name], length_scale=scale)
    try:
        next(workload.requests(1 << 20, round(warm_up_s * 1e6)))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--mooncake") from error
    return workload


def collect(
    tasks: Sequence[Task],
    results: Results,
    processes: int,
    console: Console,
    keep: Callable[[Results], None],
) -> Results:
    """Means over the seeds, by what is measured, workload and policy, in the order of the tasks.

    `results` has what is known already; `keep` gets what is known whenever a search ends.
    """
    for name in ("max_rate", *MEASURES, "cpu_s"):
        results.setdefault(name, {})
    missing = [task for task in tasks if task.policy not in results["max_rate"].get(task.key, {})]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with (
        multiprocessing.get_context("spawn").Pool(processes) as pool,
        Progress(*columns, console=console) as progress,
    ):
        bar = progress.add_task("searching", total=len(missing))
        for task, sustained, cpu_s in pool.imap_unordered(search, missing):
            rates = ", ".join(f"{one.rate_per_s:.2f}" for one in sustained)
            runs = sum(one.num_runs for one in sustained)
            progress.console.print(
                f"{task.key} {task.policy}: {rates} requests/s ({runs} runs, {cpu_s:.0f} s)"
            )
            outcomes = [one.outcome for one in sustained if one.outcome is not None]
            found = {
                "max_rate": round(fmean(one.rate_per_s for one in sustained), 3),
                "cpu_s": round(cpu_s, 1),
            }
            if outcomes:
                means = {
                    name: fmean(getattr(one, field) for one in outcomes)
                    for name, field in MEASURES.items()
                }
                found |= {name: round(mean, 4) for name, mean in means.items()}
            for name, value in found.items():
                results[name].setdefault(task.key, {})[task.policy] = value
            results = {name: _in_order(by_key, tasks) for name, by_key in results.items()}
            keep(results)
            progress.advance(bar)
    return results


def _in_order(
    by_key: dict[str, dict[str, float]], tasks: Sequence[Task]
) -> dict[str, dict[str, float]]:
    ranks = {(task.key, task.policy): rank for rank, task in enumerate(tasks)}
    last = len(ranks)
    values = [
        ((key, policy), value)
        for key, policies in by_key.items()
        for policy, value in policies.items()
    ]
    ordered: dict[str, dict[str, float]] = {}
    for (key, policy), value in sorted(values, key=lambda entry: ranks.get(entry[0], last)):
        ordered.setdefault(key, {})[policy] = value
    return ordered


def show(results: Results, console: Console) -> None:
    """A table for each workload."""
    for key, rates in results["max_rate"].items():
        table = Table(title=key)
        baselines = [rates[name] for name in BASELINES if name in rates]
        for column in (
            "policy",
            "requests/s",
            "x best baseline",
            "of fluid",
            "p99 TPOT ms",
            "KV imbal.",
            "row imbal.",
        ):
            table.add_column(column, justify="left" if column == "policy" else "right")
        for policy, rate in rates.items():
            cells = [
                f"{results[name].get(key, {}).get(policy, float('nan')):{form}}"
                for name, form in (
                    ("p99_tpot_ms", ".1f"),
                    ("kv_imbalance", ".0%"),
                    ("row_imbalance", ".0%"),
                )
            ]
            table.add_row(
                policy,
                f"{rate:.2f}",
                _ratio(rate, baselines),
                _ratio(rate, [rates.get("fluid", 0)]),
                *cells,
            )
        console.print(table)


def judge(results: Results, console: Console) -> int:
    """Say which claims hold; returns how many do not. A claim about what was not measured is left
    out."""
    table = Table(title="claims")
    for column in ("workload", "claim", "measured", "claimed", "holds"):
        table.add_column(column)
    broken = 0
    for key, rates in results["max_rate"].items():
        for claim, policy, others, least in _claims(key):
            if (
                policy in rates
                and all(name in rates for name in others)
                and max(rates[name] for name in others)
            ):
                ratio = rates[policy] / max(rates[name] for name in others)
                broken += ratio < least
                table.add_row(
                    key, claim, f"{ratio:.2f}", f">= {least}", "yes" if ratio >= least else "no"
                )
    if cpu_s := sum(sum(policies.values()) for policies in results.get("cpu_s", {}).values()):
        cpu_minutes = cpu_s / 60
        broken += cpu_minutes > MAX_CPU_MINUTES
        holds = "yes" if cpu_minutes <= MAX_CPU_MINUTES else "no"
        table.add_row(
            "all", "processor minutes", f"{cpu_minutes:.0f}", f"<= {MAX_CPU_MINUTES}", holds
        )
    console.print(table)
    return broken


def _claims(key: str) -> list[tuple[str, str, tuple[str, ...], float]]:
    """(claim, policy, against the best of, at least) of a workload."""
    beats_paper = ("cost_aware / dual_balanced", "cost_aware", ("dual_balanced",), 1.15)
    rest = tuple(name for name in POLICIES if name not in ("fluid", "cost_aware"))
    loses_nowhere = ("cost_aware / best of all others", "cost_aware", rest, 0.97)
    match key.partition("@")[0]:
        case "issue-1":
            paper = ("dual_balanced / best baseline", "dual_balanced", BASELINES, 1.5)
            return [paper, beats_paper, ("cost_aware / fluid", "cost_aware", ("fluid",), 0.87)]
        case "issue-5":
            return [beats_paper, ("cost_aware / fluid", "cost_aware", ("fluid",), 0.85)]
        case "issue-0" | "issue-100":
            return [loses_nowhere]
    return []


def _ratio(rate: float, others: Sequence[float]) -> str:
    return f"{rate / max(others):.2f}" if others and max(others) else "-"


if __name__ == "__main__":
    typer.run(main)
