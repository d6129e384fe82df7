"""The figures of DynaPipe's paper from simulation, and its claims beside what holds here.

    python benchmarks/pipeline_figures.py [--quick] [--json PATH] [--processes N]

4 A100-PCIe-40GB as a pipeline, Qwen2.5-14B and 32B, fitted constants; docs/pipeline-figures.md has
the table. Nothing is timed on this machine. CRITERIA says when each claim holds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from machine import ROOT, describe, write_results
from rich.console import Console
from rich.progress import track

from control_plane.scheduler.pipeline.layer_policies import LayerPolicy, Split
from control_plane.scheduler.pipeline.predictor import PassTimes
from nanocp.simulator.outcome import Slo
from nanocp.simulator.pipeline.outcome import PipelineOutcome
from nanocp.simulator.pipeline.pipeline_file import load_pipeline_file
from nanocp.simulator.pipeline.simulation import SPREAD, PipelineSimulation, PipelineTrial
from nanocp.simulator.workload import Workload
from nanocp.simulator.workload_request import WorkloadRequest

AZURE = f"azure:{ROOT / 'benchmarks/traces/azure_2023_conv_200.csv'}"
WORKLOADS = {"ShareGPT": "sharegpt", "Azure": AZURE}
MODELS = {"14B": "a100x4-qwen2.5-14b", "32B": "a100x4-qwen2.5-32b"}
# The paper's Table 2 is a picture: these are ours.
SLOS = {"14B": Slo(100_000, 2_000_000), "32B": Slo(200_000, 4_000_000)}
ATTAINMENT = 0.9
STATICS = {
    "14B": ("even", "static:12,12,13,11", "static:12,13,13,10", "static:13,13,13,9"),
    "32B": ("even", "static:16,17,17,14", "static:17,17,17,13", "static:17,17,18,12"),
}
"""Layouts with k = 0, 1, 2, ... layers less in the last stage: their index is k."""
OUTPUTS = (1, 64, 512)
"""Output lengths of Figure 5; its prompts have 512 tokens."""
WINDOWS = (1, 25, 100, 100_000)
"""Windows of Figure 6; the last one never lets a layer move."""
TCP = {"link_gb_per_s": 1.0, "hop_us": 300.0}
"""Between processes of a host by TCP on loopback; assumed."""

CRITERIA = {
    "capacity": "14B ShareGPT: level's rate at 90% SLO is 1.12 to 1.19 of gLLM's",
    "capacity bound": "and at least 0.95 of what whole layers allow at the run's r",
    "latency": "at 0.9 of gLLM's capacity E2EL is lower by 8% or more, all four",
    "latency at most": "somewhere up to 1.05 of gLLM's capacity it is lower by 30% or more",
    "ShareGPT above Azure": "14B: the gain on ShareGPT is above that on Azure",
    "14B above 32B": "ShareGPT: the gain of 14B is above that of 32B",
    "best static": "the best static k does not fall as outputs grow",
    "output 1": "even is the best static layout at output 1",
    "level near best": "level is within 3% of the best static layout at every output",
    "window 1 costs": "32B: window 1 costs 15% or more over the best static layout",
    "window 1 moves": "window 1 makes 10 times the changes of window 25, or more",
    "window 25": "window 25 is within 3% of the best static layout",
    "window never": "a window that never moves a layer is worse than 25",
    "TCP": "the gain over TCP is smaller than within a host, and above half of it",
    "r": "the mean r of 14B and 32B on ShareGPT is 3.09, +-5%",
    "memory": "32B: room for 19 layers instead of 16 is 7.5% of the memory, +-1 point",
    "move": "a moved layer's KV takes 100 ms at most, +25%",
    "spread": "moving layers has a lower E2EL than sampling spread over stages in any way",
    "control greedy": "nothing moves where sampling costs 0.1 of a layer",
    "control shuffled": "predictions that are shuffled lose 3% or more against level",
    "control free": "with KV priced at 0 and window 1, 3 times the changes of window 25 or more",
    "control one": "one stage with its memory: level, even and the bound are equal within 0.1%",
}
"""When each claim holds, written before the first full run."""


@dataclass(frozen=True)
class PipelineRun:
    """One run; the rate is in requests a second."""

    model: str
    workload: str
    rate: float
    policy: str = "level"
    passes: str = "ours"
    window: int = 25
    seconds: float = 60.0
    links: str = ""
    control: str = ""


@dataclass(frozen=True)
class PipelinePlan:
    """Which runs there are, by their place in the figures, and how long, in simulated seconds."""

    rates: dict[tuple[str, str], tuple[float, ...]]
    workloads: dict[str, str]
    """Workloads by what the claims call them."""
    seconds: float
    long_seconds: float
    """Of the pair of runs at the highest rate of 14B on ShareGPT."""

    def at(self, model: str, workload: str, rate: float, policy: str, **options: Any) -> Any:
        """A run of a workload."""
        name = self.workloads.get(workload, workload)
        return PipelineRun(model, name, rate, policy, seconds=self.seconds, **options)

    def near(self, model: str) -> tuple[str, str, float]:
        """Where policies are compared on ShareGPT: the rate in the middle."""
        rates = self.rates[model, "ShareGPT"]
        return model, "ShareGPT", rates[len(rates) // 2]

    def output(self, tokens: int, policy: str) -> PipelineRun:
        """A run of Figure 5, at about 0.8 of what 14B sustains."""
        rate = 0.8 / (512 / 28_000 + tokens / 7_500)
        return self.at("14B", f"fixed:512:{tokens}", round(rate, 1), policy)

    def long(self, policy: str, passes: str) -> PipelineRun:
        """A long run at the highest rate."""
        rate = self.rates["14B", "ShareGPT"][-1]
        run = self.at("14B", "ShareGPT", rate, policy, passes=passes)
        return replace(run, seconds=self.long_seconds)

    def controls(self) -> dict[str, PipelineRun]:
        """Runs in which something is taken away."""
        near = self.near("14B")
        controls = {
            name: self.at(*near, "level", control=name) for name in ("greedy", "shuffled", "free")
        }
        controls["free"] = replace(controls["free"], window=1)
        for policy in ("level", "even", "fluid"):
            controls[f"one {policy}"] = self.at("14B", "fixed:200:20", 5.0, policy, control="one")
        return controls

    def tasks(self) -> Iterator[PipelineRun]:
        """Every run; some are asked for by more than one claim."""
        for (model, workload), rates in self.rates.items():
            for rate in rates:
                yield self.at(model, workload, rate, "even", passes="gllm")
                yield self.at(model, workload, rate, "level")
        for model in MODELS:
            for policy in (*STATICS[model], "delta", "fluid"):
                yield self.at(*self.near(model), policy)
        for passes in ("vllm", "sarathi", "no_mixing"):
            yield self.at(*self.near("14B"), "even", passes=passes)
        yield from (self.at(*self.near("14B"), policy) for policy in SPREAD)
        for tokens in OUTPUTS:
            yield from (self.output(tokens, policy) for policy in (*STATICS["14B"], "level"))
        yield from (self.at(*self.near("32B"), "level", window=window) for window in WINDOWS)
        yield self.at(*self.near("14B"), "even", passes="gllm", links="tcp")
        yield self.at(*self.near("14B"), "level", links="tcp")
        yield self.long("even", "gllm")
        yield self.long("level", "ours")
        yield from self.controls().values()


FULL = PipelinePlan(
    {
        ("14B", "ShareGPT"): (55.0, 64.0, 74.0),
        ("14B", "Azure"): (11.0, 14.0, 17.0),
        ("32B", "ShareGPT"): (24.0, 30.0, 36.0),
        ("32B", "Azure"): (5.5, 7.5, 9.5),
    },
    WORKLOADS,
    12.0,
    30.0,
)
QUICK = PipelinePlan(
    {key: rates[1:2] for key, rates in FULL.rates.items()},
    dict.fromkeys(WORKLOADS, "fixed:300:15"),
    0.3,
    0.3,
)


def play(task: PipelineRun) -> tuple[PipelineRun, PipelineOutcome]:
    """Run it. A quarter of the time is warm-up."""
    file = load_pipeline_file(MODELS[task.model])
    costs = file.costs_of("fitted")
    if task.links == "tcp":
        costs = replace(costs, **TCP)
    if task.control == "greedy":
        costs = replace(costs, sampled_us=0.0, sampling_us=45.0)
    file = replace(file, costs={"fitted": costs})
    if task.control == "one":
        file = replace(file, num_stages=1, memory=replace(file.memory, hbm_gb=160.0))
    trial = PipelineTrial(
        file,
        task.policy,
        passes=task.passes,
        layout_window=task.window,
        moves_are_free=task.control == "free",
        warm_up_us=round(task.seconds * 0.25e6),
        slo=SLOS[task.model],
    )
    workload = Workload(task.workload, task.rate, seed=1)

    def is_in_time(request: WorkloadRequest) -> bool:
        return request.arrival_us < task.seconds * 1e6

    simulation = PipelineSimulation(trial)
    if task.control == "shuffled":
        layouts = simulation.scheduler.layouts
        layouts._policy = Shuffled(layouts._policy)
    requests = workload.requests(file.max_model_len)
    return task, simulation.run(takewhile(is_in_time, requests))


class Shuffled:
    """A layer policy that gets the predictions of other passes than the one it is asked about."""

    def __init__(self, policy: LayerPolicy) -> None:
        self._policy = policy
        self._random = Random(0)
        self._seen: list[PassTimes] = []

    def wish(self, split: Split, times: PassTimes, number: int, num_frames: int) -> Split:
        """See LayerPolicy."""
        self._seen.append(times)
        layer, sample = self._random.choice(self._seen), self._random.choice(self._seen)
        # A layer's time and that of sampling are of two passes, and one in two is turned round.
        mixed = PassTimes(layer.layer_us, sample.sample_us)
        if self._random.random() < 0.5:
            mixed = PassTimes(mixed.sample_us or mixed.layer_us, mixed.layer_us)
        return self._policy.wish(split, mixed, number, num_frames)


class PipelineClaim(NamedTuple):
    """What the paper says, what is found here, and whether the criterion holds."""

    name: str
    criterion: str
    here: str
    holds: bool


class PipelineClaims:
    """The claims of a plan's runs."""

    def __init__(self, plan: PipelinePlan, runs: dict[PipelineRun, PipelineOutcome]) -> None:
        self.plan = plan
        self.claims: list[PipelineClaim] = []
        self._runs = runs

    def judge(self) -> None:
        """Judge all of them."""
        self._capacity()
        self._latency()
        self._outputs()
        self._windows()
        self._tcp()
        self._numbers()
        self._spread()
        self._controls()

    def _claim(self, name: str, here: str, holds: bool) -> None:
        self.claims.append(PipelineClaim(name, CRITERIA[name], here, holds))

    def _near(self, model: str, policy: str, **options: Any) -> PipelineOutcome:
        return self._runs[self.plan.at(*self.plan.near(model), policy, **options)]

    def _points(
        self, model: str, workload: str, read: Callable[[PipelineOutcome], float], is_ours: bool
    ) -> list[tuple[float, float]]:
        """(rate, what is read of the outcome) of level or of gLLM."""
        how = {"policy": "level"} if is_ours else {"policy": "even", "passes": "gllm"}
        rates = self.plan.rates[model, workload]
        return [
            (rate, read(self._runs[self.plan.at(model, workload, rate, **how)])) for rate in rates
        ]

    def _capacity_of(self, model: str, workload: str, is_ours: bool) -> float:
        return capacity(self._points(model, workload, lambda one: one.attainment, is_ours))

    def gain(self, model: str, workload: str, rate: float) -> float:
        """Share by which level's E2EL is below gLLM's at a rate; linear between the plan's."""
        ours, theirs = (
            between(self._points(model, workload, lambda one: one.e2el_ms_mean, is_ours), rate)
            for is_ours in (True, False)
        )
        return 1 - ours / theirs

    def _capacity(self) -> None:
        ours, theirs = (self._capacity_of("14B", "ShareGPT", is_ours) for is_ours in (True, False))
        here = f"{ours:.1f} beside {theirs:.1f} requests/s: {ours / theirs:.3f}"
        self._claim("capacity", here, 1.12 <= ours / theirs <= 1.19)
        r = self._near("14B", "level").mean_r
        bound = (12 + r) / min(max(12 + n, 12 - 3 * n + r) for n in (0, 1, 2, 3))
        here = f"{ours / theirs:.3f} beside {bound:.3f} at r = {r:.2f}"
        self._claim("capacity bound", here, ours / theirs >= 0.95 * bound)

    def _latency(self) -> None:
        gains = {
            key: self.gain(*key, 0.9 * self._capacity_of(*key, False)) for key in self.plan.rates
        }
        here = ", ".join(f"{' '.join(key)} {gain:.1%}" for key, gain in gains.items())
        self._claim("latency", here, min(gains.values()) >= 0.08)
        long = [self._runs[self.plan.long(*how)] for how in (("level", "ours"), ("even", "gllm"))]
        most = 1 - long[0].e2el_ms_mean / long[1].e2el_ms_mean
        here = f"{most:.1%} at {self.plan.rates['14B', 'ShareGPT'][-1]:g}/s over "
        here += f"{self.plan.long_seconds:g} s"
        for key, rates in self.plan.rates.items():
            limit = 1.05 * self._capacity_of(*key, False)
            for rate in rates:
                if rate <= limit and self.gain(*key, rate) > most:
                    most = self.gain(*key, rate)
                    here = f"{most:.1%}: {' '.join(key)} at {rate:g}/s"
        self._claim("latency at most", here, most >= 0.3)
        share, azure = gains["14B", "ShareGPT"], gains["14B", "Azure"]
        self._claim("ShareGPT above Azure", f"{share:.1%} and {azure:.1%}", share > azure)
        large = gains["32B", "ShareGPT"]
        self._claim("14B above 32B", f"{share:.1%} and {large:.1%}", share > large)

    def _outputs(self) -> None:
        best, above = [], []
        for tokens in OUTPUTS:
            e2el = [self._runs[self.plan.output(tokens, p)].e2el_ms_mean for p in STATICS["14B"]]
            best.append(e2el.index(min(e2el)))
            level = self._runs[self.plan.output(tokens, "level")].e2el_ms_mean
            above.append(level / min(e2el) - 1)
        here = ", ".join(f"k = {k} at {n}" for k, n in zip(best, OUTPUTS, strict=True))
        self._claim("best static", here, best == sorted(best))
        self._claim("output 1", f"k = {best[0]}", best[0] == 0)
        here = ", ".join(f"{x:+.1%} at {n}" for x, n in zip(above, OUTPUTS, strict=True))
        self._claim("level near best", here, max(above) <= 0.03)

    def _windows(self) -> None:
        best = min(self._near("32B", policy).e2el_ms_mean for policy in STATICS["32B"])
        found = {window: self._near("32B", "level", window=window) for window in WINDOWS}
        cost = {window: one.e2el_ms_mean / best - 1 for window, one in found.items()}
        here = f"{cost[1]:+.1%}; waits for KV {found[1].stall_ms:.0f} ms"
        self._claim("window 1 costs", here, cost[1] >= 0.15)
        changes = {window: one.num_changes for window, one in found.items()}
        here = ", ".join(f"{n} with {window}" for window, n in changes.items())
        self._claim("window 1 moves", here, changes[1] >= 10 * max(changes[25], 1))
        self._claim("window 25", f"{cost[25]:+.1%}", cost[25] <= 0.03)
        here = f"{cost[100_000]:+.1%} beside {cost[25]:+.1%}"
        self._claim("window never", here, cost[100_000] > cost[25])

    def _tcp(self) -> None:
        gains = []
        for links in ("", "tcp"):
            level = self._near("14B", "level", links=links).e2el_ms_mean
            gains.append(
                1 - level / self._near("14B", "even", passes="gllm", links=links).e2el_ms_mean
            )
        here = f"{gains[1]:.1%} beside {gains[0]:.1%}"
        self._claim("TCP", here, gains[0] / 2 < gains[1] < gains[0])

    def _numbers(self) -> None:
        r = {model: self._near(model, "even").mean_r for model in MODELS}
        here = ", ".join(f"{model} {value:.2f}" for model, value in r.items())
        self._claim("r", here, all(abs(value / 3.09 - 1) <= 0.05 for value in r.values()))
        file = load_pipeline_file(MODELS["32B"])
        share = file.spare_layers * file.model.layer_mb / 1e3 / file.memory.hbm_gb
        frames = [self._near("32B", policy).num_frames for policy in ("even", "level")]
        here = f"{share:.1%} of the memory; {1 - frames[1] / frames[0]:.0%} of the frames"
        self._claim("memory", here, abs(share - 0.075) <= 0.01)
        level = self._near("14B", "level")
        costs = load_pipeline_file(MODELS["14B"]).costs_of("fitted")
        ms = level.moved_mb / costs.link_gb_per_s / max(level.num_moved_layers, 1)
        stall = level.stall_ms / max(level.num_moved_layers, 1)
        here = f"{ms:.0f} ms of its link, and {stall:.1f} ms that a stage waited"
        self._claim("move", here, 0 < ms <= 125)

    def _spread(self) -> None:
        names = ("level", *SPREAD)
        e2el = {policy: self._near("14B", policy).e2el_ms_mean for policy in names}
        here = ", ".join(f"{policy} {ms:,.0f} ms" for policy, ms in e2el.items())
        self._claim("spread", here, min(e2el, key=lambda policy: e2el[policy]) == "level")

    def _controls(self) -> None:
        found = {name: self._runs[run] for name, run in self.plan.controls().items()}
        level = self._near("14B", "level")
        here = f"{found['greedy'].num_changes} changes at r = {found['greedy'].mean_r:.2f}"
        self._claim("control greedy", here, found["greedy"].num_changes == 0)
        cost = found["shuffled"].e2el_ms_mean / level.e2el_ms_mean - 1
        here = f"{cost:+.1%}, {found['shuffled'].num_changes} changes"
        self._claim("control shuffled", here, cost >= 0.03)
        here = f"{found['free'].num_changes} beside {level.num_changes} changes, "
        here += f"{found['free'].moved_mb:,.0f} beside {level.moved_mb:,.0f} MB"
        is_thrashing = found["free"].num_changes >= 3 * max(level.num_changes, 1)
        self._claim("control free", here, is_thrashing)
        one = [found[f"one {policy}"].e2el_ms_mean for policy in ("level", "even", "fluid")]
        here = ", ".join(f"{ms:.2f} ms" for ms in one)
        self._claim("control one", here, max(one) <= 1.001 * min(one))

    def others(self) -> list[str]:
        """What no claim is about: other layouts and other ways of forming passes."""
        lines = []
        for model in MODELS:
            for policy in (*STATICS[model], "delta", "level", "fluid"):
                lines.append(line(f"{model} {policy}", self._near(model, policy)))
        for passes in ("gllm", "vllm", "sarathi", "no_mixing"):
            lines.append(line(f"14B even, {passes}", self._near("14B", "even", passes=passes)))
        lines += [line(f"14B {policy}", self._near("14B", policy)) for policy in SPREAD]
        return lines


