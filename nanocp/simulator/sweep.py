"""Search for a policy's sustained rate: 99% of the requests within the SLO, and no drift (6.1)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean

from nanocp.simulator.loads.workload import MIXES, STATIC
from nanocp.simulator.outcome import ATTAINMENT, LEAST_ALLOWED_MISSES, Outcome, Recorder, Slo
from nanocp.simulator.trial import Trial

PRECISION = 1.03
"""Relative precision of the rate."""
_TPOT_GROWTH = 3
"""Near the SLO the time per token grows about as the rate to this power."""
NUM_SEEDS = 3
MIN_RATE, MAX_RATE = 0.05, 4096.0
_MOST_JUDGED = 1.5
"""Most requests to judge per expected arrival."""


@dataclass(frozen=True, slots=True)
class Sustained:
    """The answer of a search."""

    rate_per_s: float
    """0 if not even the least rate is sustained."""
    outcome: Outcome | None
    num_runs: int


@dataclass(frozen=True, slots=True)
class Sweep:
    """The answers for every seed, and their summary."""

    seeds: tuple[Sustained, ...]

    @property
    def rate_per_s(self) -> float:
        """Mean over the seeds."""
        return fmean(one.rate_per_s for one in self.seeds)

    @property
    def outcomes(self) -> list[Outcome]:
        """Outcomes at the highest sustained rates, for each seed that had one."""
        return [one.outcome for one in self.seeds if one.outcome is not None]

    @property
    def rests_on_few(self) -> bool:
        """Whether fewer than 20 misses were allowed."""
        num_allowed = sum(outcome.num_allowed_misses for outcome in self.outcomes)
        return bool(self.outcomes) and num_allowed < LEAST_ALLOWED_MISSES


def highest_sustained_rate(
    attempt: Callable[[float], Outcome],
    first_rate: float,
    on_run: Callable[[float, bool], None] | None = None,
    precision: float = PRECISION,
    slo: Slo | None = None,
    least_rate: float = MIN_RATE,
) -> Sustained:
    """Find the highest rate, in requests a second, that is sustained.

    Rates are powers of the precision, at least least_rate. Brackets the answer from first_rate,
    then bisects. on_run gets each rate and whether it was sustained.
    """
    if not MIN_RATE <= first_rate <= MAX_RATE:
        raise ValueError(f"first_rate is {first_rate}; it must be from {MIN_RATE} to {MAX_RATE}")
    lowest = math.ceil(math.log(max(MIN_RATE, least_rate), precision))
    highest = math.floor(math.log(MAX_RATE, precision))
    best, failed = lowest - 1, highest + 1
    best_outcome = None
    power = min(max(round(math.log(first_rate, precision)), lowest), highest)
    num_runs = 0
    while failed - best > 1:
        outcome = attempt(precision**power)
        num_runs += 1
        if on_run is not None:
            on_run(precision**power, outcome.is_sustained)
        stride = max(abs(round(_log_to_go(outcome, slo or Slo()) / math.log(precision))), 1)
        width = failed - best
        if outcome.is_sustained:
            best, best_outcome = power, outcome
        else:
            failed = power
        is_bounded = best >= lowest and failed <= highest
        if not is_bounded:
            stride = max(stride, 2 ** (num_runs - 1))
        power += stride if outcome.is_sustained else -stride
        if not is_bounded:
            power = min(max(power, lowest), highest)
        elif not best < power < failed or 2 * (failed - best) > width:
            power = (best + failed) // 2
    return Sustained(precision**best if best_outcome else 0.0, best_outcome, num_runs)


def _log_to_go(outcome: Outcome, slo: Slo) -> float:
    """Logarithm of the rate's factor until the time per token meets the SLO's."""
    if not outcome.tpot_ms_p99:
        return 0.0
    return math.log(slo.tpot_us / (1e3 * outcome.tpot_ms_p99)) / _TPOT_GROWTH


def sweep(
    trial: Trial,
    on_run: Callable[[float, bool], None] | None = None,
    precision: float = PRECISION,
    num_seeds: int = NUM_SEEDS,
    least_rate: float = MIN_RATE,
    part: Callable[[Trial], Trial] = lambda trial: trial,
) -> Sweep:
    """The trial's sustained rate for its workload's seed and the next ones.

    part: the part of a trial to play at a rate. Raises ValueError for a workload without a rate.
    """
    workload = trial.workload
    if workload.name in STATIC:
        raise ValueError(
            f"workload {workload.name} has no rate: its requests are all there at once"
        )
    found: list[Sustained] = []
    for here in seeds_of(trial, num_seeds):
        rate = found[-1].rate_per_s if found and found[-1].rate_per_s else workload.rate_per_s
        attempt = attempts(here, part)
        found.append(
            highest_sustained_rate(attempt, rate, on_run, precision, trial.slo, least_rate)
        )
    return Sweep(tuple(found))


def seeds_of(trial: Trial, num_seeds: int) -> list[Trial]:
    """The trial with its workload's seed and the next ones; a trace has one."""
    workload = trial.workload
    return [
        replace(trial, workload=replace(workload, seed=workload.seed + number))
        for number in range(num_seeds if workload.name in MIXES else 1)
    ]


def attempts(
    trial: Trial, part: Callable[[Trial], Trial] = lambda trial: trial
) -> Callable[[float], Outcome]:
    """A function that plays a rate and stops early when too many requests miss.

    A run that meets the SLO but drifts is repeated, three times as long.
    """

    def attempt(rate_per_s: float) -> Outcome:
        here = part(trial.at_rate(rate_per_s)).filled()
        outcome = _judged(here)
        if not outcome.is_sustained and replace(outcome, is_drifting=False).is_sustained:
            longer = _judged(replace(here, measure_us=3 * here.run.measure_us))
            outcome = replace(longer, is_drifting=False)
        return outcome

    return attempt


def _judged(trial: Trial) -> Outcome:
    num_expected = trial.workload.rate_per_s * trial.run.measure_us / 1e6
    max_misses = math.ceil(_MOST_JUDGED * (1 - ATTAINMENT) * num_expected)
    return trial.play(Recorder(replace(trial.run, max_misses=max_misses)))
