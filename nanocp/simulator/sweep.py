"""The highest rate that a policy sustains: 99% of the requests within the SLO, and no drift (6.1).

Enters: how to run at a rate. Leaves: the highest sustained rate and its outcome. Does not know:
policies, clusters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean

from nanocp.simulator.outcome import ATTAINMENT, LEAST_ALLOWED_MISSES, Outcome, Recorder
from nanocp.simulator.trial import Trial
from nanocp.simulator.workload import MIXES, STATIC

PRECISION = 1.03
"""The answer is sustained, and this much more is not."""
STEP, NEXT_STEP = 1.3, 1.06
"""Factor from one rate to the next until the answer is between two; a seed that begins at the
answer of the seed before takes small steps."""
NUM_SEEDS = 3
"""A few long requests more or less change what a mix needs; a trace has no seed."""
MIN_RATE, MAX_RATE = 0.05, 4096.0


@dataclass(frozen=True, slots=True)
class Sustained:
    """The answer of a search."""

    rate_per_s: float
    """0 if not even MIN_RATE is sustained."""
    outcome: Outcome | None
    num_runs: int


@dataclass(frozen=True, slots=True)
class Sweep:
    """The answers for every seed, and what they are together."""

    seeds: tuple[Sustained, ...]

    @property
    def rate_per_s(self) -> float:
        """Mean over the seeds."""
        return fmean(one.rate_per_s for one in self.seeds)

    @property
    def outcomes(self) -> list[Outcome]:
        """What the highest sustained rates were like, of each seed that had one."""
        return [one.outcome for one in self.seeds if one.outcome is not None]

    @property
    def rests_on_few(self) -> bool:
        """Whether fewer than 20 misses were allowed, so that a handful of requests decided."""
        num_allowed = sum(outcome.num_allowed_misses for outcome in self.outcomes)
        return bool(self.outcomes) and num_allowed < LEAST_ALLOWED_MISSES


def highest_sustained_rate(
    attempt: Callable[[float], Outcome],
    first_rate: float,
    on_run: Callable[[float, bool], None] | None = None,
    precision: float = PRECISION,
    step: float = STEP,
) -> Sustained:
    """Find the highest rate, in requests a second, that is sustained.

    It goes up or down by the factor `step` from first_rate until one rate is sustained and one is
    not, then bisects to the precision. on_run gets each rate tried and whether it was sustained.
    """
    if not MIN_RATE <= first_rate <= MAX_RATE:
        raise ValueError(f"first_rate is {first_rate}; it must be from {MIN_RATE} to {MAX_RATE}")
    best, best_outcome, failed = 0.0, None, None
    rate, num_runs = first_rate, 0
    while failed is None or best == 0 or failed / best > precision:
        outcome = attempt(rate)
        num_runs += 1
        is_sustained = outcome.is_sustained
        if on_run is not None:
            on_run(rate, is_sustained)
        if is_sustained:
            best, best_outcome = rate, outcome
        else:
            failed = rate
        if failed is None:
            if rate >= MAX_RATE:
                break
            rate = min(rate * step, MAX_RATE)
        elif best == 0:
            if rate <= MIN_RATE:
                break
            rate = max(rate / step, MIN_RATE)
        else:
            rate = (best * failed) ** 0.5
    return Sustained(best, best_outcome, num_runs)


def sweep(
    trial: Trial,
    on_run: Callable[[float, bool], None] | None = None,
    precision: float = PRECISION,
    num_seeds: int = NUM_SEEDS,
    first_step: float = STEP,
) -> Sweep:
    """The highest rate that the trial's policy sustains, for its workload's seed and the next ones.

    The search begins at the workload's rate. Raises ValueError for a workload without a rate.
    """
    workload = trial.workload
    if workload.name in STATIC:
        raise ValueError(
            f"workload {workload.name} has no rate: its requests are all there at once"
        )
    found: list[Sustained] = []
    for number in range(num_seeds if workload.name in MIXES else 1):
        rate = found[-1].rate_per_s if found and found[-1].rate_per_s else workload.rate_per_s
        here = replace(trial, workload=replace(workload, seed=workload.seed + number))
        step = NEXT_STEP if found else first_step
        found.append(highest_sustained_rate(_attempts(here), rate, on_run, precision, step))
    return Sweep(tuple(found))


def _attempts(trial: Trial) -> Callable[[float], Outcome]:
    def attempt(rate_per_s: float) -> Outcome:
        here = trial.at_rate(rate_per_s).filled()
        # Twice the misses that the SLO allows of the requests expected: the verdict is then certain
        # enough to stop.
        num_expected = rate_per_s * here.run.measure_us / 1e6
        max_misses = 5 + round(2 * (1 - ATTAINMENT) * num_expected)
        return here.play(Recorder(replace(here.run, max_misses=max_misses)))

    return attempt
