"""`nanocp demo`: a service on this machine, and every token checked against `transformers`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nanocp.cli.demo.prompts import (
    LONG_PROMPT_TOKENS,
    SAMPLED_PROMPT,
    SHORT_PROMPTS,
    long_prompt,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from tokenizers import Tokenizer

    from data_plane.reference.oracle import Verdict
    from nanocp.client import AsyncChunks, Finish

NUM_INSTANCES = 4
NUM_STAGES = 2
"""Processes that compute the prompts together."""
NUM_FRAMES = 40
"""Frames of an instance: 2,560 tokens."""
NUM_FRONT_ENDS = 2
"""With two, and a controller process, any process may be killed."""
NUM_SAMPLED_TOKENS = 100
SELECTED = ("kernels: ", "dispatch: ", "lanes: ")
"""Begins log lines of choices and their reasons."""
_LAST_LINES_S = 10.0
EVENTS = (" WARNING ", " ERROR ", " serves with ", " serves again")
"""Marks lines shown at once: losses, and that the service goes on."""


@dataclass(slots=True)
class DemoRequest:
    """One request of the demo, its output and its verdict."""

    name: str
    prompt_ids: list[int]
    output_ids: list[int] = field(default_factory=list)
    arrived_s: list[float] = field(default_factory=list)
    finish: Finish | None = None
    verdict: Verdict | None = None

    @property
    def tpot_ms(self) -> float:
        """Mean time between tokens."""
        return 1000 * (self.arrived_s[-1] - self.arrived_s[0]) / max(len(self.arrived_s) - 1, 1)


def demo(
    checkpoint: Annotated[
        Path, typer.Argument(help="A checkpoint folder, as `nanocp make-checkpoint` writes it.")
    ],
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.")] = 48,
) -> None:
    """Serve on four instances of this machine, decode prompts at once, and check every token.

    The prompts are short and long, and two stages compute them; `transformers` is the reference.
    """
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeElapsedColumn

    from nanocp.cli.options.console import output

    console = output()
    if not (checkpoint / "tokenizer.json").is_file():
        print(
            f"nanocp demo: {checkpoint / 'tokenizer.json'} is missing; "
            "`nanocp make-checkpoint FOLDER` makes a checkpoint",
            file=sys.stderr,
        )
        raise typer.Exit(2)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    requests = make_requests(tokenizer)
    sampled = DemoRequest("sampled", tokenizer.encode(SAMPLED_PROMPT).ids)
    columns = ("{task.description}", BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress, serving(checkpoint, progress) as targets:
        asyncio.run(generate_all(targets, requests, sampled, max_tokens, progress))
        judge_all(checkpoint, requests, progress)
    show(console, requests)
    show_texts(console, tokenizer, requests, sampled)
    verdicts = [request.verdict for request in requests if request.verdict is not None]
    exact = sum(verdict.exact for verdict in verdicts)
    near_ties = sum(verdict.near_ties for verdict in verdicts)
    print(json.dumps({"requests": len(requests), "exact": exact, "near_ties": near_ties}))
    raise typer.Exit(0 if exact == len(requests) else 1)


def make_requests(tokenizer: Tokenizer) -> list[DemoRequest]:
    """Short and long prompts in turn."""
    requests = [
        DemoRequest(f"short-{number}", tokenizer.encode(prompt).ids)
        for number, prompt in enumerate(SHORT_PROMPTS)
    ]
    requests += [
        DemoRequest(f"long-{length}", long_prompt(tokenizer, length, seed=length))
        for length in LONG_PROMPT_TOKENS
    ]
    return requests[::2] + requests[1::2]


@contextlib.contextmanager
def serving(checkpoint: Path, progress: Progress) -> Iterator[Sequence[str]]:
    """A local `nanocp serve`, from ready to stopped; yields host:port of its front ends.

    Losses are shown at once, choices or a failure's log at the end. Raises typer.Exit if it fails,
    also when idle, after the last request.
    """
    # Not at the top: the command is shown by `nanocp --help` without it.
    from data_plane.model.config import ModelConfig
    from data_plane.model.sizes import carry_bytes
    from nanocp.serve.free_ports import free_ports
    from nanocp.serve.process import PROGRAM, START_TIMEOUT_S, NotServing, wait_until_serving

    task = progress.add_task(f"starting {NUM_INSTANCES} instances", total=None)
    port = free_ports(NUM_FRONT_ENDS)
    command = [*PROGRAM, "serve", str(checkpoint), "--set", "service.check_invariants=true"]
    num_stages = NUM_STAGES
    with contextlib.suppress(ValueError):  # the service says what is wrong with a checkpoint
        if carry_bytes(ModelConfig.from_folder(checkpoint), 4):
            num_stages = 1  # states of linear attention layers come from one stage
    command += ["--instances", str(NUM_INSTANCES), "--set", f"prefill.stages={num_stages}"]
    # So few that a long prompt needs several instances, whatever that costs here.
    command += ["--num-frames", str(NUM_FRAMES)]
    command += ["--front-ends", str(NUM_FRONT_ENDS), "--controller-process"]
    command += ["--grpc-port", str(port)]
    command += ["--metrics-port", "0", "--http-port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    lines: list[str] = []
    reader = threading.Thread(target=_read_log, args=(server, lines, progress), daemon=True)
    reader.start()
    try:
        wait_until_serving(server, port)
        progress.update(task, total=1, completed=1)
        yield [f"127.0.0.1:{port + index}" for index in range(NUM_FRONT_ENDS)]
    except NotServing as error:
        print(f"nanocp demo: {error}", file=sys.stderr)
        raise typer.Exit(error.status) from None
    except KeyboardInterrupt:
        progress.console.print("stopping the service, which may take some seconds")
        raise
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(START_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            server.kill()
        has_failed = server.wait()
        reader.join(_LAST_LINES_S)
        told = [line for line in lines if has_failed or line.startswith(SELECTED)]
        progress.console.print("\n".join(told), markup=False, highlight=False)
    if server.returncode:
        raise typer.Exit(1)


def _read_log(server: subprocess.Popen[bytes], lines: list[str], progress: Progress) -> None:
    """Collect the service's lines, since printing them would break bars."""
    assert server.stdout is not None
    for raw in server.stdout:
        lines.append(line := raw.decode(errors="replace").rstrip())
        if any(event in line for event in EVENTS):
            progress.console.print(line, markup=False, highlight=False)


