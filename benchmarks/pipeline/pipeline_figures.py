"""The figures of DynaPipe's paper from simulation, and its claims beside what holds here.

4 A100-PCIe-40GB as a pipeline, Qwen2.5-14B and 32B, fitted constants;
docs/research/pipeline-figures.md has the table. Nothing is timed on this machine. CRITERIA says
when each claim holds.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

from benchmarks.kit.bench import BenchRun, at_least, bench
from benchmarks.pipeline.pipeline_runs import (
    FULL,
    MODELS,
    OUTPUTS,
    QUICK,
    STATICS,
    WINDOWS,
    PipelineRun,
    PlannedRuns,
    play,
)
from nanocp.simulator.pipeline.outcome import PipelineOutcome
from nanocp.simulator.pipeline.pipeline_file import load_pipeline_file
from nanocp.simulator.pipeline.simulation import SPREAD

ATTAINMENT = 0.9
LEAST_HELD = 12
"""Claim: as many criteria hold as docs/research/pipeline-figures.md says."""
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


class PipelineClaim(NamedTuple):
    """What the paper says, what is found here, and whether the criterion holds."""

    name: str
    criterion: str
    here: str
    holds: bool


class PipelineClaims:
    """The claims of a plan's runs."""

    def __init__(self, plan: PlannedRuns, runs: dict[PipelineRun, PipelineOutcome]) -> None:
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
        found = {window: self._near("32B", "delta", window=window) for window in WINDOWS}
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


@bench("Runs of a second: under a minute; judges nothing.")
def main(run: BenchRun, processes: Annotated[int, "Runs at a time."] = 1) -> None:
    """Simulate, and print the tables of docs/research/pipeline-figures.md."""
    plan = QUICK if run.is_quick else FULL
    figures = PipelineClaims(plan, dict(run.play(plan.tasks(), play, processes)))
    figures.judge()
    run.keep(*(claim._asdict() for claim in figures.claims))
    run.markdown([{name: row[name] for name in list(row)[1:]} for row in run.results])
    run.say("\n| what | E2EL ms | TPOT ms | TTFT ms | SLO | idle | changes | r |")
    run.say("\n".join(["|---|---|---|---|---|---|---|---|", *figures.others()]))
    num_held = sum(claim.holds for claim in figures.claims)
    run.judge([at_least("criteria that hold", num_held, LEAST_HELD)], run.too_quick)


if __name__ == "__main__":
    main()
