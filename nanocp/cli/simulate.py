"""`nanocp simulate`: policies on a pretend cluster, and `nanocp simulate sweep`: the highest rate
that each sustains.

Enters: names of a cluster, a workload and policies. Leaves: a table, or one JSON object. Does not
know: how it is done.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from control_plane.scheduler.explanation import Explainer
    from nanocp.simulator.cluster_file import ClusterFile
    from nanocp.simulator.cost import CostModel
    from nanocp.simulator.outcome import Outcome, Run
    from nanocp.simulator.replay import Difference, Replayed
    from nanocp.simulator.reports.timeline import Timeline
    from nanocp.simulator.simulation import Simulation
    from nanocp.simulator.workload import Workload
    from nanocp.simulator.workload_request import WorkloadRequest

_WIDTH = 110
_LONGEST = 1e9

app = typer.Typer(help="Policies on a pretend cluster, without a GPU.", invoke_without_command=True)

Cluster = Annotated[str, typer.Option(help="A cluster that ships, or a .yaml file.")]
Constants = Annotated[
    str, typer.Option(help="Set of cost constants in the cluster file: peak or fitted.")
]
WorkloadName = Annotated[
    str,
    typer.Option(
        "--workload",
        help="issue-0, -1, -5, -100 (percent of long requests); static-1, -3, -5, -7 (long requests a node, everybody "
        "there at once, no rate); mooncake:FILE or azure:FILE (traces).",
    ),
]
Policies = Annotated[
    list[str], typer.Option("--policy", help="A policy, or fluid, the bound. May be given again.")
]
Seconds = Annotated[float, typer.Option(help="Simulated seconds that are measured.")]
WarmUp = Annotated[float, typer.Option(help="Simulated seconds before them.")]
Seed = Annotated[int, typer.Option(help="Seed of arrivals and lengths.")]
Burstiness = Annotated[
    float,
    typer.Option(help="Shape of the gamma gaps between arrivals: 1 is Poisson, less is burstier."),
]
LengthScale = Annotated[float, typer.Option(help="Factor on prompt lengths.")]
SloMs = Annotated[float, typer.Option(help="Most milliseconds for an output token.")]
StepsPerWindow = Annotated[int, typer.Option(help="Steps that one plan covers.")]
PrefixSharing = Annotated[
    bool, typer.Option(help="Whether requests share pages of prompts that begin alike.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of the table.")]
Plots = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Write pictures there: TPOT, balance, queue, layers, scheduler, CP.",
        file_okay=False,
    ),
]
Trace = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write a trace there, for ui.perfetto.dev or chrome://tracing.",
        dir_okay=False,
    ),
]
Explain = Annotated[
    list[str],
    typer.Option(
        metavar="REQUEST",
        help="Say why a request went where it went: its number in order of arrival, from 1, or `long`, the first with "
        "a CP degree above 1 after the warm-up. May be given again.",
    ),
]


@app.callback()
def simulate(
    context: typer.Context,
    cluster: Cluster = "h200x32-deepseek-v3",
    constants: Constants = "fitted",
    workload: WorkloadName = "issue-1",
    policy: Policies = ["dual_balanced"],  # noqa: B006 (typer copies it)
    rate: Annotated[float, typer.Option(help="Requests a second.")] = 30.0,
    seconds: Seconds = 60.0,
    warm_up: WarmUp = 40.0,
    seed: Seed = 0,
    burstiness: Burstiness = 1.0,
    length_scale: LengthScale = 1.0,
    slo_ms: SloMs = 50.0,
    steps_per_window: StepsPerWindow = 1,
    prefix_sharing: PrefixSharing = True,
    as_json: AsJson = False,
    plots: Plots = None,
    trace: Trace = None,
    explain: Explain = [],  # noqa: B006 (typer copies it)
    event_log: Annotated[
        Path | None,
        typer.Option(
            help="Write every call of the brain to this file, for `replay`.", metavar="FILE"
        ),
    ] = None,
) -> None:
    """Run each policy at one rate."""
    if context.invoked_subcommand is not None:
        return
    from nanocp.simulator.outcome import Recorder
    from nanocp.simulator.reports.timeline import Timeline
    from nanocp.simulator.simulation import make_simulation
    from nanocp.simulator.workload import STATIC

    console = _console()
    results: dict[str, dict[str, Any]] = {}
    runs: dict[str, tuple[Timeline, CostModel]] = {}
    explainers: dict[str, Explainer] = {}
    try:
        if event_log is not None and len(policy) > 1:
            raise ValueError(f"--event-log is of one run; {len(policy)} policies are given")
        file, load, run = _setup(
            cluster, workload, rate, seed, burstiness, length_scale, seconds, warm_up, slo_ms
        )
        _prepare(plots, trace)
        for name in policy:
            recorder = Timeline(run) if plots or trace else Recorder(run)
            explainers[name] = _explainer(explain, run.warm_up_us)
            arguments = (
                name,
                run,
                steps_per_window,
                recorder,
                event_log,
                explainers[name] if explain else None,
            )
            simulation = make_simulation(file, constants, *arguments, prefix_sharing)
            results[name] = _play(simulation, name, run, load.requests(file.cluster.max_model_len))
            if isinstance(recorder, Timeline):
                runs[name] = recorder, simulation.model
        _write_reports(plots, trace, runs, file)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        for name, explainer in explainers.items() if explain else ():
            results[name]["explained"] = _explained(explainer)
        print(json.dumps(results))
    else:
        pace = "" if workload in STATIC else f" at {rate:g}/s"
        _show(
            console,
            f"{cluster}, {constants}: {workload}{pace} for {seconds:g} s, seed {seed}",
            results,
        )
        for name, explainer in explainers.items():
            _show_stories(console, f"policy {name}", explainer, file.cluster.instances_per_node)
    for explainer in explainers.values():
        _check_explained(explain, explainer)


@app.command()
def sweep(
    cluster: Cluster = "h200x32-deepseek-v3",
    constants: Constants = "fitted",
    workload: WorkloadName = "issue-1",
    policy: Policies = ["dual_balanced"],  # noqa: B006 (typer copies it)
    first_rate: Annotated[float, typer.Option(help="Requests a second to begin with.")] = 30.0,
    seconds: Seconds = 60.0,
    warm_up: WarmUp = 40.0,
    seed: Seed = 0,
    burstiness: Burstiness = 1.0,
    length_scale: LengthScale = 1.0,
    slo_ms: SloMs = 50.0,
    steps_per_window: StepsPerWindow = 1,
    as_json: AsJson = False,
) -> None:
    """Find the highest rate at which 99% of the requests meet the SLO."""
    from rich.table import Table

    from nanocp.simulator.sweep import sweep as sweep_policy

    console = _console()
    rates: dict[str, dict[str, Any]] = {}
    try:
        file, load, run = _setup(
            cluster, workload, first_rate, seed, burstiness, length_scale, seconds, warm_up, slo_ms
        )
        with _progress() as progress:
            for name in policy:
                task = progress.add_task(name, total=None)

                def tried(
                    rate: float, is_sustained: bool, task: Any = task, name: str = name
                ) -> None:
                    progress.update(
                        task,
                        description=f"{name}: {rate:.1f}/s {'held' if is_sustained else 'missed'}",
                    )

                found = sweep_policy(file, constants, name, load, run, steps_per_window, tried)
                progress.update(task, total=1, completed=1)
                rates[name] = {
                    "max_rate": found.rate_per_s,
                    "runs": found.num_runs,
                    **_numbers(found.outcome),
                }
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        print(json.dumps(rates))
        return
    console.print(
        f"{cluster}, {constants}: {workload}, highest rate with 99% of requests within {slo_ms:g} ms"
    )
    table = Table()
    for column in (
        "policy",
        "requests/s",
        "TPOT p50 ms",
        "TPOT p99 ms",
        "KV imbalance",
        "row imbalance",
    ):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for name, numbers in rates.items():
        cells = [f"{numbers['max_rate']:.1f}"]
        if "tpot_ms_p50" in numbers:
            cells += [f"{numbers[key]:.1f}" for key in ("tpot_ms_p50", "tpot_ms_p99")]
            cells += [f"{numbers[key]:.1%}" for key in ("kv_imbalance", "row_imbalance")]
        table.add_row(name, *cells)
    console.print(table)


@app.command()
def replay(
    log: Annotated[
        Path,
        typer.Argument(
            help="What `nanocp serve --event-log` or `nanocp simulate --event-log` wrote."
        ),
    ],
    explain: Explain = [],  # noqa: B006 (typer copies it)
    as_json: AsJson = False,
) -> None:
    """Play an event log again, and check that every plan is the same, byte for byte; exit status 1
    if one is not."""
    from rich import progress

    from control_plane.event_log import LogReader
    from nanocp.simulator.replay import replay as replay_log

    try:
        explainer = _explainer(explain, 0)
        with progress.open(
            log, "rb", description="replay", transient=True, console=_terminal()
        ) as lines:
            reader = LogReader(lines, str(log))
            played = replay_log(reader, explainer if explain else None)
    except OSError as error:
        raise typer.BadParameter(f"the event log {log} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        print(
            json.dumps(asdict(played) | ({"explained": _explained(explainer)} if explain else {}))
        )
    else:
        print(_story(played))
        _show_stories(_console(), "", explainer, reader.header.cluster.instances_per_node)
    _check_explained(explain, explainer)
    raise typer.Exit(1 if played.difference else 0)


def _story(played: Replayed) -> str:
    """What was played, a sentence a line."""
    sentences = [
        f"{played.num_calls:,} calls, {played.num_windows:,} windows, {played.num_requests:,} requests in "
        f"{played.span_us / 1e6:.1f} s on {played.num_instances} instances, policy {played.policy}"
    ]
    if played.is_truncated:
        sentences.append("the last record is cut off: its call is not counted")
    if played.failure:
        sentences.append(
            f"in the last call the brain fails, as it did when it was recorded: {played.failure}"
        )
    sentences.append(
        _what_differs(played.difference)
        if played.difference
        else "every plan is the same, byte for byte"
    )
    return "\n".join(sentences)


def _what_differs(difference: Difference) -> str:
    where = f"call {difference.call:,} (now_us {difference.now_us})"
    if difference.replayed is None:
        return f"{where} differs: the brain fails, as it did not when it was recorded: {difference.error}"
    if difference.recorded is None:
        return f"{where} differs: the brain failed when it was recorded, and does not now"
    parts = [
        f"{name} was {difference.recorded.get(name, 'none')} and is {difference.replayed.get(name, 'none')}"
        for name in difference.fields
    ]
    return f"{where} differs: " + ", ".join(parts)


def _explainer(explain: list[str], long_from_us: int) -> Explainer:
    """Raises ValueError for what is neither a request's number nor `long`."""
    from control_plane.scheduler.explanation import Explainer

    for word in explain:
        if word != "long" and not (word.isascii() and word.isdigit() and int(word) >= 1):
            raise ValueError(
                f"--explain is {word!r}; it must be the number of a request, from 1 on, or long"
            )
    return Explainer(
        [int(word) for word in explain if word != "long"],
        long_from_us if "long" in explain else None,
    )


