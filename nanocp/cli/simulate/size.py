"""`nanocp simulate size`: how many GPUs a load needs at an SLO, and what they cost.

Enters: a scenario whose cluster file says what memory holds; a rate, or a trace that has one.
Leaves: a table and sentences, one JSON object, an HTML report; exit status 1 if no size is enough.
Does not know: how sizes are tried.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanocp.cli.simulate.numbers import numbers_of
from nanocp.cli.simulate.options import AsJson, Scenario

if TYPE_CHECKING:
    from nanocp.simulator.size import Sizing, Tried
    from nanocp.simulator.trial import Trial

_COLUMNS = (
    "GPUs",
    "sustained",
    "judged",
    "missed",
    "TTFT p50 / p99, ms",
    "TPOT p50 / p99, ms",
    "frames in use",
)


def size(
    scenario: Scenario,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Your trace, instead of --workload: Mooncake's JSONL, or Azure's .csv.",
            dir_okay=False,
        ),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Requests a second. Default: the trace's own.")
    ] = None,
    usd_per_gpu_hour: Annotated[
        float | None, typer.Option(help="Price of one GPU for an hour, in US dollars.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a report there, one file.", dir_okay=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the smallest cluster that sustains a load: memory, headroom, cost."""
    from nanocp.cli.console import progress
    from nanocp.simulator.size import size as find_size

    try:
        trial = _trial(scenario, trace, rate)
        if html is not None:
            html.touch()
        with progress() as bars:
            task = bars.add_task("trying sizes", total=None)
            found = find_size(trial, lambda n: bars.update(task, description=f"trying {n} GPUs"))
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    sentences = _sentences(found, trial, usd_per_gpu_hour)
    if html is not None:
        _write_html(html, found, trial, sentences)
    if as_json:
        print(json.dumps(_values(found, trial, usd_per_gpu_hour)))
    else:
        _show(found, trial, sentences)
    raise typer.Exit(0 if found.answer else 1)


def _trial(scenario: Scenario, trace: Path | None, rate: float | None) -> Trial:
    from nanocp.simulator.workload import own_rate

    if trace is not None:
        kind = "azure" if trace.suffix == ".csv" else "mooncake"
        scenario = replace(scenario, workload=f"{kind}:{trace}")
    if rate is None:
        rate = own_rate(scenario.workload)
    trials = scenario.trials(rate)
    if len(trials) > 1:
        raise ValueError(f"a size is found for one policy; {len(trials)} are given")
    return next(iter(trials.values()))


def _title(trial: Trial) -> str:
    memory = trial.file.memory
    load = f"{trial.workload.name} at {trial.workload.rate_per_s:.3g} requests/s"
    slo = f"TTFT {trial.slo.ttft_us / 1e3:g} ms and TPOT {trial.slo.tpot_us / 1e3:g} ms"
    return f"{memory.gpu if memory else 'GPUs'} for {load}: 99% within {slo}, {trial.policy}"


def _cells(one: Tried) -> list[str]:
    outcome = one.outcome
    if outcome is None:
        return [str(one.num_instances), one.why_not]
    return [
        str(one.num_instances),
        "yes" if one.is_enough else "no",
        f"{outcome.num_judged:,}",
        f"{outcome.num_missed:,}",
        f"{outcome.ttft_ms_p50:.0f} / {outcome.ttft_ms_p99:.0f}",
        f"{outcome.tpot_ms_p50:.1f} / {outcome.tpot_ms_p99:.1f}",
        f"{outcome.frames_used_share:.0%}",
    ]


def _cost(found: Sizing, trial: Trial, usd_per_gpu_hour: float) -> tuple[float, float]:
    """(dollars an hour, dollars for a million output tokens)."""
    assert found.answer is not None and found.answer.outcome is not None
    an_hour = found.answer.num_instances * usd_per_gpu_hour
    outcome = found.answer.outcome
    tokens_per_s = outcome.num_rows_mean / (outcome.step_ms_mean / 1e3)
    return an_hour, an_hour / 3600 / tokens_per_s * 1e6


