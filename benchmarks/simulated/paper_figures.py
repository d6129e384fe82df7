"""The figures of the paper's section 6 from simulation, and its claims beside what holds here.

DeepSeek-V3 on 32 H200, costs of measured operators, the paper's wire form. Writes the pictures of
docs/research/paper-figures.md and prints its table. Figure 16 has this machine's scheduler.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from matplotlib.figure import Figure

from benchmarks.kit.bench import BenchRun, at_least, bench
from benchmarks.kit.machine import ROOT
from benchmarks.simulated import paper_pictures
from nanocp.simulator.costs.cluster_file import load_cluster_file
from nanocp.simulator.loads.workload import STATIC, Workload
from nanocp.simulator.outcome import ATTAINMENT, Outcome
from nanocp.simulator.reports import pictures
from nanocp.simulator.reports.timeline import TimelineRecorder
from nanocp.simulator.trial import Trial

CLUSTER, CONSTANTS = "h200x32-deepseek-v3", "operators"
UNIFORM = ("uniform_cp:2", "uniform_cp:4", "uniform_cp:8")
BASELINES = ("least_batch", "least_cache", *UNIFORM)
OURS = ("dual_balanced", "cost_aware")
RATES = {
    "issue-0": (20.0, 25.0, 30.0, 35.0, 40.0, 45.0, 50.0),
    "issue-1": (8.0, 12.0, 16.0, 20.0, 24.0, 28.0, 32.0, 36.0),
    "issue-5": (4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0, 18.0),
    "issue-100": (0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6),
}
"""Requests a second of Figure 12."""
COMPARED = {"issue-0": 30.0, "issue-1": 30.0, "issue-5": 12.0}
"""Rates for Figures 14 and 15, which the paper does not give."""
HIGH_LOAD = ("issue-5", 24.0)
"""More than the cluster's memory holds."""
PEAK = ("issue-1", 40.0)
"""About 2,279 requests running, as in Figure 18."""
ROWS = (32, 64, 128, 192, 240)
"""About, of Figure 16. Its requests are short, issue-0: with 1% long the memory ends at 130 rows an
instance."""
STEADY_TPOT_US = 45_000
SEEDS = (1, 2, 3)
"""Seeds of Figure 12; the other figures have the first. One seed has about 70 long requests at a
rate, and which of two policies misses one of them is chance."""
LEAST_HELD = 15
"""Claim: as many claims of the paper hold as docs/research/paper-figures.md says."""


@dataclass(frozen=True)
class OneRun:
    """One run; the rate is in requests a second."""

    policy: str
    workload: str
    rate: float
    warm_up_s: float
    measure_s: float
    seed: int = SEEDS[0]
    begins_at_us: int = 0
    """The run begins with what runs at this time per token. 0: at the policy's own."""


class PaperClaim(NamedTuple):
    """What the paper says of a figure, what is found here, and whether it agrees."""

    figure: str
    claim: str
    paper: str
    here: str
    holds: bool


@dataclass(frozen=True)
class Plans:
    """Which runs there are and how long, in simulated seconds."""

    warm_up_s: float
    measure_s: float
    rates: dict[str, tuple[float, ...]]
    baselines: tuple[str, ...]
    seeds: tuple[int, ...] = SEEDS

    def mix(self, policy: str, workload: str, rate: float, seed: int = SEEDS[0]) -> OneRun:
        """A run of a mix."""
        return OneRun(policy, workload, rate, self.warm_up_s, self.measure_s, seed)

    def seeded(self, policy: str, workload: str, rate: float) -> list[OneRun]:
        """The runs of a mix, one for each seed of Figure 12."""
        return [self.mix(policy, workload, rate, seed) for seed in self.seeds]

    def static(self, policy: str, scenario: str) -> OneRun:
        """A run of the static scenario, which has no rate. Its transfers take less than 3 s."""
        return OneRun(policy, scenario, 1.0, 3.0, 1.0)

    def steady(self, policy: str, rows: int) -> OneRun:
        """A run with about `rows` rows an instance; a request generates 1,000 tokens on average."""
        rate = 32 * rows / (1000 * STEADY_TPOT_US / 1e6)
        measure_s = min(5.0, self.measure_s)
        return OneRun(policy, "issue-0", rate, 2.0, measure_s, begins_at_us=STEADY_TPOT_US)

    def tasks(self) -> Iterator[OneRun]:
        """Every run; some are asked for by more than one figure."""
        policies = (*self.baselines, *OURS)
        for workload, rates in self.rates.items():
            for policy in policies:
                for rate in rates:
                    yield from self.seeded(policy, workload, rate)
        for workload, rate in COMPARED.items():
            yield from (self.mix(policy, workload, rate) for policy in policies)
        for policy in ("least_batch", *OURS):
            yield self.mix(policy, *HIGH_LOAD)
            yield self.mix(policy, *PEAK)
            yield from (self.steady(policy, rows) for rows in ROWS)
        for policy in ("least_batch", *UNIFORM, *OURS):
            yield from (self.static(policy, scenario) for scenario in STATIC)


