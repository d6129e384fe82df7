"""`nanocp simulate sweep`: the highest rate that each policy sustains.

Enters: a scenario. Leaves: a table, or one JSON object. Does not know: how the rate is found.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from nanocp.cli.simulate.numbers import numbers_of
from nanocp.cli.simulate.options import AsJson, Scenario


def sweep(
    scenario: Scenario,
    first_rate: Annotated[float, typer.Option(help="Requests a second to begin with.")] = 30.0,
    as_json: AsJson = False,
) -> None:
    """Find the highest rate at which 99% of the requests meet the SLO."""
    try:
        rates = _sweep(scenario, first_rate)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        print(json.dumps(rates))
    else:
        _show(scenario, rates)


def _sweep(scenario: Scenario, first_rate: float) -> dict[str, dict[str, Any]]:
    """By policy. Raises ValueError for options without a meaning."""
    from nanocp.cli.simulate.console import progress
    from nanocp.simulator.sweep import sweep

    file, workload, run = scenario.open(first_rate)
    rates: dict[str, dict[str, Any]] = {}
    with progress() as bars:
        for policy in scenario.policy:
            task = bars.add_task(policy, total=None)

            def tried(
                rate: float, is_sustained: bool, task: Any = task, policy: str = policy
            ) -> None:
                outcome = "held" if is_sustained else "missed"
                bars.update(task, description=f"{policy}: {rate:.1f}/s {outcome}")

            steps = scenario.steps_per_window
            found = sweep(file, scenario.constants, policy, workload, run, steps, tried)
            bars.update(task, total=1, completed=1)
            rates[policy] = {
                "max_rate": found.rate_per_s,
                "runs": found.num_runs,
                **(numbers_of(found.outcome) if found.outcome else {}),
            }
    return rates


def _show(scenario: Scenario, rates: dict[str, dict[str, Any]]) -> None:
    from rich.table import Table

    from nanocp.cli.simulate.console import output

    console = output()
    console.print(
        f"{scenario.cluster}, {scenario.constants}: {scenario.workload}, highest rate with 99% of "
        f"requests within {scenario.slo_ms:g} ms"
    )
    table = Table()
    table.add_column("policy")
    for column in ("requests/s", "TPOT p50 ms", "TPOT p99 ms", "KV imbalance", "row imbalance"):
        table.add_column(column, justify="right")
    for policy, numbers in rates.items():
        cells = [f"{numbers['max_rate']:.1f}"]
        if "tpot_ms_p50" in numbers:
            cells += [f"{numbers[key]:.1f}" for key in ("tpot_ms_p50", "tpot_ms_p99")]
            cells += [f"{numbers[key]:.1%}" for key in ("kv_imbalance", "row_imbalance")]
        table.add_row(policy, *cells)
    console.print(table)