def _explained(explainer: Explainer) -> list[dict[str, Any]]:
    from nanocp.simulator.reports.explanation import story_values

    return [story_values(story) for story in explainer.stories.values()]


def _show_stories(
    console: Console, title: str, explainer: Explainer, instances_per_node: int
) -> None:
    from nanocp.simulator.reports.explanation import show_story

    if explainer.stories and title:
        console.print(f"\n{title}", style="bold")
    for story in explainer.stories.values():
        show_story(console, story, instances_per_node)


def _check_explained(explain: list[str], explainer: Explainer) -> None:
    """What was asked for and did not arrive is said after everything else. Raises BadParameter."""
    for word in explain:
        if word == "long" and explainer.first_long_from_us is not None:
            raise typer.BadParameter(
                "--explain long: no request with a CP degree above 1 arrived after the warm-up"
            )
        if word != "long" and int(word) not in explainer.stories:
            last = explainer.last_request_id
            raise typer.BadParameter(
                f"--explain {word}: no such request arrived; the last to arrive was number {last}"
            )


def _setup(
    cluster: str,
    workload: str,
    rate: float,
    seed: int,
    burstiness: float,
    length_scale: float,
    seconds: float,
    warm_up: float,
    slo_ms: float,
) -> tuple[ClusterFile, Workload, Run]:
    from nanocp.simulator.cluster_file import load_cluster_file
    from nanocp.simulator.outcome import Run
    from nanocp.simulator.workload import Workload

    for name, value in (("seconds", seconds), ("warm-up", warm_up), ("slo-ms", slo_ms)):
        if not 0 <= value <= _LONGEST:
            raise ValueError(f"--{name} is {value:g}; it must be from 0 to {_LONGEST:g}")
    run = Run(round(warm_up * 1e6), round(seconds * 1e6), round(slo_ms * 1e3))
    file = load_cluster_file(cluster)
    nodes = {
        "num_instances": file.cluster.num_instances,
        "instances_per_node": file.cluster.instances_per_node,
    }
    return file, Workload(workload, rate, seed, burstiness, length_scale, **nodes), run