def line(name: str, one: PipelineOutcome) -> str:
    """A row of the second table."""
    return (
        f"| {name} | {one.e2el_ms_mean:,.0f} | {one.tpot_ms_mean:.1f} | {one.ttft_ms_mean:,.0f} | "
        f"{one.attainment:.1%} | {one.bubble:.1%} | {one.num_changes} | {one.mean_r:.2f} |"
    )


def capacity(points: list[tuple[float, float]]) -> float:
    """The rate at which the attainment falls below ATTAINMENT; linear between rates.

    The first rate, if it is below there already, and the last one, if it never is.
    """
    for (rate, share), (higher, lower) in pairwise(points):
        if share < ATTAINMENT:
            return rate
        if lower < ATTAINMENT:
            return rate + (higher - rate) * (share - ATTAINMENT) / (share - lower)
    return points[-1][0]


def between(points: list[tuple[float, float]], rate: float) -> float:
    """The value at a rate, linear between rates; that of the nearest one outside of them."""
    for (low, value), (high, next_value) in pairwise(points):
        if low <= rate <= high:
            return value + (next_value - value) * (rate - low) / (high - low)
    return min(points, key=lambda point: abs(point[0] - rate))[1]


def markdown(claims: list[PipelineClaim]) -> str:
    """The table of docs/pipeline-figures.md."""
    rows = [f"| {c.criterion} | {c.here} | {'yes' if c.holds else '**no**'} |" for c in claims]
    return "\n".join(["| criterion | here | holds |", "|---|---|---|", *rows])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="runs of a second: under a minute, and no verdict"
    )
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="write the claims and what was found to PATH"
    )
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    plan = QUICK if options.quick else FULL
    tasks = list(dict.fromkeys(plan.tasks()))
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        done = track(
            pool.imap_unordered(play, tasks),
            total=len(tasks),
            description="simulating",
            console=Console(stderr=True),
        )
        runs = dict(done)
    figures = PipelineClaims(plan, runs)
    figures.judge()
    print(markdown(figures.claims))
    print("\n| what | E2EL ms | TPOT ms | TTFT ms | SLO | idle | changes | r |")
    print("|---|---|---|---|---|---|---|---|")
    print("\n".join(figures.others()))
    if options.quick:
        print("runs too short for verdicts", file=sys.stderr)
    if options.json:
        write_results(
            options.json, [claim._asdict() for claim in figures.claims], describe(load_before)
        )


if __name__ == "__main__":
    main()
