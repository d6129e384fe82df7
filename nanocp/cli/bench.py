"""`nanocp bench serve`: load on a service that runs, and what it did, with vLLM's flags, block and
JSON.

Enters: options. Leaves: the block on standard output, a JSON file if asked; exit status 2 for
options that have no meaning, 1 if no request was served. Does not know: how requests are sent and
timed.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from nanocp.bench.backends import Backend, RequestOutput
    from nanocp.bench.dataset import SampleRequest

app = typer.Typer(
    help="Load on a running service, measured as `vllm bench` does.", no_args_is_help=True
)

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)


@dataclass(frozen=True, slots=True)
class _Load:
    """How requests are sent."""

    rate_per_s: float
    burstiness: float
    max_concurrency: int | None
    seed: int
    is_self_timed: bool
    num_warmups: int
    ready_timeout_s: float
    request_id_prefix: str
    shows_progress: bool


@app.callback()
def bench() -> None:
    """Load on a running service, measured as `vllm bench` does."""


@app.command(context_settings={"allow_extra_args": True})
def serve(
    context: typer.Context,
    backend: Annotated[
        str, typer.Option(help="openai (or vllm): completions; openai-chat; grpc.")
    ] = "openai",
    base_url: Annotated[
        str | None, typer.Option(help="http://... of the server, instead of host and port.")
    ] = None,
    host: Annotated[str, typer.Option(help="The server's host.")] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(help="The server's port; 8000, or 50051 for grpc.")
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option(help="Path of the HTTP endpoint; by default the backend's.")
    ] = None,
    header: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE, sent with each HTTP request; repeatable.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The model's name; by default the first that is listed.")
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="The name that requests use, if another.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A folder with tokenizer.json; without it, token ids.")
    ] = None,
    dataset_name: Annotated[
        str, typer.Option(help="random, sharegpt, mooncake or azure.")
    ] = "random",
    dataset_path: Annotated[
        Path | None, typer.Option(help="A trace, or ShareGPT's JSON (without it, its lengths).")
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="Requests; a trace may have fewer.")] = 1000,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
    input_len: Annotated[int | None, typer.Option(help="--random-input-len.")] = None,
    output_len: Annotated[int | None, typer.Option(help="Output tokens, of any dataset.")] = None,
    random_input_len: Annotated[int, typer.Option(help="Prompt tokens.")] = 1024,
    random_output_len: Annotated[int, typer.Option(help="Output tokens.")] = 128,
    random_range_ratio: Annotated[
        float, typer.Option(help="Lengths vary by this share, 0 to below 1.")
    ] = 0.0,
    random_prefix_len: Annotated[int, typer.Option(help="Tokens that all prompts begin with.")] = 0,
    random_vocab_size: Annotated[
        int, typer.Option(help="Prompts without a tokenizer are ids below this.")
    ] = 256,
    length_scale: Annotated[
        float, typer.Option(help="Factor on the prompt lengths of traces and shapes.")
    ] = 1.0,
    self_timed: Annotated[
        bool | None,
        typer.Option(
            "--self-timed/--no-self-timed", help="Send when the trace says; default for traces."
        ),
    ] = None,
    time_scale: Annotated[
        float, typer.Option(help="Factor on a trace's gaps: 0.5 is twice as fast.")
    ] = 1.0,
    request_rate: Annotated[
        float, typer.Option(help="Requests a second; inf: all at once.")
    ] = math.inf,
    burstiness: Annotated[
        float, typer.Option(help="Shape of the gamma gaps: 1 is Poisson, less is burstier.")
    ] = 1.0,
    max_concurrency: Annotated[int | None, typer.Option(help="Most requests at a time.")] = None,
    ignore_eos: Annotated[
        bool, typer.Option(help="Go on after the model's end; always so for random and traces.")
    ] = False,
    temperature: Annotated[float | None, typer.Option()] = None,
    top_p: Annotated[float | None, typer.Option()] = None,
    top_k: Annotated[int | None, typer.Option()] = None,
    min_p: Annotated[float | None, typer.Option()] = None,
    frequency_penalty: Annotated[float | None, typer.Option()] = None,
    presence_penalty: Annotated[float | None, typer.Option()] = None,
    repetition_penalty: Annotated[float | None, typer.Option()] = None,
    extra_body: Annotated[
        str | None, typer.Option(help="JSON, added to each request's body.")
    ] = None,
    goodput: Annotated[
        list[str] | None,
        typer.Option(help="KEY:VALUE, milliseconds that a good request takes: ttft, tpot, e2el."),
    ] = None,
    percentile_metrics: Annotated[
        str, typer.Option(help="ttft, tpot, itl, e2el, ... by comma.")
    ] = "ttft,tpot,itl",
    metric_percentiles: Annotated[str, typer.Option(help="Percentiles of them, by comma.")] = "99",
    num_warmups: Annotated[int, typer.Option(help="Requests sent before, and not counted.")] = 0,
    ready_check_timeout_sec: Annotated[
        float, typer.Option(help="Wait so long for the service; 0: not at all.")
    ] = 0,
    request_id_prefix: Annotated[
        str, typer.Option(help="Of each request's id.")
    ] = f"bench-{uuid.uuid4().hex[:8]}-",
    disable_tqdm: Annotated[bool, typer.Option("--disable-tqdm", help="No progress bar.")] = False,
    save_result: Annotated[bool, typer.Option("--save-result", help="Write a JSON file.")] = False,
    save_detailed: Annotated[
        bool, typer.Option("--save-detailed", help="With every request in it.")
    ] = False,
    append_result: Annotated[
        bool, typer.Option("--append-result", help="Add a line to the file instead.")
    ] = False,
    metadata: Annotated[list[str] | None, typer.Option(help="KEY=VALUE for the JSON file.")] = None,
    label: Annotated[
        str | None, typer.Option(help="The result's name; by default the backend.")
    ] = None,
    result_dir: Annotated[Path | None, typer.Option(help="Where the file goes.")] = None,
    result_filename: Annotated[str | None, typer.Option(help="The file's name.")] = None,
) -> None:
    """Send requests to a running service and report throughput and latencies.

    As in vLLM, several values may follow one --goodput or --metadata: `--goodput ttft:500 tpot:50`,
    and a service that asks for a key gets OPENAI_API_KEY.
    """
    # Every option by its name: there are too many to pass them on one by one.
    options = SimpleNamespace(**locals())
    try:
        status = _serve(options)
    except ValueError as error:
        print(f"nanocp bench serve: {error}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        print("nanocp bench serve: stopped", file=sys.stderr)
        status = 130
    raise typer.Exit(status)


def _serve(options: Any) -> int:
    """Returns the exit status. Raises ValueError for options without a meaning, and if the service
    is not there."""
    from nanocp.bench import report
    from nanocp.bench.backends import BACKENDS

    if options.backend not in BACKENDS:
        raise ValueError(
            f"--backend is {options.backend!r}; it must be one of {', '.join(BACKENDS)}"
        )
    goodput, metadata = _more(options.context.args, options.goodput or [], options.metadata or [])
    goodput_ms, noted = _goodput(goodput), dict(_pair("--metadata", item) for item in metadata)
    metrics, percentiles = (
        _metrics(options.percentile_metrics),
        _percentiles(options.metric_percentiles),
    )
    load, requests, body = _load(options), _requests(options), _body(options)
    name, outputs, duration_s = asyncio.run(_run(lambda: _connect(options, body), requests, load))
    failed = [output for output in outputs if not output.success]
    if failed:
        print("Failed requests during benchmark run detected (capping to 10):")
        for number, output in enumerate(failed[:10]):
            print(f"Error {number}: {output.error}")
    values = report.result(outputs, duration_s, goodput_ms, metrics, percentiles)
    print(
        "\n".join(report.block(values, load.rate_per_s, load.max_concurrency, metrics, percentiles))
    )
    if options.save_result or options.append_result:
        kept = {
            key: value
            for key, value in values.items()
            if options.save_detailed or key not in report.DETAILS
        }
        _save(options, options.model or name or "unknown", len(requests), noted, kept)
    return 0 if values["completed"] else 1


def _is_trace(options: Any) -> bool:
    from nanocp.bench.dataset import TRACES

    return options.dataset_name in TRACES


def _load(options: Any) -> _Load:
    is_trace = _is_trace(options)
    if options.self_timed and not is_trace:
        raise ValueError(f"--self-timed is for traces; --dataset-name is {options.dataset_name}")
    load = _Load(
        options.request_rate,
        options.burstiness,
        options.max_concurrency,
        options.seed,
        is_trace if options.self_timed is None else options.self_timed,
        options.num_warmups,
        options.ready_check_timeout_sec,
        options.request_id_prefix,
        not options.disable_tqdm,
    )
    for flag, value in (("--request-rate", load.rate_per_s), ("--burstiness", load.burstiness)):
        if not value > 0:
            raise ValueError(f"{flag} is {value}; it must be above 0")
    if load.max_concurrency is not None and load.max_concurrency < 1:
        raise ValueError(f"--max-concurrency is {load.max_concurrency}; it must be at least 1")
    if load.is_self_timed and not math.isinf(load.rate_per_s):
        raise ValueError(
            "a trace says when: give --request-rate with --no-self-timed, or --time-scale"
        )
    return load


def _requests(options: Any) -> list[SampleRequest]:
    from nanocp.bench.dataset import DatasetOptions, sample_requests

    tokenizer = _tokenizer(options.tokenizer)
    dataset = DatasetOptions(
        options.dataset_name,
        options.dataset_path,
        options.num_prompts,
        options.seed,
        options.input_len or options.random_input_len,
        options.output_len
        or (options.random_output_len if options.dataset_name == "random" else None),
        options.random_range_ratio,
        options.random_prefix_len,
        options.random_vocab_size,
        options.length_scale,
        options.time_scale,
    )
    requests = sample_requests(dataset, tokenizer)
    if options.backend != "openai-chat" or all(
        isinstance(request.prompt, str) for request in requests
    ):
        return requests
    if tokenizer is None:
        raise ValueError(
            "--backend openai-chat sends texts: give --tokenizer, to make them of token ids"
        )
    return [replace(request, prompt=tokenizer.decode(request.prompt)) for request in requests]


def _body(options: Any) -> dict[str, Any]:
    """What every request says beside its prompt and length."""
    try:
        body = json.loads(options.extra_body or "{}")
    except json.JSONDecodeError as error:
        raise ValueError(f"--extra-body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise ValueError(f"--extra-body is {options.extra_body!r}; it must be a JSON object")
    sampling = {
        name: getattr(options, name) for name in _SAMPLING if getattr(options, name) is not None
    }
    goes_on = options.ignore_eos or options.dataset_name == "random" or _is_trace(options)
    return sampling | ({"ignore_eos": True} if goes_on else {}) | body


def _connect(options: Any, body: dict[str, Any]) -> Backend:
    from nanocp.bench.backends import GrpcBackend, OpenAIBackend

    host = f"[{options.host}]" if ":" in options.host else options.host
    # As in vLLM: it is no option, because `ps` shows those.
    api_key = os.environ.get("OPENAI_API_KEY", "")
    if options.backend == "grpc":
        return GrpcBackend(f"{host}:{options.port or 50051}", body, api_key)
    is_chat = options.backend == "openai-chat"
    endpoint = options.endpoint or ("/v1/chat/completions" if is_chat else "/v1/completions")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    headers |= dict(_pair("--header", item) for item in options.header or [])
    url = options.base_url or f"http://{host}:{options.port or 8000}"
    return OpenAIBackend(
        url, endpoint, options.served_model_name or options.model, is_chat, body, headers
    )


async def _run(
    connect: Any, requests: Sequence[SampleRequest], load: _Load
) -> tuple[str, list[RequestOutput], float]:
    """(model, outputs, seconds). Raises ValueError if the service is not there."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from nanocp.bench.backends import OpenAIBackend
    from nanocp.bench.load import due_times, send_all

    backend: Backend = connect()
    try:
        name = await backend.first_model() if isinstance(backend, OpenAIBackend) else ""
        await _ready(backend, requests[0], load)
        if load.num_warmups:
            warmups = [requests[0]] * load.num_warmups
            await send_all(
                backend,
                warmups,
                [0.0] * len(warmups),
                load.max_concurrency,
                f"{load.request_id_prefix}warmup-",
            )
        due_s = due_times(requests, load.rate_per_s, load.burstiness, load.seed, load.is_self_timed)
        columns = (
            TextColumn("requests"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        console = Console(stderr=True)
        with Progress(
            *columns, console=console, transient=True, disable=not load.shows_progress
        ) as bars:
            bar = bars.add_task("requests", total=len(requests))
            outputs, duration_s = await send_all(
                backend,
                requests,
                due_s,
                load.max_concurrency,
                load.request_id_prefix,
                lambda: bars.advance(bar),
            )
        return name, outputs, duration_s
    finally:
        await backend.close()


async def _ready(backend: Backend, request: SampleRequest, load: _Load) -> None:
    """Try one request until it is served, at most as long as asked."""
    deadline = time.monotonic() + load.ready_timeout_s
    for attempt in range(sys.maxsize):
        if load.ready_timeout_s <= 0:
            return
        output = await backend.send(request, f"{load.request_id_prefix}ready-{attempt}")
        if output.success:
            return
        if time.monotonic() >= deadline:
            raise ValueError(
                f"the service was not ready in {load.ready_timeout_s:g} s: {output.error}"
            )
        await asyncio.sleep(min(1.0, load.ready_timeout_s))


def _more(
    extra: Sequence[str], goodput: list[str], metadata: list[str]
) -> tuple[list[str], list[str]]:
    """What follows --goodput A:1 or --metadata a=1 without a flag of its own belongs to it, as in
    vLLM."""
    for item in extra:
        if "=" in item and metadata:
            metadata = [*metadata, item]
        elif ":" in item and goodput:
            goodput = [*goodput, item]
        else:
            raise ValueError(f"{item!r} belongs to no option")
    return goodput, metadata


def _goodput(items: Sequence[str]) -> dict[str, float]:
    from nanocp.bench.report import GOODPUT_METRICS

    limits: dict[str, float] = {}
    for item in items:
        name, _, value = item.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            raise ValueError(
                f"--goodput is {item!r}; it must be KEY:MILLISECONDS, as in ttft:500"
            ) from None
        if name not in GOODPUT_METRICS or not limits[name] >= 0:
            raise ValueError(
                f"--goodput is {item!r}; the key must be one of {', '.join(GOODPUT_METRICS)}, the value >= 0"
            )
    return limits


def _pair(flag: str, item: str) -> tuple[str, str]:
    key, sign, value = item.partition("=")
    if not sign or not key.strip():
        raise ValueError(f"{flag} is {item!r}; it must be KEY=VALUE")
    return key.strip(), value.strip()


def _metrics(text: str) -> list[str]:
    from nanocp.bench.report import METRICS

    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in METRICS:
            raise ValueError(
                f"--percentile-metrics has {name!r}; it must be of {', '.join(METRICS)}"
            )
    return names


def _percentiles(text: str) -> list[float]:
    try:
        percentiles = [float(part) for part in text.split(",")]
    except ValueError:
        percentiles = [-1.0]
    if not all(0 <= percentile <= 100 for percentile in percentiles):
        raise ValueError(
            f"--metric-percentiles is {text!r}; it must be numbers from 0 to 100 by comma, as in 50,99"
        )
    return percentiles


def _tokenizer(folder: Path | None) -> Any:
    if folder is None:
        return None
    import tokenizers

    path = folder / "tokenizer.json" if folder.is_dir() else folder
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises Exception itself.
        raise ValueError(
            f"--tokenizer {folder} has no tokenizer that can be read: {error}"
        ) from error


def _save(
    options: Any, model: str, num_prompts: int, noted: dict[str, str], values: dict[str, Any]
) -> None:
    moment = datetime.now().strftime("%Y%m%d-%H%M%S")
    rate, concurrency = options.request_rate, options.max_concurrency
    head = {
        "date": moment,
        "endpoint_type": options.backend,
        "backend": options.backend,
        "label": options.label,
        "model_id": model,
        "tokenizer_id": None if options.tokenizer is None else str(options.tokenizer),
        "num_prompts": num_prompts,
        **noted,
        "request_rate": "inf" if math.isinf(rate) else rate,
        "burstiness": options.burstiness,
        "max_concurrency": concurrency,
    }
    beside = "" if concurrency is None else f"-concurrency{concurrency}"
    name = (
        f"{options.label or options.backend}-{rate}qps{beside}-{model.split('/')[-1]}-{moment}.json"
    )
    path = (options.result_dir or Path()) / (options.result_filename or name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+" if options.append_result else "w", encoding="utf-8") as file:
        if options.append_result and file.tell():
            file.write("\n")
        json.dump(head | values, file)
    print(f"result in {path}", file=sys.stderr)
