"""The page of `nanocp plan --log`: a load today, and with CP by request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from textwrap import wrap
from typing import Any

import typer

from nanocp.simulator.analyser.analysis import (
    FINE_PRECISION,
    OURS,
    Analysis,
    LoadVerdict,
    Way,
    ways_today,
)
from nanocp.simulator.analyser.rank_gauges import RankGauges
from nanocp.simulator.costs.cluster_file import ClusterFile
from nanocp.simulator.loads.expert_loads import with_a_slot_more
from nanocp.simulator.loads.request_logs import RequestLog
from nanocp.simulator.simulation import FLUID
from nanocp.simulator.sweep import MAX_RATE
from nanocp.simulator.trial import Trial
from nanocp.values.plan import PAGE_SIZE

WIDTH = 120
_COLUMNS = (
    *("ms", "TTFT p50 / p99", "TPOT p50 / p99", "step", "waits", "KV imbal.", "row imbal."),
    *("in SLO", "req/s (judged)"),
)


def show(
    analysis: Analysis,
    trial: Trial,
    log: RequestLog,
    path: Path,
    gauges: RankGauges | None,
    html: Path | None,
    as_json: bool,
) -> None:
    """Print the page or the object, and write the file."""
    if as_json:
        values = _values(analysis, trial, log)
        print(json.dumps(values | ({"gauges": asdict(gauges)} if gauges else {})))
    else:
        for line in lines(analysis, trial, log, path, gauges):
            typer.echo(line)
    if html is not None:
        _write_html(html, analysis, trial, log, path, gauges)


def lines(
    analysis: Analysis, trial: Trial, log: RequestLog, path: Path, gauges: RankGauges | None
) -> list[str]:
    """The page."""
    head, verdict, tail = _sentences(analysis, trial, log, path, gauges)
    rows = [_COLUMNS, *(_cells(way, trial) for way in analysis.ways)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    table = [
        row[0].ljust(widths[0])
        + "".join(f"  {cell.rjust(width)}" for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]
    return [*_wrapped(head), "", *_wrapped([verdict]), "", *table, *_wrapped(tail)]


def _wrapped(sentences: list[str]) -> Iterator[str]:
    for sentence in sentences:
        yield from wrap(sentence, WIDTH)


def gauges_sentence(found: RankGauges) -> str:
    """Sentences on a running cluster's gauges."""
    parts = [
        f"Measured at {found.num_moments:,} moments of {found.num_ranks} ranks: rows "
        f"{found.rows_mean:.3g} a rank, {found.row_imbalance:.0%} more on the fullest"
    ]
    if found.kv_used is not None and found.kv_imbalance is not None:
        parts.append(f"KV {found.kv_used:.0%} in use, {found.kv_imbalance:.0%} more on the fullest")
    if found.kv_free_while_waiting is not None and found.one_waits_another_has_room is not None:
        parts.append(
            f"{found.kv_free_while_waiting:.0%} of the KV free while requests waited; at "
            f"{found.one_waits_another_has_room:.0%} of the moments one rank queued while another "
            "had room"
        )
    return f"{'; '.join(parts)}."


def cluster_sentences(file: ClusterFile) -> list[str]:
    """Sentences on each instance of a simulated cluster."""
    num, frames, memory = file.cluster.num_instances, file.cluster.num_frames, file.memory
    of_what = (
        f"{memory.gpu} of {memory.hbm_gb:g} GB, {memory.usable_share * memory.hbm_gb:.1f} of them "
        "usable"
        if memory
        else "instances"
    )
    model = file.model
    kv_gb = frames * PAGE_SIZE * model.kv_bytes_per_token / 1e9
    slot_bytes = 1e6 * model.num_moe_layers * model.expert_mb
    return [
        f"{num} x {of_what}; up to {file.cluster.bounds.max_rows} rows each.",
        f"It fits. KV: {frames * PAGE_SIZE:,} tokens ({kv_gb:.1f} GB) on one instance, "
        f"{num * frames * PAGE_SIZE:,} on all.",
        *slot_sentences(slot_bytes, model.num_experts, model.experts_per_token, num),
        "What a load would gain there: nanocp plan --log FILE.",
    ]


