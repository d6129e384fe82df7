"""The highest rate that each policy sustains: 99% within TPOT 50 ms and TTFT 500 ms.

    python benchmarks/scheduling_quality.py [--quick] [--mooncake FILE] [--json PATH]

Enters: the simulator. Leaves: a table for each workload, which claims hold, and one object:
{"max_rate": {WORKLOAD: {POLICY: requests a second}}, "tpot_ms_p99": the same shape, and more of
that shape}; under the peak constants a workload is called WORKLOAD@peak, in the absorbed wire form
WORKLOAD/absorbed. Exit status 1 if a claim does not hold. Does not know: how a policy decides.

Fluid and cost_aware are searched for, also with a target for the time per token where a claim says
so (POLICY+tpot). Of any other policy a run for each seed shows that it does
not sustain what cost_aware does, or 1/1.15 of that where so much is claimed: that rate is in
"fails_at". As in a search, higher rates are taken to fail too. Only if one of these runs is
sustained, the policy is searched for.

Runs are those of `nanocp simulate sweep`: each begins as full as it would be after a long time. A
search that was interrupted goes on with --resume.
"""

from __future__ import annotations

import json as json_format
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
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
from scheduling_claims import (
    CLOSE,
    COST_AWARE,
    FLUID,
    ON_TARGET,
    POLICIES,
    RIVALS,
    Results,
    judge,
    least_ratio,
    show,
)

from nanocp.simulator.cluster_file import ClusterFile, load_cluster_file
from nanocp.simulator.outcome import Slo
from nanocp.simulator.sweep import NUM_SEEDS, Sweep, attempts, seeds_of, sweep
from nanocp.simulator.trial import Trial
from nanocp.simulator.workload import MIXES, Workload

FORMS = ("latent", "absorbed")
"""Wire forms: the service's default, and the paper's."""
QUICK_POLICIES = (FLUID, COST_AWARE, "dual_balanced", "least_batch", "uniform_cp:4")
FIRST_RATES = {
    "issue-0": 48.0,
    "issue-1": 38.0,
    "issue-5": 21.0,
    "issue-100": 1.8,
    "mooncake": 55.0,
    "mooncake-x8": 18.0,
}
"""Where a search begins if nothing is known of its neighbours."""
MEASURE_S = {"mooncake-x8": 200.0}
"""Seconds measured of a workload for which less than these would allow fewer than 20 misses, since
it comes in bursts."""
PRECISION, CLOSE_PRECISION, QUICK_PRECISION = 1.02, 1.005, 1.1
"""A rate is found to this factor: to the second where a claim is about what separates two rates,
and to the third in a quick run."""
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
num_missed and num_allowed, sums over the seeds, cpu_s, processor seconds that a search took,
rates_by_seed, and fails_at: the mean over the seeds of a rate that none of them sustains."""
COUNTS = {
    "num_judged": "num_judged",
    "num_missed": "num_missed",
    "num_allowed": "num_allowed_misses",
}
"""Name in the results -> field of an outcome."""


@dataclass(frozen=True)
class SearchTask:
    """The searches of one workload and policy, seed after seed."""

    name: str
    """Name of the workload in the results."""
    trial: Trial
    num_seeds: int
    precision: float
    bounds: tuple[float, ...] = ()
    """A rate for each seed. If none is sustained, that is the answer, and nothing is searched."""
    more_forms: tuple[str, ...] = ()
    """Other wire forms that have the same answer: fluid sends nothing, in whatever form."""

    @property
    def key(self) -> str:
        """Key of the workload with its constants and wire form."""
        return self._key(self.trial.wire_form)

    @property
    def keys(self) -> list[str]:
        """Keys of all workloads that have the answer."""
        return [self.key, *map(self._key, self.more_forms)]

    @property
    def policy(self) -> str:
        """Name of the policy in the results, and with a target for its time per token."""
        return self.trial.policy + (ON_TARGET if self.trial.file.tpot_target_ms else "")

    @property
    def is_of_rival(self) -> bool:
        """Whether it need only be known that the policy sustains less than cost_aware."""
        return self.policy in RIVALS

    def _key(self, form: str) -> str:
        constants = self.trial.constants
        key = self.name if constants == "fitted" else f"{self.name}@{constants}"
        return key if form == FORMS[0] else f"{key}/{form}"

    def near(self, results: Results) -> SearchTask:
        """The task with what is known of its neighbours.

        If cost_aware is known, its rival has bounds. Else the search begins at the rate of the same
        policy in another wire form, or else of the last policy of the same row.
        """
        rates, policy = results["max_rate"], self.policy
        row = rates.get(self.key, {})
        each = [row.get(COST_AWARE, 0)] * self.num_seeds
        by_seed = results["rates_by_seed"].get(self.key, {}).get(COST_AWARE, each)
        if self.is_of_rival and all(by_seed):
            least = least_ratio(self.key, policy)
            return replace(self, bounds=tuple(rate / least for rate in by_seed))
        known = [of[policy] for form in FORMS if policy in (of := rates.get(self._key(form), {}))]
        known += reversed(row.values())
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
        more = {"mooncake": mooncake, "measure_s_of": MEASURE_S}
        return {name: getattr(self, name) for name in names} | more

    def tasks(self) -> list[SearchTask]:
        """One for each row and policy, row after row; fluid has one for all wire forms."""
        return [
            SearchTask(
                name,
                self._trial(name, policy, constants, form),
                self.num_seeds,
                self._precision(name),
                more_forms=tuple(self.forms[1:]) if policy.startswith(FLUID) else (),
            )
            for form in self.forms
            for constants in self.constants
            for name in self.names
            for policy in self.policies
            if form == self.forms[0] or not policy.startswith(FLUID)
            if name in CLOSE or not policy.endswith(ON_TARGET)
        ]

    def _precision(self, name: str) -> float:
        if self.is_quick:
            return QUICK_PRECISION
        return CLOSE_PRECISION if name in CLOSE else PRECISION

    def _trial(self, name: str, policy: str, constants: str, form: str) -> Trial:
        measure_s = self.measure_s or MEASURE_S.get(name)
        target_ms = Slo().tpot_us // 1000 if policy.endswith(ON_TARGET) else 0
        return Trial(
            replace(self.file, tpot_target_ms=target_ms),
            policy.removesuffix(ON_TARGET),
            _workload(name, self.mooncake, self.seed),
            constants=constants,
            wire_form=form,
            warm_up_us=round(self.warm_up_s * 1e6),
            measure_us=None if measure_s is None else round(measure_s * 1e6),
        )


@dataclass(frozen=True)
class SearchAnswer:
    """What a task has found."""

    task: SearchTask
    found: Sweep | None
    """None: no seed sustains its bound."""
    cpu_s: float
    """Processor seconds."""


def search(task: SearchTask) -> SearchAnswer:
    """Find the highest sustained rate of each seed, unless none sustains its bound."""
    began_s, trial = time.process_time(), task.trial
    seeds = seeds_of(trial, task.num_seeds)
    runs = (attempts(seed)(rate) for seed, rate in zip(seeds, task.bounds, strict=False))
    found = None
    if not task.bounds or any(outcome.is_sustained for outcome in runs):
        first = trial.at_rate(task.bounds[0]) if task.bounds else trial
        found = sweep(first, precision=task.precision, num_seeds=task.num_seeds)
    return SearchAnswer(task, found, time.process_time() - began_s)


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
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Policies; all if not given. Where cost_aware's rate is not known, each is "
            "searched for."
        ),
    ] = None,
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
    for name in ("max_rate", "rates_by_seed", "fails_at", *COUNTS, *MEASURES, "cpu_s"):
        results.setdefault(name, {})
    known = (results["max_rate"], results["fails_at"])
    missing = [
        task
        for task in tasks
        if not all(any(task.policy in of.get(key, {}) for of in known) for key in task.keys)
    ]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    running: dict[Future[SearchAnswer], SearchTask] = {}
    with (
        ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool,
        Progress(*columns, console=console) as progress,
    ):
        bar = progress.add_task("searching", total=len(missing))
        while missing or running:
            while len(running) < processes and (task := take_ready(missing, running.values())):
                running[pool.submit(search, task.near(results))] = task
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                del running[future]
                _note(results, future.result(), progress.console)
                keep(results)
                progress.advance(bar)
    results = {name: _in_order(by_key, tasks) for name, by_key in results.items()}
    keep(results)
    return results


def take_ready(missing: list[SearchTask], running: Iterable[SearchTask]) -> SearchTask | None:
    """Take the first task that need not wait for its row's cost_aware; None if all must."""
    undecided = {task.key for task in (*missing, *running) if task.policy == COST_AWARE}
    for task in missing:
        if not task.is_of_rival or task.key not in undecided:
            missing.remove(task)
            return task
    return None


