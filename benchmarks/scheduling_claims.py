"""What the highest sustained rates must show, and tables of them.

Enters: the results of scheduling_quality.py. Leaves: tables on a console, how many claims do not
hold, and at which rate a policy has to fail. Does not know: how a rate is found.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

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
ON_TARGET = "+tpot"
"""Ends the name of a policy that runs with scheduler.tpot_target_ms, the SLO's time per token."""
AIMED, FLUID_AIMED = COST_AWARE + ON_TARGET, FLUID + ON_TARGET
POLICIES = (FLUID, COST_AWARE, AIMED, FLUID_AIMED, *RIVALS)
CLOSE = ("issue-1", "issue-5")
"""Workloads with claims about what separates cost_aware from fluid and from dual_balanced."""
MAX_CPU_MINUTES = 2 * 60
"""Claim: of a full run, so that it takes at most an hour on 2 cores."""
NUM_ROWS = 24
"""Rows of a full run: six workloads, two sets of constants, two wire forms."""
_ROUNDING = 1e-4
"""Rates in the results are rounded."""

_CELLS = {
    "judged": ("num_judged", ".0f"),
    "missed": ("num_missed", ".0f"),
    "TTFT p99": ("ttft_ms_p99", ".0f"),
    "TPOT p99": ("tpot_ms_p99", ".1f"),
    "norm. p99": ("normalized_ms_p99", ".1f"),
    "KV imbal.": ("kv_imbalance", ".0%"),
    "row imbal.": ("row_imbalance", ".0%"),
}
"""Column -> name in the results, format; times in ms."""

Results = dict[str, dict[str, dict[str, Any]]]


def least_ratio(key: str, rival: str) -> float:
    """How many times the rival's rate cost_aware must be shown to sustain on a workload.

    It is at least 1, although less is claimed: to show that takes as few runs.
    """
    claimed = (least for _, policy, others, least in _claims(key) if rival in others)
    return max(1.0, *claimed)


def show(results: Results, console: Console) -> None:
    """A table for each workload. A rate after "<" is one that is not sustained."""
    for key, rates in results["max_rate"].items():
        table = Table(title=key)
        for column in ("policy", "requests/s", "of fluid", *_CELLS):
            table.add_column(column, justify="left" if column == "policy" else "right")
        fails_at = results["fails_at"].get(key, {})
        for policy in rates | fails_at:
            if policy not in rates:
                table.add_row(policy, f"< {fails_at[policy]:.2f}")
                continue
            values = [(results[name].get(key, {}), form) for name, form in _CELLS.values()]
            table.add_row(
                policy,
                f"{rates[policy]:.2f}",
                f"{rates[policy] / rates[FLUID]:.3f}" if rates.get(FLUID) else "-",
                *(f"{of[policy]:{form}}" if policy in of else "-" for of, form in values),
            )
        console.print(table)
        for policy, num_allowed in results["num_allowed"].get(key, {}).items():
            if rates[policy] and num_allowed < LEAST_ALLOWED_MISSES:
                console.print(f"{key}, {policy}: only {num_allowed} misses were allowed")


def judge(results: Results, console: Console) -> int:
    """Say which claims hold; returns how many do not.

    A claim about what was not measured is shown and not judged. That the minutes suffice is said
    only if all claims of all rows are judged; too many are too many without them.
    """
    table = Table(title="claims")
    for column in ("workload", "claim", "measured", "claimed", "holds"):
        table.add_column(column)
    broken = num_open = 0
    for key, rates in results["max_rate"].items():
        at_most = results.get("fails_at", {}).get(key, {}) | rates
        for claim, policy, others, least in _claims(key):
            best = max(others, key=lambda other: at_most.get(other, 0.0))
            if policy not in rates or not at_most.keys() >= {*others} or not at_most[best]:
                num_open += 1
                table.add_row(key, claim, "-", f">= {least}", "not judged")
                continue
            ratio = rates[policy] / at_most[best]
            holds = ratio >= least - _ROUNDING
            broken += not holds
            measured = f"{ratio:.3f}" if best in rates else f"> {ratio:.3f}"
            table.add_row(key, claim, measured, f">= {least}", "yes" if holds else "no")
    if cpu_s := sum(sum(policies.values()) for policies in results.get("cpu_s", {}).values()):
        is_whole = not num_open and len(results["max_rate"]) >= NUM_ROWS
        holds = cpu_s <= 60 * MAX_CPU_MINUTES
        broken += not holds
        said = "no" if not holds else "yes" if is_whole else "not judged"
        claimed = f"<= {MAX_CPU_MINUTES}"
        table.add_row("all", "processor minutes", f"{cpu_s / 60:.0f}", claimed, said)
    console.print(table)
    if num_open or len(results["max_rate"]) < NUM_ROWS:
        rows = f"{len(results['max_rate'])} of {NUM_ROWS} rows are there"
        console.print(f"{rows}; {num_open} of their claims are not judged")
    return broken


def _claims(key: str) -> list[tuple[str, str, tuple[str, ...], float]]:
    """(claim, policy, against the best of, at least) of a workload."""
    beats_paper = ("cost_aware / dual_balanced", COST_AWARE, ("dual_balanced",), 1.15)
    loses_nowhere = ("cost_aware / best of all others", COST_AWARE, RIVALS, 0.97)
    name, _, constants = key.partition("/")[0].partition("@")
    of_fluid = ("cost_aware / fluid", COST_AWARE, (FLUID,), 0.92 if constants else 0.90)
    if name not in CLOSE:
        return [loses_nowhere]
    if constants:
        return [of_fluid, loses_nowhere]
    # The bound without a target: with one it is no bound of the policy's placement alone. So unlike
    # is compared with unlike, and the claim says so.
    aimed = [
        (f"{AIMED} / {others[0]} without a target", AIMED, others, least)
        for _, _, others, least in (of_fluid, beats_paper)
    ]
    return [of_fluid, loses_nowhere, beats_paper, *aimed]