def _play(
    simulation: Simulation, name: str, run: Run, requests: Iterator[WorkloadRequest]
) -> dict[str, Any]:
    began_s = time.perf_counter()
    with _progress() as progress:
        task = progress.add_task(name, total=run.end_us)
        outcome = simulation.run(requests, lambda now_us: progress.update(task, completed=now_us))
    wall_s = time.perf_counter() - began_s
    return {**_numbers(outcome), "wall_s": wall_s, "times_real_time": run.end_us / 1e6 / wall_s}


def _prepare(plots: Path | None, trace: Path | None) -> None:
    """What cannot be written is known before the run, not after it. Raises ValueError."""
    for option, path in (("--plots", plots), ("--trace", trace)):
        try:
            if option == "--plots" and path:
                path.mkdir(parents=True, exist_ok=True)
            elif path:
                path.touch()
        except OSError as error:
            raise ValueError(f"{option} {path} cannot be written: {error.strerror}") from error


def _write_reports(
    plots: Path | None,
    trace: Path | None,
    runs: dict[str, tuple[Timeline, CostModel]],
    file: ClusterFile,
) -> None:
    if plots:
        from nanocp.simulator.reports.pictures import write_run_pictures

        write_run_pictures(plots, {policy: timeline for policy, (timeline, _) in runs.items()})
    if trace:
        from nanocp.simulator.reports.chrome_trace import write_trace

        write_trace(trace, runs, file.model)