FULL = Plans(20.0, 60.0, RATES, BASELINES)
QUICK = Plans(
    *(1.0, 4.0, {"issue-1": RATES["issue-1"][1::3]}),
    ("least_batch", "least_cache", "uniform_cp:8"),
    SEEDS[:1],
)


def play(task: OneRun) -> tuple[OneRun, TimelineRecorder]:
    """Run it."""
    trial = Trial(
        load_cluster_file(CLUSTER),
        task.policy,
        Workload(task.workload, task.rate, seed=task.seed, steady_tpot_us=task.begins_at_us),
        constants=CONSTANTS,
        wire_form="absorbed",  # the paper's
        warm_up_us=round(task.warm_up_s * 1e6),
        measure_us=round(task.measure_s * 1e6),
    )
    trial = trial if task.begins_at_us else trial.filled()
    timeline = TimelineRecorder(trial.run)
    trial.play(timeline)
    return task, timeline


class Figures:
    """The figures and claims of a plan's runs."""

    def __init__(self, plan: Plans, runs: dict[OneRun, TimelineRecorder], out: Path) -> None:
        self.plan = plan
        self.claims: list[PaperClaim] = []
        self.aware_leads = True
        """Whether no policy sustains a higher rate than cost_aware in any workload of Figure 12."""
        self._runs = runs
        self._out = out

    def draw(self) -> None:
        """All of them."""
        self._rates()
        self._static()
        self._balance()
        self._queue()
        self._layers()
        self._scheduler()
        self._cp()

    def _outcome(self, policy: str, workload: str, rate: float) -> Outcome:
        return self._runs[self.plan.mix(policy, workload, rate)].outcome()

    def _attainment(self, policy: str, workload: str, rate: float) -> float:
        """Share of all seeds' requests within the time per token, by the paper's yardstick.

        That is the time from arrival to the last token, by token.
        """
        runs = self.plan.seeded(policy, workload, rate)
        outcomes = [self._runs[run].outcome() for run in runs]
        num_met = sum(each.normalized_attainment * each.num_judged for each in outcomes)
        return num_met / max(sum(each.num_judged for each in outcomes), 1)

    def _timelines(
        self, policies: tuple[str, ...], workload: str, rate: float
    ) -> dict[str, TimelineRecorder]:
        return {policy: self._runs[self.plan.mix(policy, workload, rate)] for policy in policies}

    def _draw(self, name: str, draw: Callable[..., Figure], data: Any, *load: str | float) -> None:
        words = " at ".join(one if isinstance(one, str) else f"{one:g}/s" for one in load)
        about = ": ".join(filter(None, (f"{CLUSTER}, {CONSTANTS}", words)))
        pictures.write_picture(self._out / f"{name}.png", draw, data, about=about)

    def _claim(self, figure: str, claim: str, paper: str, here: str, holds: bool) -> None:
        self.claims.append(PaperClaim(figure, claim, paper, here, holds))

    def _rates(self) -> None:
        policies = (*self.plan.baselines, *OURS)
        curves = {
            workload: {
                policy: [(rate, self._attainment(policy, workload, rate)) for rate in rates]
                for policy in policies
            }
            for workload, rates in self.plan.rates.items()
        }
        self._draw("figure_12_rates", lambda d: paper_pictures.attainment(d, ATTAINMENT), curves)
        for workload, by_policy in curves.items():
            most = {policy: most_sustained(points) for policy, points in by_policy.items()}
            best = max(self.plan.baselines, key=lambda policy: most[policy])
            ours, aware = most["dual_balanced"], f"cost_aware {most['cost_aware']:g}"
            self.aware_leads &= most["cost_aware"] >= max(most.values())
            if workload in ("issue-1", "issue-5"):
                claim = f"{workload}: higher rate within the SLO than the best baseline"
                here = f"{ours:g} beside {most[best]:g} of {best}; {aware}"
                self._claim("12", claim, "higher", here, ours > most[best])
            elif workload == "issue-0":
                p50 = [
                    self._outcome(policy, workload, COMPARED[workload]).normalized_ms_p50
                    for policy in ("dual_balanced", "least_batch")
                ]
                claim = "issue-0: slightly lower latency than 32DP"
                here = f"p50 {p50[0]:.2f} beside {p50[1]:.2f} ms"
                self._claim("12", claim, "lower", here, p50[0] < p50[1])
            else:
                theirs = most["uniform_cp:8"]
                here = f"{ours:g} beside {theirs:g} requests/s; {aware}"
                similar = theirs > 0 and abs(ours / theirs - 1) <= 0.15
                self._claim("12", "issue-100: as uniform CP of 8", "similar", here, similar)
        rate = COMPARED["issue-1"]
        runs = self._timelines(policies, "issue-1", rate)
        self._draw("latency", pictures.latency_cdf, runs, "issue-1", rate)
        p99 = {policy: timeline.outcome().normalized_ms_p99 for policy, timeline in runs.items()}
        best, ours = min(self.plan.baselines, key=lambda policy: p99[policy]), p99["dual_balanced"]
        here = f"{ours:.0f} beside {p99[best]:.0f} ms of {best}; cost_aware {p99['cost_aware']:.0f}"
        claim = f"lower P99 normalized latency than every baseline (issue-1, {rate:g}/s)"
        self._claim("12", claim, "lower", here, ours < p99[best])

    def _static(self) -> None:
        policies = ("least_batch", *UNIFORM, *OURS)
        groups = {
            f"{long_per_node} long a node": {
                policy: self._runs[self.plan.static(policy, scenario)].outcome().layer_us
                for policy in policies
            }
            for scenario, long_per_node in STATIC.items()
        }
        self._draw("figure_13_static", pictures.layer_groups, groups)

        def ratios(of: Callable[[Any], float], others: tuple[str, ...]) -> list[float]:
            return [
                min(of(bars[policy]) for policy in others) / of(bars["dual_balanced"])
                for bars in groups.values()
            ]

        def said(ratios: list[float]) -> str:
            return ", ".join(f"{ratio:.2f}" for ratio in ratios)

        found = ratios(sum, policies[:-2])
        claim = "shortest layer with 1, 3, 5 and 7 long requests a node"
        self._claim("13", claim, "yes", f"best baseline / ours: {said(found)}", min(found) > 1)
        found = ratios(lambda layer: layer.attention_us, policies[:-2])
        claim = "smallest attention of the slowest instance"
        self._claim("13", claim, "yes", f"best baseline / ours: {said(found)}", min(found) > 1)
        found = ratios(sum, ("least_batch",))
        claim = "the gain over 32DP shrinks as long requests grow in number"
        self._claim("13", claim, "yes", f"32DP / ours: {said(found)}", found[0] > found[-1])

    def _balance(self) -> None:
        workload, rate = "issue-1", COMPARED["issue-1"]
        runs = self._timelines(("least_batch", "least_cache", *OURS), workload, rate)
        self._draw("figure_14_balance", pictures.balance, runs, workload, rate)
        found = {policy: timeline.outcome() for policy, timeline in runs.items()}
        ours, aware = found["dual_balanced"], found["cost_aware"]
        kv, rows = found["least_batch"].kv_imbalance, found["least_cache"].row_imbalance
        here = f"{ours.kv_imbalance:.0%} beside {kv:.0%}; cost_aware {aware.kv_imbalance:.0%}"
        claim, holds = "KV imbalance beside least_batch", ours.kv_imbalance < kv / 2
        self._claim("14", claim, "74.13% beside 186.75%", here, holds)
        here = f"{ours.row_imbalance:.1%} beside {rows:.0%}; cost_aware {aware.row_imbalance:.1%}"
        claim, holds = "row imbalance beside least_cache", ours.row_imbalance < rows / 2
        self._claim("14", claim, "8.54% beside 47.40%", here, holds)

    def _queue(self) -> None:
        runs = self._timelines(("least_batch", *OURS), *HIGH_LOAD)
        self._draw("figure_14_queue", pictures.queue, runs, *HIGH_LOAD)
        free = {
            policy: timeline.outcome().free_frames_share_while_waiting
            for policy, timeline in runs.items()
        }
        batch, ours, aware = (free[policy] for policy in ("least_batch", *OURS))
        claim = "least_batch: requests wait beside much free memory"
        here = f"{batch:.0%} of the memory is free while requests wait"
        self._claim("5c, 14", claim, "yes", here, batch > 0.1)
        claim = "ours: requests wait when memory is nearly exhausted"
        here = f"{ours:.0%} is free while requests wait; cost_aware {aware:.0%}"
        self._claim("14", claim, "yes", here, ours < 0.1)

    def _layers(self) -> None:
        policies = ("least_batch", "least_cache", "uniform_cp:8", *OURS)
        groups = {
            f"{workload}, {rate:g}/s": {
                policy: timeline.outcome().layer_us
                for policy, timeline in self._timelines(policies, workload, rate).items()
            }
            for workload, rate in COMPARED.items()
        }
        self._draw("figure_15_layers", pictures.layer_groups, groups)
        bars = groups[f"issue-1, {COMPARED['issue-1']:g}/s"]
        batch, cache, uniform, ours, _ = (bars[policy] for policy in policies)
        theirs = batch.attention_us, cache.attention_us
        here = f"{ours.attention_us:.0f} beside {theirs[0]:.0f} and {theirs[1]:.0f} us"
        claim = "attention of the slowest beside least_batch and least_cache"
        paper, holds = "267.7 beside 811.3 and 986.1 us", ours.attention_us < 0.75 * min(theirs)
        self._claim("15", claim, paper, here, holds)
        here = f"{ours.exchange_us:.1f} beside {uniform.exchange_us:.1f} us"
        holds = ours.exchange_us < 0.2 * uniform.exchange_us
        self._claim("15", "CP exchange beside uniform CP of 8", "60.4 beside 629.8 us", here, holds)
        theirs = batch.dispatch_combine_us, cache.dispatch_combine_us
        here = f"{ours.dispatch_combine_us:.0f} beside {theirs[0]:.0f} and {theirs[1]:.0f} us"
        claim = "dispatch + combine below least_batch and least_cache"
        self._claim("15", claim, "below both", here, ours.dispatch_combine_us < min(theirs))

    def _scheduler(self) -> None:
        points = {}
        for policy in ("least_batch", *OURS):
            found = [self._runs[self.plan.steady(policy, rows)].outcome() for rows in ROWS]
            points[policy] = [(outcome.num_rows_mean / 32, outcome.plan_share) for outcome in found]
        self._draw("figure_16_scheduler", paper_pictures.scheduler_by_rows, points, "issue-0")
        most = {policy: max(share for _, share in pairs) for policy, pairs in points.items()}
        here = "at most " + ", ".join(f"{policy} {share:.2%}" for policy, share in most.items())
        claim = "scheduling is a small share of the step (here: below 5%)"
        self._claim("16", claim, "yes", here, most["dual_balanced"] < 0.05)

    def _cp(self) -> None:
        runs = self._timelines(OURS, *PEAK)
        self._draw("figure_18_cp", pictures.cp_over_time, runs, *PEAK)
        found = {policy: timeline.outcome() for policy, timeline in runs.items()}
        ours = found["dual_balanced"]
        here = ", ".join(f"{policy} {outcome.cp_share:.1%}" for policy, outcome in found.items())
        holds = abs(ours.cp_share / 0.011 - 1) <= 0.25
        self._claim("18", "requests with CP, mean", "1.1% at peak", here, holds)
        here = ", ".join(
            f"{policy} {outcome.layer_us_max.exchange_us:.1f} us"
            for policy, outcome in found.items()
        )
        holds = abs(ours.layer_us_max.exchange_us / 35.5 - 1) <= 0.25
        self._claim("18", "most that the exchange takes of a layer", "35.5 us", here, holds)


