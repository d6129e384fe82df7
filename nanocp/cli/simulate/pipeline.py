"""`nanocp simulate --layout pipeline`: layer policies on a simulated pipeline, at one rate."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import typer

from nanocp.cli.options.typed import SET
from nanocp.cli.simulate.numbers import all_judged, cell_of
from nanocp.cli.simulate.options import Scenario

if TYPE_CHECKING:
    from nanocp.simulator.loads.workload_request import WorkloadRequest
    from nanocp.simulator.pipeline.outcome import PipelineOutcome

LAYOUTS = ("instances", "pipeline")
_CLUSTER, _WORKLOAD, _POLICIES = "a100x4-qwen2.5-14b", "sharegpt", ["even", "level"]
_HAVE_MEANING = {
    *("cluster", "constants", "workload", "policy", "seconds", "warm_up", "seed"),
    *("length_scale", "slo_tpot_ms", "slo_ttft_ms", "rate", "as_json"),
    "layout",
}
_SECONDS, _WARM_UP = 60.0, 15.0
_ROWS = (
    ("requests judged", "num_judged", "{:,}"),
    ("within the SLO", "attainment", "{:.2%}"),
    ("TTFT mean, ms", "ttft_ms_mean", "{:.1f}"),
    ("TTFT p99, ms", "ttft_ms_p99", "{:.1f}"),
    ("TPOT mean, ms", "tpot_ms_mean", "{:.1f}"),
    ("TPOT p99, ms", "tpot_ms_p99", "{:.1f}"),
    ("arrival to last token, mean, ms", "e2el_ms_mean", "{:,.0f}"),
    ("output tokens/s", "tokens_per_s", "{:,.0f}"),
    ("sampling / layer, mean (r)", "mean_r", "{:.2f}"),
    ("layout at the end", "split", "{}"),
    ("changes of layout", "num_changes", "{:,}"),
    ("layers moved", "num_moved_layers", "{:,}"),
    ("KV moved, MB", "moved_mb", "{:,.0f}"),
    ("waits for moved KV, ms", "stall_ms", "{:.1f}"),
    ("frames", "num_frames", "{:,}"),
    ("preempted", "num_preempted", "{:,}"),
    ("prediction's error, layer", "layer_error", "{:.1%}"),
    ("prediction's error, sampling", "sampling_error", "{:.1%}"),
)


def run_pipeline(
    context: typer.Context,
    scenario: Scenario,
    rate: float,
    as_json: bool,
) -> None:
    """Run each layer policy at one rate. Raises ValueError for options without a meaning."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = {name for name, source in sources.items() if source and source.name != "DEFAULT"}
    settings = {item.partition("=")[0] for item in context.params[SET]}
    if alien := sorted(settings - _HAVE_MEANING):
        raise ValueError(f"{alien[0]} has no meaning with --layout pipeline")
    if alien := sorted(given - _HAVE_MEANING - {SET}):
        raise ValueError(f"--{alien[0].replace('_', '-')} has no meaning with --layout pipeline")
    own = {"cluster": _CLUSTER, "workload": _WORKLOAD, "policy": _POLICIES, "warm_up": _WARM_UP}
    unset: dict[str, Any] = {
        name: value for name, value in own.items() if name not in given | settings
    }
    scenario = replace(scenario, **unset)
    outcomes = {policy: _play(scenario, policy, rate) for policy in dict.fromkeys(scenario.policy)}
    if as_json:
        print(json.dumps({name: numbers_of(outcome) for name, outcome in outcomes.items()}))
    else:
        _show(scenario, rate, outcomes)
    if not all_judged({policy: outcome.num_judged for policy, outcome in outcomes.items()}):
        raise typer.Exit(1)


def numbers_of(outcome: PipelineOutcome) -> dict[str, Any]:
    """The outcome's fields as JSON has them."""
    return asdict(outcome) | {"bubble": outcome.bubble}


def _play(scenario: Scenario, policy: str, rate: float) -> PipelineOutcome:
    from nanocp.simulator.loads.workload import Workload
    from nanocp.simulator.pipeline.pipeline_file import load_pipeline_file
    from nanocp.simulator.pipeline.simulation import PipelineTrial

    file = load_pipeline_file(scenario.cluster)
    workload = Workload(scenario.workload, rate, scenario.seed, length_scale=scenario.length_scale)
    end_us = 1e6 * (scenario.warm_up + (scenario.seconds or _SECONDS))
    requests: Iterator[WorkloadRequest] = takewhile(
        lambda request: request.arrival_us < end_us, workload.requests(file.max_model_len)
    )
    trial = PipelineTrial(
        file,
        policy,
        constants=scenario.constants or "fitted",
        warm_up_us=round(1e6 * scenario.warm_up),
        slo=scenario.slo,
    )
    return trial.play(requests)


def _show(
    scenario: Scenario,
    rate: float,
    outcomes: dict[str, PipelineOutcome],
) -> None:
    from rich.table import Table

    from nanocp.cli.options.console import output

    console = output()
    console.print(
        f"{scenario.cluster}, {scenario.constants or 'fitted'}: {scenario.workload} at {rate:g}/s, "
        f"seed {scenario.seed}; SLO: TPOT {scenario.slo_tpot_ms:g} ms, TTFT "
        f"{scenario.slo_ttft_ms:g} ms"
    )
    table = Table()
    table.add_column("")
    for policy in outcomes:
        table.add_column(policy, justify="right")
    for label, key, form in _ROWS:
        table.add_row(
            label, *(cell_of(each, key, form) for each in map(numbers_of, outcomes.values()))
        )
    num_stages = len(next(iter(outcomes.values())).bubbles)
    for stage in range(num_stages):
        cells = []
        for one in outcomes.values():
            causes = one.bubbles[stage]
            parts = ", ".join(f"{cause} {share:.0%}" for cause, share in causes.items() if share)
            cells.append(f"{sum(causes.values()):.1%} ({parts})" if parts else "0.0%")
        table.add_row(f"stage {stage} idle", *cells)
    console.print(table)
