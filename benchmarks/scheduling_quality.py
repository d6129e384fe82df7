"""The highest rate that each policy sustains: 99% within TPOT 50 ms and TTFT 500 ms.

    python benchmarks/scheduling_quality.py [--quick] [--mooncake FILE] [--json PATH]

Enters: the simulator. Leaves: a table for each workload, which claims hold, and one object:
{"max_rate": {WORKLOAD: {POLICY: requests a second}}, "tpot_ms_p99": the same shape, and more of
that shape}; under the peak constants a workload is called WORKLOAD@peak, in the absorbed wire form
WORKLOAD/absorbed. Exit status 1 if a claim does not hold. Does not know: how a policy decides.

Runs are those of `nanocp simulate sweep`: each begins as full as it would be after a long time. A
search that was interrupted goes on with --resume.
"""

from __future__ import annotations

import json as json_format
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from machine import describe
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from nanocp.simulator.cluster_file import ClusterFile, load_cluster_file
from nanocp.simulator.outcome import LEAST_ALLOWED_MISSES
from nanocp.simulator.sweep import NUM_SEEDS, Sweep, sweep
from nanocp.simulator.trial import Trial
from nanocp.simulator.workload import MIXES, Workload

BASELINES = ("least_batch", "least_cache", "uniform_cp:2", "uniform_cp:4", "uniform_cp:8")
POLICIES = ("fluid", "cost_aware", "dual_balanced", "dual_balanced_any_node", *BASELINES)
FORMS = ("latent", "absorbed")
"""Wire forms: the service's default, and the paper's."""
QUICK_POLICIES = ("fluid", "cost_aware", "dual_balanced", "least_batch", "uniform_cp:4")
FIRST_RATES = {
    "issue-0": 48.0,
    "issue-1": 38.0,
    "issue-5": 21.0,
    "issue-100": 1.8,
    "mooncake": 55.0,
    "mooncake-x8": 18.0,
}
"""Where a search begins if nothing is known of its neighbours."""
PRECISION, QUICK_PRECISION = 1.02, 1.1
"""A rate is found to this factor."""
MEASURES = (
    "ttft_ms_p50",
    "ttft_ms_p99",
    "tpot_ms_p50",
    "tpot_ms_p99",
    "normalized_ms_p99",
    "kv_imbalance",
    "row_imbalance",
    "cp_share",
    "plan_ms_mean",
)
"""Fields of an outcome in the results: means over the seeds. Beside them are num_judged,
num_missed and num_allowed, sums over the seeds, and cpu_s, processor seconds that a search took."""
COUNTS = {
    "num_judged": "num_judged",
    "num_missed": "num_missed",
    "num_allowed": "num_allowed_misses",
}
"""Name in the results -> field of an outcome."""
MAX_CPU_MINUTES = 2 * 90
"""Claim: of a full run, so that it takes at most 90 minutes on 2 cores."""

CELLS = {
    "judged": ("num_judged", ".0f"),
    "missed": ("num_missed", ".0f"),
    "TTFT p99": ("ttft_ms_p99", ".0f"),
    "TPOT p99": ("tpot_ms_p99", ".1f"),
    "norm. p99": ("normalized_ms_p99", ".1f"),
    "KV imbal.": ("kv_imbalance", ".0%"),
    "row imbal.": ("row_imbalance", ".0%"),
}
"""Column -> name in the results, format; times in ms."""

Results = dict[str, dict[str, dict[str, float]]]


@dataclass(frozen=True)
class SearchTask:
    """The searches of one workload and policy, seed after seed."""

    name: str
    """Name of the workload in the results."""
    trial: Trial
    num_seeds: int
    precision: float

    @property
    def key(self) -> str:
        """Key of the workload with its constants and wire form."""
        return self._key(self.trial.wire_form)

    def _key(self, form: str) -> str:
        constants = self.trial.constants
        key = self.name if constants == "fitted" else f"{self.name}@{constants}"
        return key if form == FORMS[0] else f"{key}/{form}"

    def near(self, rates: Mapping[str, Mapping[str, float]]) -> SearchTask:
        """The task, beginning at a rate that is known of a neighbour.

        That is the same policy in another wire form, or else the last policy of the same row.
        """
        policy = self.trial.policy
        known = [row[policy] for form in FORMS if policy in (row := rates.get(self._key(form), {}))]
        known += reversed(rates.get(self.key, {}).values())
        rate = next((rate for rate in known if rate), self.trial.workload.rate_per_s)
        return replace(self, trial=self.trial.at_rate(rate))


