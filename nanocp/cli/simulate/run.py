"""`nanocp simulate`: policies on a simulated cluster, at one rate.

Exit status: 1 if a run's load drifted or nothing was judged.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanocp.cli.options.typed import Option
from nanocp.cli.simulate.explain import (
    Explain,
    check_explained,
    explained,
    explainer,
    show_stories,
)
from nanocp.cli.simulate.numbers import all_judged, numbers_of, table_of
from nanocp.cli.simulate.options import AsJson, Reports, Scenario
from nanocp.cli.simulate.pipeline import LAYOUTS, run_pipeline
from nanocp.config.choices import Natural, Positive, check_one_of

if TYPE_CHECKING:
    from control_plane.scheduler.explanation import Explainer
    from nanocp.simulator.costs.cluster_file import ClusterFile
    from nanocp.simulator.reports.timeline import TimelineRecorder
    from nanocp.simulator.simulation import Simulation
    from nanocp.simulator.trial import Trial


@dataclass(frozen=True, slots=True)
class _Played:
    file: ClusterFile
    seconds: float
    """Measured."""
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: dict[str, Explainer] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of a run only."""

    layout: Option[str] = "instances"
    """instances; or pipeline, where each stage has some layers (docs/develop/pipeline.md). Its
    policies: even, static:13,13,13,9, delta, level, spread_sampling (also :passes, :vocabulary) and
    fluid, the bound."""
    prefix_sharing: bool = True
    """Requests share pages of prompts that begin alike."""
    host_pages: Natural = 0
    """Pages of prompts that each instance keeps outside its frames. Not for fluid."""
    groups: Positive = 1
    """Clusters side by side, behind a router that sees their loads every 5 s; the rate is that of
    all. Not for fluid, explanations and reports."""


def run(
    context: typer.Context,
    scenario: Scenario,
    reports: Reports,
    options: RunOptions,
    rate: Annotated[
        float, typer.Option(help="Requests a second; a trace's times are stretched to it.")
    ] = 30.0,
    explain: Explain = [],  # noqa: B006 (typer copies it)
    as_json: AsJson = False,
) -> None:
    """Run each policy at one rate."""
    if context.invoked_subcommand is not None:
        return
    from nanocp.simulator.loads.workload import STATIC

    check_one_of(LAYOUTS, layout=options.layout)
    if options.layout == "pipeline":
        run_pipeline(context, scenario, rate, as_json)
        return
    if options.host_pages and not options.prefix_sharing:
        raise ValueError("host_pages finds pages by the hashes of prefix_sharing")
    pages = {"prefix_sharing": options.prefix_sharing, "host_pages": options.host_pages}
    if options.groups == 1:
        played = _run(scenario, reports, rate, pages, explain)
    elif explain or reports != Reports() or "fluid" in scenario.policy:
        raise ValueError("groups is not for policy fluid, --explain and reports")
    else:
        played = _run_groups(scenario, rate, pages, options.groups)
    if as_json:
        for policy, notes in played.notes.items() if explain else ():
            played.numbers[policy]["explained"] = explained(notes)
        print(json.dumps(played.numbers))
    else:
        _show(scenario, rate, played)
    for notes in played.notes.values():
        check_explained(explain, notes)
    drifting = {p: numbers for p, numbers in played.numbers.items() if numbers["is_drifting"]}
    for policy, numbers in drifting.items():
        print(_drift_sentence(policy, numbers), file=sys.stderr)
    # Of the static scenario no request ends: its steps are measured.
    is_judged = scenario.workload in STATIC or all_judged(
        {policy: numbers["num_judged"] for policy, numbers in played.numbers.items()}
    )
    raise typer.Exit(0 if is_judged and not drifting else 1)


def _drift_sentence(policy: str, numbers: dict[str, Any]) -> str:
    verb = "grew" if numbers["drift"] > 0 else "fell"
    return (
        f"{policy}: the number of requests in the cluster {verb} by {abs(numbers['drift']):.0%} "
        "from the first half of the measured time to the second; these are not the numbers of a "
        "steady state"
    )