def _numbers(outcome: Outcome | None) -> dict[str, Any]:
    if outcome is None:
        return {}
    return {
        **asdict(outcome),
        "layer_us": outcome.layer_us._asdict(),
        "layer_us_max": outcome.layer_us_max._asdict(),
    }


def _show(console: Console, title: str, results: dict[str, dict[str, Any]]) -> None:
    from rich.table import Table

    rows = (
        ("requests judged", "num_judged", "{:,}"),
        ("TPOT p50, ms (queueing in it)", "tpot_ms_p50", "{:.1f}"),
        ("TPOT p99, ms", "tpot_ms_p99", "{:.1f}"),
        ("within the SLO", "attainment", "{:.2%}"),
        ("refused", "num_refused", "{:,}"),
        ("queueing p99, ms", "queueing_ms_p99", "{:.1f}"),
        ("waiting, most", "num_waiting_max", "{:,}"),
        ("frames free while some wait", "free_frames_share_while_waiting", "{:.1%}"),
        ("step, ms", "step_ms_mean", "{:.2f}"),
        ("rows in the cluster", "num_rows_mean", "{:,.0f}"),
        ("KV imbalance, (max - mean) / mean", "kv_imbalance", "{:.1%}"),
        ("row imbalance", "row_imbalance", "{:.1%}"),
        ("requests with CP", "cp_share", "{:.2%}"),
        ("prompt tokens shared", "prefix_hit_rate", "{:.1%}"),
        ("scheduler, ms a window", "plan_ms_mean", "{:.2f}"),
        ("scheduler, share of the step", "plan_share", "{:.2%}"),
        ("times real time", "times_real_time", "{:.1f}"),
    )
    # No title of the table: it would be broken at the table's width.
    console.print(title)
    table = Table()
    table.add_column("")
    for policy in results:
        table.add_column(policy, justify="right")
    for label, key, form in rows:
        table.add_row(label, *(form.format(numbers[key]) for numbers in results.values()))
    table.add_section()
    for name in next(iter(results.values()))["layer_us"]:
        label = f"a layer's {name.removesuffix('_us').replace('_', ' + ')}, us"
        table.add_row(label, *(f"{numbers['layer_us'][name]:.1f}" for numbers in results.values()))
    console.print(table)


def _console() -> Console:
    """A terminal, or a width that a log can read."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)


def _progress() -> Progress:
    """On standard error, so that the result stands alone."""
    from rich.progress import Progress

    return Progress(console=_terminal(), transient=True)


def _terminal() -> Console:
    from rich.console import Console

    return Console(stderr=True)