def _sentences(found: Sizing, trial: Trial, usd_per_gpu_hour: float | None) -> list[str]:
    answer, memory = found.answer, trial.file.memory
    if answer is None or answer.outcome is None or memory is None or found.most is None:
        return ["No size sustains this load."]
    file, outcome = trial.file, answer.outcome
    kv_gb = answer.num_frames * 64 * file.model.kv_bytes_per_token / 1e9
    tokens = answer.num_instances * answer.num_frames * 64
    rate, most = trial.workload.rate_per_s, found.most.rate_per_s
    sentences = [
        f"{answer.num_instances} {memory.gpu} sustain it.",
        f"Memory: each has {memory.hbm_gb:g} GB, of which {kv_gb:.1f} GB hold KV; together "
        f"{tokens / 1e6:.1f} million tokens, of which {outcome.frames_used_share:.0%} are in use.",
        f"Headroom: they sustain {most:.3g} requests/s, {most / rate - 1:.0%} more than asked.",
    ]
    if usd_per_gpu_hour is not None:
        an_hour, a_million = _cost(found, trial, usd_per_gpu_hour)
        sentences.append(
            f"Cost: ${an_hour:,.2f} an hour, ${a_million:,.2f} for a million output tokens at "
            f"${usd_per_gpu_hour:g} a GPU and hour."
        )
    if guest := found.guest:
        first = "no token in time" if guest.ttft_ms is None else f"TTFT {guest.ttft_ms:,.0f} ms"
        later = "has not ended" if guest.tpot_ms is None else f"TPOT {guest.tpot_ms:.1f} ms"
        sentences.append(
            f"A request of {guest.prompt_len:,} tokens that arrives meanwhile: {first}, {later}, "
            f"CP degree {guest.cp_degree}; with it TTFT p99 of all is "
            f"{guest.others.ttft_ms_p99:.0f} ms and TPOT p99 {guest.others.tpot_ms_p99:.1f} ms."
        )
    if outcome.num_allowed_misses < 20:
        sentences.append(
            f"Only {outcome.num_judged:,} requests were judged: fewer than 20 misses were allowed."
        )
    return sentences


def _values(found: Sizing, trial: Trial, usd_per_gpu_hour: float | None) -> dict[str, Any]:
    answer, guest = found.answer, found.guest
    values: dict[str, Any] = {
        "num_instances": answer.num_instances if answer else None,
        "rate": trial.workload.rate_per_s,
        "max_rate": found.most.rate_per_s if found.most else None,
        "tried": [
            {
                "num_instances": one.num_instances,
                "num_frames": one.num_frames,
                "why_not": one.why_not,
                **(numbers_of(one.outcome) if one.outcome else {}),
            }
            for one in found.tried
        ],
    }
    if answer and usd_per_gpu_hour is not None:
        an_hour, a_million = _cost(found, trial, usd_per_gpu_hour)
        values |= {"usd_per_hour": an_hour, "usd_per_million_output_tokens": a_million}
    if guest:
        values["long_request"] = {
            "prompt_len": guest.prompt_len,
            "cp_degree": guest.cp_degree,
            "ttft_ms": guest.ttft_ms,
            "tpot_ms": guest.tpot_ms,
        }
    return values


def _show(found: Sizing, trial: Trial, sentences: list[str]) -> None:
    from rich.table import Table

    from nanocp.cli.console import output

    console = output()
    console.print(_title(trial), soft_wrap=True)
    table = Table()
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for one in found.tried:
        if one.outcome is not None:
            table.add_row(*_cells(one))
    console.print(table)
    for one in found.tried:
        if one.why_not:
            console.print(f"{one.num_instances}: {one.why_not}", soft_wrap=True)
    for sentence in sentences:
        console.print(sentence, soft_wrap=True)


def _write_html(path: Path, found: Sizing, trial: Trial, sentences: list[str]) -> None:
    from nanocp.simulator.reports.html import HtmlPage
    from nanocp.simulator.reports.pictures import RUN_PICTURES

    report = HtmlPage(_title(trial))
    for sentence in sentences:
        report.sentence(sentence)
    report.table("Sizes", _COLUMNS, [_cells(one) for one in found.tried])
    if found.timeline is not None and found.timeline.samples:
        report.pictures(RUN_PICTURES, {trial.policy: found.timeline})
    report.write(path)