def _run(
    scenario: Scenario, reports: Reports, rate: float, pages: dict[str, Any], explain: list[str]
) -> _Played:
    """Simulate each policy, from a cluster as full as after a long time.

    pages: fields of each Trial. Raises ValueError for options without a meaning, OSError for files
    that cannot be written.
    """
    from nanocp.simulator.outcome import Recorder
    from nanocp.simulator.reports.timeline import TimelineRecorder

    if reports.event_log is not None and len(scenario.policy) > 1:
        raise ValueError(f"--event-log is of one run; {len(scenario.policy)} policies are given")
    trials = scenario.trials(rate)
    first = next(iter(trials.values()))
    _check_hashes(pages, first, scenario)
    reports.prepare()
    played = _Played(first.file, first.run.measure_us / 1e6)
    timelines: dict[str, TimelineRecorder] = {}
    for policy, trial in trials.items():
        trial = replace(trial, **pages).filled()
        recorder = TimelineRecorder(trial.run) if reports.plots else Recorder(trial.run)
        notes = played.notes[policy] = explainer(explain, trial.warm_up_us)
        simulation = trial.simulation(recorder, reports.event_log, notes if explain else None)
        played.numbers[policy] = _play(simulation, policy, trial)
        if isinstance(recorder, TimelineRecorder):
            timelines[policy] = recorder
    if reports.plots:
        from nanocp.simulator.reports.pictures import write_run_pictures

        write_run_pictures(reports.plots, timelines, _title(scenario, rate, played))
    return played


def _check_hashes(pages: dict[str, Any], first: Trial, scenario: Scenario) -> None:
    if pages["host_pages"] and not any(each.hash_ids for each in islice(first.requests(), 1000)):
        raise ValueError(f"host_pages finds pages by hashes, and {scenario.workload} has none")


def _run_groups(scenario: Scenario, rate: float, pages: dict[str, Any], num_groups: int) -> _Played:
    from nanocp.cli.options.console import progress
    from nanocp.simulator.analyser.groups import play_groups
    from nanocp.simulator.loads.workload import STATIC

    trials = scenario.trials(rate)
    first = next(iter(trials.values()))
    if first.workload.name in STATIC:
        raise ValueError(f"groups share arrivals, and {first.workload.name} has none")
    _check_hashes(pages, first, scenario)
    played = _Played(first.file, first.run.measure_us / 1e6)
    with progress() as bars:
        for policy, trial in trials.items():
            bars.add_task(f"{policy}, {num_groups} groups", total=None)
            began_s = time.perf_counter()
            outcomes = play_groups(replace(trial, **pages), num_groups)
            wall_s = time.perf_counter() - began_s
            took = {"wall_s": wall_s, "times_real_time": trial.run.end_us / 1e6 / wall_s}
            for number, outcome in enumerate(outcomes, start=1):
                played.numbers[f"{policy}, group {number}"] = numbers_of(outcome) | took
    return played


def _play(simulation: Simulation, policy: str, trial: Trial) -> dict[str, Any]:
    from nanocp.cli.options.console import progress

    run = trial.run
    began_s = time.perf_counter()
    with progress() as bars:
        task = bars.add_task(policy, total=run.end_us)
        outcome = simulation.run(
            trial.requests(), lambda now_us: bars.update(task, completed=now_us)
        )
    wall_s = time.perf_counter() - began_s
    numbers = {"wall_s": wall_s, "times_real_time": run.end_us / 1e6 / wall_s}
    return numbers_of(outcome) | numbers


def _title(scenario: Scenario, rate: float, played: _Played) -> str:
    from nanocp.simulator.loads.workload import STATIC

    pace = "" if scenario.workload in STATIC else f" at {rate:g}/s"
    return (
        f"{scenario.cluster}, {scenario.set_of_constants}: {scenario.workload}{pace} for "
        f"{played.seconds:g} s, seed {scenario.seed}; SLO: TPOT {scenario.slo_tpot_ms:g} ms, "
        f"TTFT {scenario.slo_ttft_ms:g} ms; KV to come at arrival: "
        f"{played.file.ingest_tail_share:.0%}"
    )


def _show(scenario: Scenario, rate: float, played: _Played) -> None:
    from nanocp.cli.options.console import output

    console = output()
    # Not the table's title: it would be broken at the table's width.
    console.print(_title(scenario, rate, played))
    console.print(table_of(played.numbers))
    for policy, notes in played.notes.items():
        show_stories(console, f"policy {policy}", notes, played.file.cluster.instances_per_node)