@dataclass(frozen=True)
class Question:
    """Which searches, and how long their runs are."""

    file: ClusterFile
    names: Sequence[str]
    constants: Sequence[str]
    forms: Sequence[str]
    policies: Sequence[str]
    mooncake: Path | None
    warm_up_s: float
    measure_s: float | None
    seed: int
    num_seeds: int
    is_quick: bool

    @property
    def about(self) -> dict[str, Any]:
        """What stands beside the results."""
        names = ("is_quick", "warm_up_s", "measure_s", "seed", "num_seeds")
        mooncake = self.mooncake and self.mooncake.name
        return {name: getattr(self, name) for name in names} | {"mooncake": mooncake}

    def tasks(self) -> list[SearchTask]:
        """A search for each row and policy, row after row."""
        precision = QUICK_PRECISION if self.is_quick else PRECISION
        return [
            SearchTask(name, self._trial(name, policy, constants, form), self.num_seeds, precision)
            for form in self.forms
            for constants in self.constants
            for name in self.names
            for policy in self.policies
        ]

    def _trial(self, name: str, policy: str, constants: str, form: str) -> Trial:
        return Trial(
            self.file,
            policy,
            _workload(name, self.mooncake, self.seed),
            constants=constants,
            wire_form=form,
            warm_up_us=round(self.warm_up_s * 1e6),
            measure_us=None if self.measure_s is None else round(self.measure_s * 1e6),
        )


def search(task: SearchTask) -> tuple[SearchTask, Sweep, float]:
    """The highest sustained rate of each seed, and the processor seconds that finding them took."""
    began_s = time.process_time()
    found = sweep(task.trial, precision=task.precision, num_seeds=task.num_seeds)
    return task, found, time.process_time() - began_s


def main(
    quick: Annotated[
        bool,
        typer.Option(
            help="1% long, fewer policies, one seed of short runs: a minute. Checks that the "
            "benchmark runs; nothing is judged."
        ),
    ] = False,
    cluster: Annotated[
        str, typer.Option(help="Name or path of a cluster file.")
    ] = "h200x32-deepseek-v3",
    constants: Annotated[
        list[str] | None, typer.Option(help="Sets of constants; both if not given.")
    ] = None,
    wire_form: Annotated[
        list[str] | None, typer.Option(help="latent or absorbed; both if not given.")
    ] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Of {', '.join(FIRST_RATES)}; all if not given, the trace's only with --mooncake."
        ),
    ] = None,
    policy: Annotated[list[str] | None, typer.Option(help="Policies; all if not given.")] = None,
    mooncake: Annotated[
        Path | None, typer.Option(help="The whole Mooncake trace (the sample says little).")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Measured, of each run; default: as `simulate sweep`.")
    ] = None,
    warm_up: Annotated[float, typer.Option(help="Seconds before that.")] = 40.0,
    seed: Annotated[int, typer.Option(help="The first.")] = 0,
    seeds: Annotated[int, typer.Option(help="How many.")] = NUM_SEEDS,
    processes: Annotated[int, typer.Option(help="Searches at a time.")] = 2,
    json: Annotated[
        Path | None, typer.Option(help="Write the results here, the machine beside it.")
    ] = None,
    resume: Annotated[
        bool, typer.Option(help="Keep what the --json file has, and search for the rest.")
    ] = False,
) -> None:
    """Search, policy by policy, for the highest rate at which 99% of requests meet the SLO."""
    console = Console() if sys.stdout.isatty() else Console(width=120)
    all_names = [name for name in FIRST_RATES if mooncake or name in MIXES]
    question = Question(
        file=load_cluster_file(cluster),
        names=workload or (["issue-1"] if quick else all_names),
        constants=constants or (["fitted"] if quick else ["fitted", "peak"]),
        forms=wire_form or (FORMS[:1] if quick else FORMS),
        policies=policy or (QUICK_POLICIES if quick else POLICIES),
        mooncake=mooncake,
        warm_up_s=15.0 if quick else warm_up,
        measure_s=15.0 if quick else seconds,
        seed=seed,
        num_seeds=1 if quick else seeds,
        is_quick=quick,
    )
    tasks = question.tasks()
    machine = describe(os.getloadavg()[0]) | question.about | {"cluster": cluster}
    known = _known(json) if resume else {}
    results = collect(tasks, known, processes, console, partial(_keep, json, machine))
    show(results, console)
    if not quick and judge(results, console):
        raise typer.Exit(1)


def _known(path: Path | None) -> Results:
    """What an interrupted search has found."""
    if path is None or not path.exists():
        return {}
    known: Results = json_format.loads(path.read_text())
    return known