def _note(results: Results, answer: SearchAnswer, console: Console) -> None:
    """Print what a task has found, and put it among the results."""
    task, found = answer.task, answer.found
    policy = task.policy
    rates = [one.rate_per_s for one in found.seeds] if found else task.bounds
    what = f"{task.key} {policy}: {'' if found else 'less than '}"
    console.print(f"{what}{', '.join(f'{rate:.2f}' for rate in rates)} ({answer.cpu_s:.0f} s)")
    results["cpu_s"].setdefault(task.key, {})[policy] = round(answer.cpu_s, 1)
    if found is None:
        results["fails_at"].setdefault(task.key, {})[policy] = round(fmean(rates), 3)
        return
    numbers: dict[str, Any] = {"max_rate": round(found.rate_per_s, 3)}
    numbers["rates_by_seed"] = [round(rate, 3) for rate in rates]
    for name, field in COUNTS.items():
        numbers[name] = sum(getattr(outcome, field) for outcome in found.outcomes)
    for name in MEASURES if found.outcomes else ():
        numbers[name] = round(fmean(getattr(one, name) for one in found.outcomes), 4)
    for name, value in numbers.items():
        for key in task.keys:
            results[name].setdefault(key, {})[policy] = value


def _in_order(
    by_key: dict[str, dict[str, Any]], tasks: Sequence[SearchTask]
) -> dict[str, dict[str, Any]]:
    ranks = {(key, task.policy): n for n, task in enumerate(tasks) for key in task.keys}
    last = len(ranks)
    values = [
        ((key, policy), value)
        for key, policies in by_key.items()
        for policy, value in policies.items()
    ]
    ordered: dict[str, dict[str, Any]] = {}
    for (key, policy), value in sorted(values, key=lambda entry: ranks.get(entry[0], last)):
        ordered.setdefault(key, {})[policy] = value
    return ordered


if __name__ == "__main__":
    typer.run(main)
