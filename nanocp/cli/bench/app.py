"""`nanocp bench serve`: load on a running service, with vLLM's flags, block and JSON.

Exit status: 2 for options without a meaning, 1 if no request was served.
"""

from __future__ import annotations

import asyncio
import math
import sys

import typer

from nanocp.bench.names import BACKENDS, GO_ON
from nanocp.cli.bench.dataset import Dataset
from nanocp.cli.bench.load import Load
from nanocp.cli.bench.report import Report
from nanocp.cli.bench.target import Target, pairs
from nanocp.cli.options.help import Group
from nanocp.cli.options.typed import with_options
from nanocp.cli.options.vllm_flags import VllmCommand
from nanocp.config.choices import check_one_of

app = typer.Typer(cls=Group, no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Load on a running service, measured as `vllm bench` does."""


@app.command(cls=VllmCommand)
@with_options
def serve(
    context: typer.Context,
    target: Target,
    dataset: Dataset,
    load: Load,
    report: Report,
) -> None:
    """Send requests to a running service and report throughput and latencies.

    As in vLLM, several values may follow one --goodput or --metadata: `--goodput ttft:500 tpot:50`,
    and a service that asks for a key gets OPENAI_API_KEY.
    """
    try:
        check_one_of(BACKENDS, **{"--backend": target.backend})
        for sentence in context.obj.said:
            print(f"nanocp bench serve: {sentence}", file=sys.stderr)
        status = _serve(target, dataset, load, report)
    except KeyboardInterrupt:
        print("nanocp bench serve: stopped", file=sys.stderr)
        status = 130
    raise typer.Exit(status)


def _serve(target: Target, dataset: Dataset, load: Load, report: Report) -> int:
    """Returns the exit status; raises ValueError for bad options and without an answer."""
    report.check()
    load.check(dataset.name, dataset.is_trace)
    requests = dataset.requests(target.backend)
    fields = target.body(dataset.name in GO_ON or dataset.is_trace)
    sent = asyncio.run(
        load.send(lambda: target.connect(fields), requests, dataset.seed, dataset.is_trace)
    )
    values = report.result(sent.outputs, sent.duration_s, load.request_rate, load.max_concurrency)
    about = {
        "endpoint_type": target.backend,
        "backend": target.backend,
        "label": report.label,
        "model_id": target.model or sent.model or "unknown",
        "tokenizer_id": None if dataset.tokenizer is None else str(dataset.tokenizer),
        "num_prompts": len(requests),
        **pairs("--metadata", report.metadata),
        "request_rate": "inf" if math.isinf(load.request_rate) else load.request_rate,
        "burstiness": load.burstiness,
        "max_concurrency": load.max_concurrency,
    }
    report.save(about, values)
    if (num_ended := len(sent.outputs)) < len(requests):
        print(
            f"nanocp bench serve: stopped after {num_ended} of {len(requests)} requests; the "
            "numbers are of those",
            file=sys.stderr,
        )
        return 130
    return 0 if values["completed"] else 1
