"""The highest rate that a policy sustains: at least 99% of the requests within the SLO (6.1).

Enters: how to run at a rate. Leaves: the highest sustained rate and its outcome. Does not know:
policies, clusters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from nanocp.simulator.cluster_file import ClusterFile
from nanocp.simulator.outcome import Outcome, Run
from nanocp.simulator.simulation import make_simulation
from nanocp.simulator.workload import STATIC, Workload

ATTAINMENT = 0.99
PRECISION = 1.03
"""The answer is sustained, and this much more is not."""
STEP = 1.3
"""Factor from one rate to the next until the answer is between two."""
MIN_RATE, MAX_RATE = 0.05, 4096.0


@dataclass(frozen=True, slots=True)
class Sustained:
    """The answer of a sweep."""

    rate_per_s: float
    """0 if not even MIN_RATE is sustained."""
    outcome: Outcome | None
    num_runs: int


def highest_sustained_rate(
    attempt: Callable[[float], Outcome],
    first_rate: float,
    on_run: Callable[[float, bool], None] | None = None,
    precision: float = PRECISION,
    step: float = STEP,
) -> Sustained:
    """Go up or down by `step` from first_rate until one rate is sustained and one is not, then
    bisect to the precision.

    on_run gets each rate tried and whether it was sustained.
    """
    if not MIN_RATE <= first_rate <= MAX_RATE:
        raise ValueError(f"first_rate is {first_rate}; it must be from {MIN_RATE} to {MAX_RATE}")
    best, best_outcome, failed = 0.0, None, None
    rate, num_runs = first_rate, 0
    while failed is None or best == 0 or failed / best > precision:
        outcome = attempt(rate)
        num_runs += 1
        is_sustained = outcome.attainment >= ATTAINMENT and not outcome.is_hopeless
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
    file: ClusterFile,
    constants: str,
    policy: str,
    workload: Workload,
    run: Run,
    steps_per_window: int = 1,
    on_run: Callable[[float, bool], None] | None = None,
    precision: float = PRECISION,
    step: float = STEP,
) -> Sustained:
    """The highest sustained rate of the policy; the workload's own rate is where the search begins.

    Raises ValueError for a workload without a rate.
    """
    if workload.name in STATIC:
        raise ValueError(
            f"workload {workload.name} has no rate: its requests are all there at once"
        )

    def attempt(rate_per_s: float) -> Outcome:
        # Twice the misses that the SLO allows of the requests expected: the verdict is then certain
        # enough to stop.
        max_misses = 5 + round(2 * (1 - ATTAINMENT) * rate_per_s * run.measure_us / 1e6)
        simulation = make_simulation(
            file, constants, policy, replace(run, max_misses=max_misses), steps_per_window
        )
        return simulation.run(
            replace(workload, rate_per_s=rate_per_s).requests(
                file.cluster.max_model_len, run.warm_up_us
            )
        )

    return highest_sustained_rate(attempt, workload.rate_per_s, on_run, precision, step)