async def generate_all(
    targets: Sequence[str],
    requests: list[DemoRequest],
    sampled: DemoRequest,
    max_tokens: int,
    progress: Progress,
) -> None:
    """Submit every request at once and collect the outputs; `sampled` is not greedy."""
    from nanocp.client import AsyncClient

    total = len(requests) * max_tokens + NUM_SAMPLED_TOKENS
    task = progress.add_task(f"decoding {len(requests)} requests and 1 sampled", total=total)
    advance = partial(progress.advance, task)
    async with AsyncClient(targets) as client:
        drawn = client.generate(
            sampled.prompt_ids,
            max_tokens=NUM_SAMPLED_TOKENS,
            temperature=0.7,
            top_p=0.9,
            repetition_penalty=1.15,
            seed=1,
            ignore_eos=True,
        )
        greedy = [
            client.generate(
                request.prompt_ids,
                max_tokens=max_tokens,
                temperature=0.0,
                repetition_penalty=1.0,  # that of the checkpoint would not be greedy
                ignore_eos=True,
            )
            for request in requests
        ]
        await asyncio.gather(
            _collect(drawn, sampled, advance),
            *(
                _collect(chunks, request, advance)
                for chunks, request in zip(greedy, requests, strict=True)
            ),
        )


async def _collect(
    chunks: AsyncChunks, request: DemoRequest, advance: Callable[[int], None]
) -> None:
    async for chunk in chunks:
        now = time.monotonic()
        request.output_ids += chunk.token_ids
        request.arrived_s += [now] * len(chunk.token_ids)
        request.finish = chunk.finish or request.finish
        advance(len(chunk.token_ids))


def judge_all(checkpoint: Path, requests: list[DemoRequest], progress: Progress) -> None:
    """Check each output by one forward pass of the reference model."""
    from data_plane.reference.oracle import Oracle

    task = progress.add_task("checking against transformers", total=len(requests))
    oracle = Oracle(checkpoint)
    for request in requests:
        request.verdict = oracle.judge(request.prompt_ids, request.output_ids)
        progress.advance(task)


def show(console: Console, requests: list[DemoRequest]) -> None:
    """Print the table of requests, and pages and rows of each instance."""
    from rich.table import Table

    table = Table(
        title=f"{len(requests)} requests on {NUM_INSTANCES} instances; KV binding as instance:pages"
    )
    for column in (
        "request",
        "prompt",
        "generated",
        "CP degree",
        "MoE binding",
        "KV binding",
        "TPOT ms",
        "exact",
    ):
        table.add_column(column, justify="left" if column in ("request", "KV binding") else "right")
    pages, rows = [0] * NUM_INSTANCES, [0] * NUM_INSTANCES
    for request in requests:
        if request.finish is None or request.verdict is None:
            continue
        split = " ".join(f"{instance}:{count}" for instance, count in request.finish.kv_split)
        verdict = (
            "yes" if request.verdict.exact else f"no, from token {request.verdict.first_wrong}"
        )
        numbers = (
            len(request.prompt_ids),
            len(request.output_ids),
            request.finish.cp_degree,
            request.finish.moe_binding,
        )
        table.add_row(request.name, *map(str, numbers), split, f"{request.tpot_ms:.1f}", verdict)
        rows[request.finish.moe_binding] += 1
        for instance, count in request.finish.kv_split:
            pages[instance] += count
    console.print(table)
    balance = Table(title="what each instance carried")
    for column in ("instance", "pages of KV", "rows"):
        balance.add_column(column, justify="right")
    for instance in range(NUM_INSTANCES):
        balance.add_row(str(instance), str(pages[instance]), str(rows[instance]))
    balance.add_row("mean/max", f"{_balance_ratio(pages):.2f}", f"{_balance_ratio(rows):.2f}")
    console.print(balance)


def show_texts(
    console: Console, tokenizer: Tokenizer, requests: list[DemoRequest], sampled: DemoRequest
) -> None:
    """Print outputs of short prompts, and the sampled text."""
    from rich.markup import escape

    def text(request: DemoRequest) -> str:
        prompt, output = (
            escape(" ".join(tokenizer.decode(ids).split()))
            for ids in (request.prompt_ids, request.output_ids)
        )
        return f"[dim]{prompt}[/dim] {output}"

    console.print("Greedy, every token checked:")
    for request in sorted(requests, key=lambda request: request.name):
        if request.name.startswith("short"):
            console.print(f"  {text(request)}")
    console.print("Sampled at temperature 0.7, seed 1, the same at any CP degree:")
    console.print(f"  {text(sampled)}")


def _balance_ratio(loads: list[int]) -> float:
    return sum(loads) / len(loads) / max(*loads, 1)