def _keep(path: Path | None, machine: dict[str, Any], results: Results) -> None:
    """Write what is known, and beside it on what machine it was found."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        for file, content in ((path, results), (path.with_suffix(".machine.json"), machine)):
            file.write_text(json_format.dumps(content, indent=1) + "\n")


def _workload(name: str, mooncake: Path | None, seed: int) -> Workload:
    if name not in FIRST_RATES:
        raise typer.BadParameter(
            f"{name} is none of {', '.join(FIRST_RATES)}", param_hint="--workload"
        )
    if name in MIXES:
        return Workload(name, FIRST_RATES[name], seed)
    if mooncake is None:
        raise typer.BadParameter(f"{name} needs the trace", param_hint="--mooncake")
    scale = 8.0 if name.endswith("-x8") else 1.0
    return Workload(f"mooncake:{mooncake}", FIRST_RATES[name], length_scale=scale)


def collect(
    tasks: Sequence[SearchTask],
    results: Results,
    processes: int,
    console: Console,
    keep: Callable[[Results], None],
) -> Results:
    """Means over the seeds, by what is measured, workload and policy, in the order of the tasks.

    `results` has what is known already; `keep` gets what is known whenever a search ends.
    """
    for name in ("max_rate", *COUNTS, *MEASURES, "cpu_s"):
        results.setdefault(name, {})
    missing = [
        task for task in tasks if task.trial.policy not in results["max_rate"].get(task.key, {})
    ]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    running: set[Future[tuple[SearchTask, Sweep, float]]] = set()
    with (
        ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool,
        Progress(*columns, console=console) as progress,
    ):
        bar = progress.add_task("searching", total=len(missing))
        while missing or running:
            while missing and len(running) < processes:
                running.add(pool.submit(search, missing.pop(0).near(results["max_rate"])))
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                task, found, cpu_s = future.result()
                _note(results, task, found, cpu_s, progress.console)
                keep(results)
                progress.advance(bar)
    results = {name: _in_order(by_key, tasks) for name, by_key in results.items()}
    keep(results)
    return results


def _note(results: Results, task: SearchTask, found: Sweep, cpu_s: float, console: Console) -> None:
    """Print what a search has found, and put it among the results."""
    policy = task.trial.policy
    rates = ", ".join(f"{one.rate_per_s:.2f}" for one in found.seeds)
    runs = sum(one.num_runs for one in found.seeds)
    console.print(f"{task.key} {policy}: {rates} requests/s ({runs} runs, {cpu_s:.0f} s)")
    numbers = {"max_rate": round(found.rate_per_s, 3), "cpu_s": round(cpu_s, 1)}
    for name, field in COUNTS.items():
        numbers[name] = sum(getattr(outcome, field) for outcome in found.outcomes)
    for name in MEASURES if found.outcomes else ():
        numbers[name] = round(fmean(getattr(one, name) for one in found.outcomes), 4)
    for name, value in numbers.items():
        results[name].setdefault(task.key, {})[policy] = value


def _in_order(
    by_key: dict[str, dict[str, float]], tasks: Sequence[SearchTask]
) -> dict[str, dict[str, float]]:
    ranks = {(task.key, task.trial.policy): rank for rank, task in enumerate(tasks)}
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
        columns = ("policy", "requests/s", "x best baseline", "of fluid", *CELLS)
        for column in columns:
            table.add_column(column, justify="left" if column == "policy" else "right")
        for policy, rate in rates.items():
            cells = [
                f"{results[name].get(key, {}).get(policy, float('nan')):{form}}"
                for name, form in CELLS.values()
            ]
            table.add_row(
                policy,
                f"{rate:.2f}",
                _ratio(rate, baselines),
                _ratio(rate, [rates.get("fluid", 0)]),
                *cells,
            )
        console.print(table)
        for policy, num_allowed in results["num_allowed"].get(key, {}).items():
            if rates[policy] and num_allowed < LEAST_ALLOWED_MISSES:
                console.print(f"{key}, {policy}: only {num_allowed} misses were allowed")


def judge(results: Results, console: Console) -> int:
    """Say which claims hold; returns how many do not.

    A claim about what was not measured is left out.
    """
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
    name, _, constants = key.partition("/")[0].partition("@")
    of_fluid = ("cost_aware / fluid", "cost_aware", ("fluid",), 0.92 if constants else 0.90)
    if name not in ("issue-1", "issue-5"):
        return [loses_nowhere]
    return [of_fluid, loses_nowhere, *(() if constants else (beats_paper,))]


def _ratio(rate: float, others: Sequence[float]) -> str:
    return f"{rate / max(others):.2f}" if others and max(others) else "-"


if __name__ == "__main__":
    typer.run(main)
