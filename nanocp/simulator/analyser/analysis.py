"""Compares a load under DP attention and static CP with CP chosen by request; gives a verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import fmean
from typing import Any

from nanocp.simulator.analyser.size import size
from nanocp.simulator.costs.cluster_file import Costs
from nanocp.simulator.costs.cost import CostModel
from nanocp.simulator.loads.workload_request import WorkloadRequest
from nanocp.simulator.outcome import Outcome, percentile
from nanocp.simulator.reports.timeline import TimelineRecorder
from nanocp.simulator.simulation import FLUID
from nanocp.simulator.sweep import MAX_RATE, MIN_RATE, sweep
from nanocp.simulator.trial import Trial
from nanocp.values.plan import PAGE_SIZE

OURS = "cost_aware"
LEAST_GAIN = 1.10
LEAST_SURE = 1.05
"""Smaller gains make the verdict uncertain."""
LEAST_LOAD = 0.5
"""Below this share of today's best rate, fewer GPUs help first."""
LEAST_REQUESTS = 100
"""Fewer cannot decide whether 99% are within the SLO."""
PRECISION, FINE_PRECISION, QUICK_PRECISION = 1.1, 1.02, 1.05
"""Precision of all rates, decisive ones, and quick runs."""
_LEAST_SHARE = 0.1
"""Lower end of the search, as a share of our rate."""
_QUICK_REQUESTS = 1_100
"""Arrivals for 10 allowed misses."""
_QUICK_US, _QUICK_WARM_UP_US = 30_000_000, 10_000_000
"""At the log's rate."""
_FIRST = 0.6
_FACTORS = (0.5, 2.0)
_MS = 1e3
COST_GROUPS: Mapping[str, tuple[str, ...]] = {
    "attention": ("attention_ps_per_token", "attention_ps_per_query", "attention_us"),
    "rest of a layer": ("other_us", "other_ns_per_row"),
    "exchange": (
        *("exchange_us", "exchange_us_between_nodes"),
        *("exchange_gb_per_s_within_node", "exchange_gb_per_s_between_nodes"),
    ),
    "dispatch and combine": ("dispatch_combine_us", "dispatch_combine_us_at_128_rows"),
    "experts": ("weights_gb_per_s", "gemm_tflops"),
}


class LoadVerdict(StrEnum):
    """Verdict on a load."""

    NOT_NEEDED = "not needed"
    FEWER_GPUS = "fewer GPUs first"
    PAYS = "pays"
    TOO_SLOW = "no way meets the SLO"


@dataclass(frozen=True, slots=True)
class LoadSummary:
    """Summary of the log; tokens are (p50, p99, most)."""

    num_requests: int
    rate_per_s: float
    prompt: tuple[int, int, int]
    output: tuple[int, int, int]
    rank_tokens: int
    num_too_long: int
    num_cut: int
    share_of_longest: float


@dataclass(frozen=True, slots=True)
class Way:
    """A policy's results."""

    policy: str
    outcome: Outcome
    timeline: TimelineRecorder
    waits_ms: float
    """Attention time per step for the fullest rank's KV beyond the mean."""
    rate_per_s: float
    """0 if least_per_s is not sustained."""
    least_per_s: float = 0.0
    """Lower end of the search."""
    num_judged: int = 0


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Step time of today's best way over ours with a group of constants halved and doubled."""

    group: str
    low: float
    high: float
    as_it_is: float


@dataclass(frozen=True, slots=True)
class Analysis:
    """All results and the verdict."""

    load: LoadSummary
    ways: tuple[Way, ...]
    """Today's ways, then ours, then the bound."""
    best: Way
    ours: Way
    sensitivities: tuple[Sensitivity, ...]
    num_gpus: tuple[int | None, int | None] | None
    """GPUs for the log's rate, today and with ours; inner None: no number suffices. None: not
    searched."""
    precision: float = FINE_PRECISION

    @property
    def gain(self) -> float:
        """Rate over that of today's best way."""
        return self.ours.rate_per_s / self.best.rate_per_s if self.best.rate_per_s else float("inf")

    @property
    def weak_groups(self) -> list[str]:
        """Groups of constants on which a shorter step depends."""
        return [one.group for one in self.sensitivities if one.low < LEAST_SURE <= one.as_it_is]

    @property
    def verdict(self) -> LoadVerdict:
        """Verdict by the rate over today's best way, static CP included."""
        if not self.ours.rate_per_s and not self.best.rate_per_s:
            return LoadVerdict.TOO_SLOW
        if self.gain < LEAST_GAIN * self.precision:
            return LoadVerdict.NOT_NEEDED
        if self.load.rate_per_s < LEAST_LOAD * self.best.rate_per_s:
            return LoadVerdict.FEWER_GPUS
        return LoadVerdict.PAYS