def most_sustained(points: list[tuple[float, float]]) -> float:
    """The highest rate up to which every rate was sustained; 0 if the first was not."""
    sustained = [rate for rate, _ in takewhile(lambda point: point[1] >= ATTAINMENT, points)]
    return sustained[-1] if sustained else 0.0


@bench("Short runs of fewer policies: under a minute, and rough; judges nothing.")
def main(
    run: BenchRun,
    out: Annotated[Path | None, "For the pictures: docs/figures, with --quick a new one."] = None,
    processes: Annotated[int, "Runs at a time."] = 1,
) -> None:
    """Simulate, draw, and print the table of docs/research/paper-figures.md."""
    if run.is_quick:
        out = out or Path(tempfile.mkdtemp(prefix="nanocp-figures-"))
    out = out or ROOT / "docs/figures"
    out.mkdir(parents=True, exist_ok=True)
    plan = QUICK if run.is_quick else FULL
    figures = Figures(plan, dict(run.play(plan.tasks(), play, processes)), out)
    figures.draw()
    run.keep(*(claim._asdict() for claim in figures.claims))
    run.markdown(run.results)
    run.say(f"pictures: {out}")
    num_held = sum(claim.holds for claim in figures.claims)
    run.judge(
        [
            at_least("claims of the paper that hold", num_held, LEAST_HELD),
            ("no policy sustains a higher rate than cost_aware", figures.aware_leads),
        ],
        run.too_quick,
    )


if __name__ == "__main__":
    main()
