"""The highest rate that each policy sustains: 99% within TPOT 50 ms and TTFT 500 ms.

Enters: the simulator. Leaves: a table for each workload, which claims hold, and one object:
{"max_rate": {WORKLOAD: {POLICY: requests a second}}, "tpot_ms_p99": the same shape, and more of
that shape}; with other constants than the cluster file's default a workload is called
WORKLOAD@CONSTANTS. Does not know: how a policy decides.

Fluid and cost_aware are searched for. Of any other policy a run for each seed shows that it does
not sustain what cost_aware does, or as little of that as is claimed: that rate is in "fails_at". As
in a search, higher rates are taken to fail too. Only if one of these runs is sustained, the policy
is searched for.

Runs are those of `nanocp simulate sweep`: each begins as full as it would be after a long time. A
search that was interrupted goes on with --resume.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from benchmarks.kit.bench import BenchRun, bench
from benchmarks.simulated.scheduling_claims import (
    CLOSE,
    COST_AWARE,
    FLUID,
    POLICIES,
    RIVALS,
    Results,
    claims,
    least_ratio,
    show,
)
from nanocp.simulator.costs.cluster_file import ClusterFile, load_cluster_file
from nanocp.simulator.loads.workload import MIXES, Workload
from nanocp.simulator.sweep import NUM_SEEDS, Sweep, attempts, seeds_of, sweep
from nanocp.simulator.trial import Trial

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
    *("ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "tpot_ms_p99", "normalized_ms_p99"),
    *("kv_imbalance", "row_imbalance", "cp_share", "plan_ms_mean"),
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

    @property
    def key(self) -> str:
        """Key of the workload with its constants."""
        constants = self.trial.constants
        return f"{self.name}@{constants}" if constants else self.name

    @property
    def policy(self) -> str:
        """Name of the policy in the results."""
        return self.trial.policy

    def near(self, results: Results) -> SearchTask:
        """The task with what is known of its neighbours.

        If cost_aware is known, its rival has bounds. Else the search begins at the rate of the last
        policy of the same row.
        """
        rates, policy = results["max_rate"], self.policy
        row = rates.get(self.key, {})
        each = [row.get(COST_AWARE, 0)] * self.num_seeds
        by_seed = results["rates_by_seed"].get(self.key, {}).get(COST_AWARE, each)
        if policy in RIVALS and all(by_seed):
            least = least_ratio(self.key, policy)
            return replace(self, bounds=tuple(rate / least for rate in by_seed))
        known = [rate for rate in reversed(row.values()) if rate]
        rate = next(iter(known), self.trial.workload.rate_per_s)
        return replace(self, trial=self.trial.at_rate(rate))


@dataclass(frozen=True)
class Question:
    """Which searches, and how long their runs are."""

    file: ClusterFile
    names: Sequence[str]
    constants: Sequence[str]
    policies: Sequence[str]
    mooncake: Path | None
    warm_up_s: float
    measure_s: float | None
    """None: as long as `simulate sweep`."""
    num_seeds: int
    precision: float | None
    """None: as the workload asks."""

    def tasks(self) -> list[SearchTask]:
        """One for each row and policy, row after row."""
        return [
            SearchTask(
                name,
                self._trial(name, policy, constants),
                self.num_seeds,
                self.precision or (CLOSE_PRECISION if name in CLOSE else PRECISION),
            )
            for constants in self.constants
            for name in self.names
            for policy in self.policies
        ]

    def _trial(self, name: str, policy: str, constants: str) -> Trial:
        measure_s = self.measure_s or MEASURE_S.get(name)
        trace = name if name in MIXES else f"mooncake:{self.mooncake}"
        scale = 8.0 if name.endswith("-x8") else 1.0
        return Trial(
            self.file,
            policy,
            Workload(trace, FIRST_RATES[name], length_scale=scale),
            constants=constants,
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


@bench(
    "1% long, fewer policies, one seed of short runs: a minute. Checks that the benchmark runs; "
    "nothing is judged."
)
def main(
    run: BenchRun,
    cluster: Annotated[str, "Name or path of a cluster file."] = "h200x32-deepseek-v3",
    constants: Annotated[
        list[str] | None, "Sets of them; the cluster file's default if not given."
    ] = None,
    workload: Annotated[
        list[str] | None,
        f"Of {', '.join(FIRST_RATES)}; all if not given, the trace's only with --mooncake.",
    ] = None,
    policy: Annotated[
        list[str] | None,
        "Policies; all if not given. Where cost_aware's rate is not known, each is searched for.",
    ] = None,
    mooncake: Annotated[Path | None, "The whole Mooncake trace (the sample says little)."] = None,
    processes: Annotated[int, "Searches at a time."] = 2,
    resume: Annotated[bool, "Keep what the --json file has, and search for the rest."] = False,
) -> None:
    """Search, policy by policy, for the highest rate at which 99% of requests meet the SLO."""
    all_names = [name for name in FIRST_RATES if mooncake or name in MIXES]
    for name in workload or ():
        if name not in FIRST_RATES:
            run.refuse(f"--workload: {name} is none of {', '.join(FIRST_RATES)}")
        if name not in all_names:
            run.refuse(f"--mooncake: {name} needs the trace")
    lengths = {"warm_up_s": 40.0, "measure_s": None, "num_seeds": NUM_SEEDS}
    if run.is_quick:
        lengths = {"warm_up_s": 15.0, "measure_s": 15.0, "num_seeds": 1}
    question = Question(
        file=load_cluster_file(cluster),
        names=workload or (["issue-1"] if run.is_quick else all_names),
        constants=constants or [""],
        policies=policy or (QUICK_POLICIES if run.is_quick else POLICIES),
        mooncake=mooncake,
        precision=QUICK_PRECISION if run.is_quick else None,
        **lengths,
    )
    trace = mooncake and mooncake.name
    about = {"cluster": cluster, "mooncake": trace, "seed": 0, "measure_s_of": MEASURE_S}
    run.about |= {"is_quick": run.is_quick, **lengths, **about}
    known: Results = {}
    if resume and run.path is not None and run.path.exists():
        known = json.loads(run.path.read_text())
    results = collect(question.tasks(), known, processes, run)
    show(results, run)
    if not run.is_quick:
        run.judge(claims(results))


def collect(
    tasks: Sequence[SearchTask], results: Results, processes: int, run: BenchRun
) -> Results:
    """Means over the seeds, by what is measured, workload and policy, in the order of the tasks.

    `results` has what is known already; what is known is written whenever a search ends.
    """
    for name in ("max_rate", "rates_by_seed", "fails_at", *COUNTS, *MEASURES, "cpu_s"):
        results.setdefault(name, {})
    known = (results["max_rate"], results["fails_at"])
    missing = [
        task for task in tasks if not any(task.policy in of.get(task.key, {}) for of in known)
    ]
    for answer in run.track(_answers(missing, results, processes), "searching", len(missing)):
        _note(results, answer, run.say)
        run.write(results)
    results = {name: _in_order(by_key, tasks) for name, by_key in results.items()}
    run.write(results)
    return results


def _answers(missing: list[SearchTask], results: Results, processes: int) -> Iterator[SearchAnswer]:
    """Search for so many at a time, each with what is known by then."""
    running: dict[Future[SearchAnswer], SearchTask] = {}
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        while missing or running:
            while len(running) < processes and (task := take_ready(missing, running.values())):
                running[pool.submit(search, task.near(results))] = task
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                del running[future]
                yield future.result()


def take_ready(missing: list[SearchTask], running: Iterable[SearchTask]) -> SearchTask | None:
    """Take the first task that need not wait for its row's cost_aware; None if all must."""
    undecided = {task.key for task in (*missing, *running) if task.policy == COST_AWARE}
    for task in missing:
        if task.policy not in RIVALS or task.key not in undecided:
            missing.remove(task)
            return task
    return None


def _note(results: Results, answer: SearchAnswer, say: Callable[[str], None]) -> None:
    """Print what a task has found, and put it among the results."""
    task, found = answer.task, answer.found
    policy = task.policy
    rates = [one.rate_per_s for one in found.seeds] if found else task.bounds
    what = f"{task.key} {policy}: {'' if found else 'less than '}"
    say(f"{what}{', '.join(f'{rate:.2f}' for rate in rates)} ({answer.cpu_s:.0f} s)")
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
        results[name].setdefault(task.key, {})[policy] = value


def _in_order(
    by_key: dict[str, dict[str, Any]], tasks: Sequence[SearchTask]
) -> dict[str, dict[str, Any]]:
    ranks = {(task.key, task.policy): n for n, task in enumerate(tasks)}
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
    main()