def ways_today(num_per_node: int) -> dict[str, str]:
    """Today's policies with descriptions: DP attention by three rules, static CP of a node."""
    return {
        "least_batch": "DP, fewest running (vLLM)",
        "round_robin": "DP, round robin (SGLang)",
        "least_cache": "DP, least KV",
        f"uniform_cp:{num_per_node}": f"static CP of {num_per_node}",
    }


def analyse(
    trial: Trial,
    requests: Sequence[WorkloadRequest],
    is_quick: bool = False,
    on_way: Callable[[str], None] = lambda _: None,
) -> Analysis:
    """Play the load each way at its own rate, and search for the rate that each sustains.

    is_quick: lower precision, only the busiest part, no number of GPUs. on_way gets each way first.
    Raises ValueError for too few requests.
    """
    check_enough(len(requests))
    policies = [OURS, *ways_today(trial.file.cluster.instances_per_node), FLUID]
    search = _Search(trial, is_quick, on_way)
    ways: list[Way] = []
    for policy in policies:
        ours_rate = ways[0].rate_per_s if ways else 0.0
        least = min(_LEAST_SHARE * ours_rate, trial.workload.rate_per_s)
        near = ours_rate or _FIRST * trial.likely_rate
        if is_quick and policy != FLUID and (others := [way.rate_per_s for way in ways[1:]]):
            least = max(least, QUICK_PRECISION * max(others))
            near = least if max(others) else near
        ways.append(search.way(policy, near, QUICK_PRECISION if is_quick else PRECISION, least))
    ours, *today, bound = ways
    if not is_quick:
        most = max(way.rate_per_s for way in today)
        ours, bound, *today = (
            search.refined(way)
            if way.rate_per_s and (way.policy in (OURS, FLUID) or way.rate_per_s == most)
            else way
            for way in (ours, bound, *today)
        )
    best = max(today, key=lambda way: (way.rate_per_s, -way.outcome.step_ms_mean))
    num_gpus = None
    if not is_quick and trial.file.memory is not None:
        on_way("numbers of GPUs")
        num_gpus = (
            size(replace(trial, policy=best.policy)),
            size(replace(trial, policy=ours.policy)),
        )
    return Analysis(
        _load(trial, requests),
        (*today, ours, bound),
        best,
        ours,
        tuple(_sensitivities(trial, best, ours)),
        num_gpus,
        QUICK_PRECISION if is_quick else FINE_PRECISION,
    )


def check_enough(num_requests: int) -> None:
    """Raise ValueError for too few requests."""
    if num_requests < LEAST_REQUESTS:
        raise ValueError(
            f"the log has {num_requests:,} requests; at least {LEAST_REQUESTS} are needed, since "
            "99% of them must be within the SLO"
        )