def slot_sentences(slot_bytes: float, experts: int, per_token: int, instances: int) -> list[str]:
    """A sentence on cluster.redundant_experts, if there are experts and several instances."""
    if not experts or instances < 2:
        return []
    before, after = with_a_slot_more(experts, per_token, instances)
    return [
        f"A redundant slot for experts takes {slot_bytes / 1e9:.2f} GB of each instance; by "
        f"log-normal (1.2) popularity the busiest has {after:.2f} of the mean, not {before:.2f}."
    ]


def _label(policy: str, trial: Trial) -> str:
    names = ways_today(trial.file.cluster.instances_per_node)
    return {OURS: "CP by request (NanoCP)", FLUID: "no imbalance (bound)", **names}[policy]


def _verdict(analysis: Analysis, trial: Trial) -> str:
    best, ours = analysis.best, analysis.ours
    name, slo = _label(best.policy, trial), trial.slo
    if analysis.verdict is LoadVerdict.TOO_SLOW:
        tpot_ms, ttft_ms = slo.tpot_us / 1e3, slo.ttft_us / 1e3
        return f"No way meets TPOT {tpot_ms:g} ms and TTFT {ttft_ms:g} ms at any rate tried."
    other = f"{_rate(best)} ({analysis.gain:.2f}x)" if best.rate_per_s else _rate(best)
    against = f"{_rate(ours)} requests/s within the SLO; {name} sustains {other}"
    if analysis.verdict is LoadVerdict.NOT_NEEDED:
        return f"You do not need this: CP by request would sustain {against}."
    if analysis.verdict is LoadVerdict.FEWER_GPUS:
        share = analysis.load.rate_per_s / best.rate_per_s
        return (
            f"Fewer GPUs help first: today's best way runs at {share:.0%} of what it sustains. CP "
            f"by request would sustain {against}."
        )
    weak = analysis.weak_groups
    hangs = f" Its shorter step hangs on: {', '.join(weak)}." if weak else ""
    return f"It pays: CP by request sustains {against}.{hangs}"


def _sentences(
    analysis: Analysis, trial: Trial, log: RequestLog, path: Path, gauges: RankGauges | None
) -> tuple[list[str], str, list[str]]:
    """(above the verdict, the verdict, below the table)."""
    load, file, best, ours = analysis.load, trial.file, analysis.best, analysis.ours
    gpu, num = file.memory.gpu if file.memory else "instances", file.cluster.num_instances
    cut = f", {load.num_cut:,} are cut to what the model allows" if load.num_cut else ""
    counts = {
        "lines skipped": log.num_skipped,
        "that failed left out": log.num_failed,
        "of the warm-up left out": log.num_warm_up,
    }
    skipped = "".join(f"; {number:,} {what}" for what, number in counts.items() if number)
    head = [
        f"{path.name}: {load.num_requests:,} requests, {load.rate_per_s:.3g}/s (read "
        f"{', '.join(log.fields)}{skipped}).",
        *log.notes,
        f"Prompts: p50 {load.prompt[0]:,}, p99 {load.prompt[1]:,}, most {load.prompt[2]:,}; the "
        f"longest 1% hold {load.share_of_longest:.0%} of all prompt tokens. Outputs: p50 "
        f"{load.output[0]:,}, p99 {load.output[1]:,}, most {load.output[2]:,}.",
        f"Simulated: {num} x {gpu}, costs {trial.constants}, wire form {trial.form}; decode only. "
        f"A rank holds {load.rank_tokens:,} tokens of KV; {load.num_too_long:,} requests fit "
        f"none{cut}.",
    ]
    label = _label(best.policy, trial)
    tail = [
        f"waits: what the fullest rank adds to a step. Of {label}'s {best.outcome.step_ms_mean:.1f}"
        f" ms these are {best.waits_ms:.1f}, of ours {ours.waits_ms:.1f} of "
        f"{ours.outcome.step_ms_mean:.1f}. While requests waited there, "
        f"{best.outcome.free_frames_share_while_waiting:.0%} of the KV memory was free. CP by "
        f"request: {ours.outcome.cp_share:.1%} of requests on more than one rank.",
    ]
    if analysis.sensitivities:
        groups = "; ".join(f"{s.group} {s.low:.2f} to {s.high:.2f}" for s in analysis.sensitivities)
        tail.append(f"Its step over ours, as loaded, with a cost halved and doubled: {groups}.")
    if analysis.num_gpus is not None:
        theirs, own = (str(num) if num else "more than 256" for num in analysis.num_gpus)
        needs = f"{label} needs {theirs} GPUs, CP by request {own}"
        tail.append(f"For {load.rate_per_s:.3g}/s {needs}.")
    tail.append(
        "Static CP is modelled over DP ranks; in a TP group it also splits heads and multiplies "
        "rows. Prefill, TP and PP are not simulated."
    )
    if gauges is not None:
        tail.append(gauges_sentence(gauges))
    return head, _verdict(analysis, trial), tail


