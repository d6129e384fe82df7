"""`nanocp simulate sweep`: the highest rate that each policy sustains.

Exit status: 1 if a policy sustains no rate.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from itertools import zip_longest
from statistics import fmean
from typing import TYPE_CHECKING, Any

import typer

from nanocp.cli.simulate.numbers import cell_of, numbers_of
from nanocp.cli.simulate.options import AsJson, Scenario
from nanocp.config.choices import Positive

if TYPE_CHECKING:
    from nanocp.simulator.sweep import Sweep

_COLUMNS = {
    "requests/s": ("max_rate", "{:.1f}"),
    "judged": ("num_judged", "{:,}"),
    "missed": ("num_missed", "{:,}"),
    "TTFT p50 ms": ("ttft_ms_p50", "{:.0f}"),
    "p99": ("ttft_ms_p99", "{:.0f}"),
    "TPOT p50 ms": ("tpot_ms_p50", "{:.1f}"),
    "p99 ": ("tpot_ms_p99", "{:.1f}"),
    "KV imbal.": ("kv_imbalance", "{:.0%}"),
    "row imbal.": ("row_imbalance", "{:.0%}"),
}
_MEANS = (
    "attainment",
    "ttft_ms_p50",
    "ttft_ms_p99",
    "tpot_ms_p50",
    "tpot_ms_p99",
    "normalized_ms_p50",
    "normalized_ms_p99",
    "kv_imbalance",
    "row_imbalance",
)


@dataclass(frozen=True, slots=True)
class Tries:
    """Runs of a sweep."""

    first_rate: float = 30.0
    """Requests a second to begin with."""
    seeds: Positive = 3
    """Seeds of a mix: the answer is their mean."""


def sweep(scenario: Scenario, tries: Tries, as_json: AsJson = False) -> None:
    """Find the highest rate at which 99% of the requests meet the SLO."""
    rates = _sweep(scenario, tries.first_rate, tries.seeds)
    if as_json:
        print(json.dumps(rates))
    else:
        _show(scenario, rates)
    hopeless = [policy for policy, numbers in rates.items() if not numbers["max_rate"]]
    for policy in hopeless:
        print(f"{policy}: no rate is sustained; is the SLO within reach?", file=sys.stderr)
    raise typer.Exit(1 if hopeless else 0)


def _sweep(scenario: Scenario, first_rate: float, seeds: int) -> dict[str, dict[str, Any]]:
    from nanocp.cli.options.console import said
    from nanocp.simulator.sweep import sweep

    rates: dict[str, dict[str, Any]] = {}
    with said() as say:
        for policy, trial in scenario.trials(first_rate).items():

            def tried(rate: float, is_sustained: bool, policy: str = policy) -> None:
                say(f"{policy}: {rate:.1f}/s {'held' if is_sustained else 'missed'}")

            rates[policy] = _numbers(sweep(trial, tried, num_seeds=seeds))
    return rates


def _numbers(found: Sweep) -> dict[str, Any]:
    numbers: dict[str, Any] = {
        "max_rate": found.rate_per_s,
        "runs": sum(one.num_runs for one in found.seeds),
        "rests_on_few": found.rests_on_few,
        "num_judged": sum(outcome.num_judged for outcome in found.outcomes),
        "num_missed": sum(outcome.num_missed for outcome in found.outcomes),
    }
    if found.outcomes:
        for name in _MEANS:
            numbers[name] = fmean(getattr(outcome, name) for outcome in found.outcomes)
    numbers["seeds"] = [
        {"rate": one.rate_per_s} | (numbers_of(one.outcome) if one.outcome else {})
        for one in found.seeds
    ]
    return numbers


def _show(scenario: Scenario, rates: dict[str, dict[str, Any]]) -> None:
    from rich.table import Table

    from nanocp.cli.options.console import output

    console = output()
    console.print(
        f"{scenario.cluster}, {scenario.set_of_constants}: {scenario.workload}, highest rate with "
        f"99% of requests within TPOT {scenario.slo_tpot_ms:g} ms and TTFT "
        f"{scenario.slo_ttft_ms:g} ms"
    )
    cells = {
        policy: [cell_of(numbers, key, form) for key, form in _COLUMNS.values() if key in numbers]
        for policy, numbers in rates.items()
    }
    rows = [["policy", *_COLUMNS], *([policy, *row] for policy, row in cells.items())]
    columns = [list(column) for column in zip_longest(*rows, fillvalue="")]
    if sum(3 + max(map(len, column)) for column in columns) >= console.width:
        rows = columns
    table = Table()
    for number, column in enumerate(rows[0]):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    for row in rows[1:]:
        table.add_row(*row)
    console.print(table)
    for policy, numbers in rates.items():
        if numbers["rests_on_few"]:
            console.print(
                f"{policy}: only {numbers['num_judged']:,} requests were judged, so fewer than 20 "
                "misses were allowed and a handful decided; measure longer (--seconds)",
                soft_wrap=True,
            )