@dataclass(frozen=True, slots=True)
class _Search:
    trial: Trial
    is_quick: bool
    on_way: Callable[[str], None]

    def way(self, policy: str, near: float, precision: float, least: float) -> Way:
        trial = replace(self.trial, policy=policy)
        found = self._rate(trial, near, precision, least)
        self.on_way(f"{policy} at {trial.workload.rate_per_s:.3g}/s")
        if self.is_quick and trial.measure_us is None:
            trial = replace(trial, warm_up_us=_QUICK_WARM_UP_US, measure_us=_QUICK_US)
        return replace(_way(trial), **found)

    def refined(self, way: Way) -> Way:
        """The way with its rate at the verdict's precision."""
        trial = replace(self.trial, policy=way.policy)
        return replace(way, **self._rate(trial, way.rate_per_s, FINE_PRECISION, 0.0))

    def _rate(self, trial: Trial, near: float, precision: float, least: float) -> dict[str, Any]:
        def tried(rate: float, is_sustained: bool) -> None:
            self.on_way(f"{trial.policy}: {rate:.3g}/s {'held' if is_sustained else 'missed'}")

        is_part = self.is_quick and trial.measure_us is None
        found = sweep(
            trial.at_rate(min(max(near, MIN_RATE), MAX_RATE)),
            on_run=tried,
            precision=precision,
            num_seeds=1,
            least_rate=least,
            part=(lambda here: here.busiest(_QUICK_REQUESTS)) if is_part else (lambda here: here),
        ).seeds[0]
        num_judged = found.outcome.num_judged if found.outcome else 0
        return {"rate_per_s": found.rate_per_s, "least_per_s": least, "num_judged": num_judged}


def _load(trial: Trial, requests: Sequence[WorkloadRequest]) -> LoadSummary:
    scale, max_len = trial.workload.length_scale, trial.file.cluster.max_model_len
    asked = [max(1, round(one.prompt_len * scale)) for one in requests]
    room = [max_len - one.output_len for one in requests]
    prompts = sorted(map(min, asked, room))
    outputs = sorted(one.output_len for one in requests)
    rank_tokens = trial.file.cluster.num_frames * PAGE_SIZE
    longest = prompts[-max(1, len(prompts) // 100) :]

    def three(lens: list[int]) -> tuple[int, int, int]:
        return int(percentile(lens, 50)), int(percentile(lens, 99)), lens[-1]

    return LoadSummary(
        num_requests=len(requests),
        rate_per_s=trial.workload.rate_per_s,
        prompt=three(prompts),
        output=three(outputs),
        rank_tokens=rank_tokens,
        num_too_long=sum(one.prompt_len * scale + one.output_len > rank_tokens for one in requests),
        num_cut=sum(length > most for length, most in zip(asked, room, strict=True)),
        share_of_longest=sum(longest) / sum(prompts),
    )


def _way(trial: Trial) -> Way:
    here = trial.filled()
    timeline = TimelineRecorder(here.run)
    outcome = here.play(timeline)
    waits_ms = 0.0
    if timeline.samples and trial.policy != FLUID:
        loads = [sample.loads.kv_tokens for sample in timeline.samples]
        extra = fmean(max(tokens) - fmean(tokens) for tokens in loads)
        us_a_token = trial.file.costs_of(trial.constants).attention_ps_per_token / 1e6
        waits_ms = trial.file.model.num_full_layers * extra * us_a_token / _MS
    return Way(trial.policy, outcome, timeline, waits_ms, 0.0)


def _sensitivities(trial: Trial, best: Way, ours: Way) -> Iterator[Sensitivity]:
    costs = trial.file.costs_of(trial.constants)
    if not best.timeline.samples or not ours.timeline.samples:
        return
    as_it_is = step_us(trial, best) / step_us(trial, ours)
    for group, names in COST_GROUPS.items():
        ratios = []
        for factor in _FACTORS:
            changed = changed_costs(costs, names, factor)
            file = replace(trial.file, costs={trial.constants: changed})
            here = replace(trial, file=file)
            ratios.append(step_us(here, best) / step_us(here, ours))
        yield Sensitivity(group, min(ratios), max(ratios), as_it_is)


def changed_costs(costs: Costs, names: Sequence[str], factor: float) -> Costs:
    """Constants with those of a group multiplied."""

    def scaled(name: str) -> Any:
        value = getattr(costs, name)
        if isinstance(value, tuple):
            return tuple((ep_size, factor * us) for ep_size, us in value)
        is_speed = "_per_s" in name or name.endswith("tflops")
        return value / factor if is_speed else value * factor

    return replace(costs, **{name: scaled(name) for name in names})


def step_us(trial: Trial, way: Way) -> float:
    """Mean step of a way's sampled loads under the trial's constants."""
    here = replace(trial, policy=way.policy)
    model = CostModel(here.charged, trial.constants, wire_form=here.form)
    return fmean(model.step(sample.loads).step_us for sample in way.timeline.samples)
