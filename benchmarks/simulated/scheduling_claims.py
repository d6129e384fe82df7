"""What the highest sustained rates must show, and tables of them.

Enters: the results of scheduling_quality.py. Leaves: tables, claims, and at which rate a policy has
to fail. Does not know: how a rate is found.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.kit.bench import BenchRun, Claim, at_most
from nanocp.simulator.outcome import LEAST_ALLOWED_MISSES

FLUID, COST_AWARE = "fluid", "cost_aware"
RIVALS = (
    "dual_balanced",
    "dual_balanced_any_node",
    "least_batch",
    "least_cache",
    "uniform_cp:2",
    "uniform_cp:4",
    "uniform_cp:8",
)
STATIC_CP = ("uniform_cp:2", "uniform_cp:4", "uniform_cp:8")
POLICIES = (FLUID, COST_AWARE, *RIVALS)
CLOSE = {"issue-1": 1.15, "issue-5": 1.25}
"""Workloads with claims about what separates cost_aware from fluid and from static CP -> how many
times dual_balanced's rate is claimed."""
MAX_CPU_MINUTES = 2 * 60
"""Claim: of a full run, so that it takes at most an hour on 2 cores."""
NUM_ROWS = 6
"""Rows of a full run: a workload each."""
_ROUNDING = 1e-4
"""Rates in the results are rounded."""

_COLUMNS = {
    "num_judged": ".0f",
    "num_missed": ".0f",
    "ttft_ms_p99": ".0f",
    "tpot_ms_p99": ".1f",
    "normalized_ms_p99": ".1f",
    "kv_imbalance": ".0%",
    "row_imbalance": ".0%",
}
"""Name in the results -> format; times in ms."""

Results = dict[str, dict[str, dict[str, Any]]]


def least_ratio(key: str, rival: str) -> float:
    """How many times the rival's rate cost_aware must be shown to sustain on a workload.

    It is at least 1, although less is claimed: to show that takes as few runs.
    """
    claimed = (least for _, policy, others, least in _claims(key) if rival in others)
    return max(1.0, *claimed)


def show(results: Results, run: BenchRun) -> None:
    """A table for each workload. A rate after "<" is one that is not sustained."""
    for key, rates in results["max_rate"].items():
        rows: list[dict[str, Any]] = []
        for policy, rate in rates.items():
            of_fluid = rate / rates[FLUID] if rates.get(FLUID) else None
            row = {"policy": policy, "rate": rate, "of_fluid": of_fluid}
            rows.append(row | {name: results[name].get(key, {}).get(policy) for name in _COLUMNS})
        run.table(key, rows, policy="", rate=".2f", of_fluid=".3f", **_COLUMNS)
        for policy, rate in results["fails_at"].get(key, {}).items():
            if policy not in rates:
                run.say(f"{key}, {policy}: < {rate:.2f} requests/s")
        for policy, num_allowed in results["num_allowed"].get(key, {}).items():
            if rates[policy] and num_allowed < LEAST_ALLOWED_MISSES:
                run.say(f"{key}, {policy}: only {num_allowed} misses were allowed")


def claims(results: Results) -> Iterator[Claim]:
    """What is claimed; what was not measured cannot be judged.

    That the minutes suffice is said only if all claims of all rows are judged; too many are too
    many without them.
    """
    num_open = 0
    for key, rates in results["max_rate"].items():
        at_most_of = results.get("fails_at", {}).get(key, {}) | rates
        for claim, policy, others, least in _claims(key):
            best = max(others, key=lambda other: at_most_of.get(other, 0.0))
            if policy not in rates or not at_most_of.keys() >= {*others} or not at_most_of[best]:
                num_open += 1
                yield Claim(f"{key}: {claim}, at least {least}", None, "not measured")
                continue
            ratio = rates[policy] / at_most_of[best]
            measured = f"{ratio:.3f}" if best in rates else f"> {ratio:.3f}"
            yield Claim(f"{key}: {claim}: {measured}, at least {least}", ratio >= least - _ROUNDING)
    if cpu_s := sum(sum(policies.values()) for policies in results.get("cpu_s", {}).values()):
        claim = at_most("processor minutes of all", cpu_s / 60, MAX_CPU_MINUTES)
        num_rows = len(results["max_rate"])
        is_whole = not num_open and num_rows >= NUM_ROWS
        why = "" if is_whole or not claim.holds else f"{num_rows} of {NUM_ROWS} rows are there"
        yield claim.unless(why)


def _claims(key: str) -> list[tuple[str, str, tuple[str, ...], float]]:
    """(claim, policy, against the best of, at least) of a workload."""
    found = [("cost_aware / best of all others", COST_AWARE, RIVALS, 0.98)]
    if key in CLOSE:
        found += [
            ("cost_aware / fluid", COST_AWARE, (FLUID,), 0.83),
            ("cost_aware / dual_balanced", COST_AWARE, ("dual_balanced",), CLOSE[key]),
            ("cost_aware / best static CP", COST_AWARE, STATIC_CP, 1.35),
        ]
    if key == "mooncake":
        found.append(("cost_aware / fewest rows", COST_AWARE, ("least_batch",), 1.2))
    return found