def _cells(way: Way, trial: Trial) -> tuple[str, ...]:
    outcome, of = way.outcome, f" ({way.num_judged:,})" if way.num_judged else ""
    return (
        _label(way.policy, trial),
        f"{outcome.ttft_ms_p50:.0f} / {outcome.ttft_ms_p99:.0f}",
        f"{outcome.tpot_ms_p50:.1f} / {outcome.tpot_ms_p99:.1f}",
        f"{outcome.step_ms_mean:.1f}",
        f"{way.waits_ms:.1f}",
        f"{outcome.kv_imbalance:.0%}",
        f"{outcome.row_imbalance:.0%}",
        f"{outcome.attainment:.1%}" if outcome.num_judged else "-",
        _rate(way) + of,
    )


def _rate(way: Way) -> str:
    rate = way.rate_per_s or way.least_per_s
    number = f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
    if not way.rate_per_s:
        return f"< {number}" if rate else "none"
    return f">= {number}" if rate * FINE_PRECISION > MAX_RATE else number


def _values(analysis: Analysis, trial: Trial, log: RequestLog) -> dict[str, Any]:
    from nanocp.cli.simulate.numbers import numbers_of

    return {
        "load": asdict(analysis.load),
        "fields": log.fields,
        "skipped": log.num_skipped,
        "failed": log.num_failed,
        "warm_up": log.num_warm_up,
        "notes": log.notes,
        "constants": trial.constants,
        "ways": {
            way.policy: numbers_of(way.outcome)
            | {"rate_per_s": way.rate_per_s, "rate_judged": way.num_judged}
            | {"least_per_s": way.least_per_s, "waits_ms": way.waits_ms}
            for way in analysis.ways
        },
        "best": analysis.best.policy,
        "gain": round(analysis.gain, 4) if analysis.best.rate_per_s else None,
        "verdict": analysis.verdict,
        "sensitivities": {s.group: [s.low, s.high] for s in analysis.sensitivities},
        "num_gpus": analysis.num_gpus,
    }


def _write_html(
    html: Path,
    analysis: Analysis,
    trial: Trial,
    log: RequestLog,
    path: Path,
    gauges: RankGauges | None,
) -> None:
    from nanocp.simulator.reports.html import HtmlPage
    from nanocp.simulator.reports.pictures import RUN_PICTURES

    head, verdict, tail = _sentences(analysis, trial, log, path, gauges)
    report = HtmlPage(f"{path.name}: today, and with CP by request")
    report.sentence(verdict)
    rows = [_cells(way, trial) for way in analysis.ways]
    report.table("At the log's rate", _COLUMNS, rows)
    for sentence in (*head, *tail):
        report.sentence(sentence)
    runs = {
        way.policy: way.timeline for way in (analysis.best, analysis.ours) if way.timeline.samples
    }
    if runs:
        report.pictures(RUN_PICTURES, runs)
    report.write(html)
