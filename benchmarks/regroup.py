"""Terms end each second, then instances and the prefill are lost: exactness, and the pauses.

    python benchmarks/regroup.py [--quick] [--minutes M] [--json PATH]

Enters: the tiny checkpoint, a service of four real instances without Ray, eight clients whose
requests run all the time: greedy, one of three with a penalty. Leaves: tables, and a list of
{phase, seconds, requests, tokens, failed, wrong, near_ties, terms, lost, frames_not_back,
segments_left, pause_ms_p50, pause_ms_max}; exit status 1 if a claim does not hold. Does not know:
what a term is made of.

A pause is the longest time between two tokens of a request. In the phase `regrouping` every
instance survives; in `losing` one member after the other is killed, or stopped for good.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from machine import describe, write_results
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from service import checkpoint_of, random_prompts

from control_plane.launchers import ProcessLauncher
from control_plane.member_streams import PREFILL, Member
from nanocp.client import AsyncClient, ServiceError
from nanocp.config import ClusterConfig, Config, SchedulerConfig, ServiceConfig
from nanocp.serve.service import Service, member_environment, open_checkpoint

NUM_INSTANCES = 4
NUM_CLIENTS = 8
PROMPT_LENS, OUTPUT_LENS = (2, 700), (64, 256)
PAUSES_S = {"regrouping": 1.0, "losing": 12.0}
"""Time from one end of a term to the next."""
MAX_NEAR_TIES = 1e-3
"""Claim: near-ties of the reference, of all tokens, at most."""
SETTLE_S = 60.0

CONFIG = Config(
    cluster=ClusterConfig(num_instances=NUM_INSTANCES, num_frames=128, max_model_len=1024),
    scheduler=SchedulerConfig(policy="chaos"),
    service=ServiceConfig(grpc_port=0, metrics_port=0, http_port=0),
)


@dataclass(slots=True)
class JudgedRequest:
    """One request, and how it ended."""

    prompt_ids: list[int]
    is_greedy: bool
    token_ids: list[int] = field(default_factory=list)
    arrivals_s: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def pause_ms(self) -> float:
        """Longest time from one token to the next."""
        pairs = zip(self.arrivals_s, self.arrivals_s[1:], strict=False)
        return 1e3 * max((later - earlier for earlier, later in pairs), default=0.0)


def main(
    quick: Annotated[bool, typer.Option(help="10 and 25 seconds: about a minute.")] = False,
    minutes: Annotated[float, typer.Option(help="Of each phase.")] = 5.0,
    json: Annotated[
        Path | None, typer.Option(help="Write the results here, the machine beside it.")
    ] = None,
) -> None:
    """Play both phases, then let the reference model judge every greedy output."""
    load_before = os.getloadavg()[0]
    console = Console() if sys.stdout.isatty() else Console(width=110)
    checkpoint = checkpoint_of("tiny")
    seconds = {"regrouping": 10.0, "losing": 25.0}
    if not quick:
        seconds = dict.fromkeys(seconds, 60.0 * minutes)
    with Progress(console=console, transient=True) as progress:
        results = [
            judge(checkpoint, *play(checkpoint, phase, seconds[phase]), progress)
            for phase in progress.track(PAUSES_S, description="playing")
        ]
    show(results, console)
    if json is not None:
        write_results(json, results, describe(load_before))
    raise typer.Exit(0 if show_claims(results, console) else 1)


def play(
    checkpoint: Path, phase: str, seconds: float
) -> tuple[list[JudgedRequest], dict[str, Any]]:
    """The outputs of a phase's load on a service of its own, and what became of the service."""
    command = [sys.executable, "-m", "data_plane.member.process"]
    launcher = ProcessLauncher(command, member_environment(CONFIG))
    service = Service(CONFIG, open_checkpoint(CONFIG, checkpoint), launcher)
    num_changes = 0
    draw = random.Random(0)

    def change() -> None:
        nonlocal num_changes
        if phase == "regrouping":
            service.regroup()
        else:
            seats = [Member("instance", number) for number in range(NUM_INSTANCES)]
            member = draw.choice([*seats, PREFILL])
            os.kill(launcher.pid(member), draw.choice([signal.SIGKILL, signal.SIGSTOP]))
        num_changes += 1

    try:
        service.start(lambda step: None)
        outputs = asyncio.run(_load(checkpoint, service.address, phase, seconds, change))
        frames_not_back = _settled(lambda: _num_held_frames(service))
        term = service.term
    finally:
        service.stop()
    left = [name for name in os.listdir("/dev/shm") if service.cluster_id in name]
    return outputs, {
        "phase": phase,
        "seconds": round(seconds, 1),
        "terms": term,
        "lost": num_changes if phase == "losing" else 0,
        "frames_not_back": frames_not_back,
        "segments_left": len(left),
    }


async def _load(
    checkpoint: Path, target: str, phase: str, seconds: float, change: Callable[[], None]
) -> list[JudgedRequest]:
    until_s = time.monotonic() + seconds
    outputs: list[JudgedRequest] = []
    async with AsyncClient(target) as client, asyncio.TaskGroup() as group:
        for number in range(NUM_CLIENTS):
            group.create_task(_ask(client, checkpoint, number, until_s, outputs))
        while time.monotonic() < until_s:
            await asyncio.sleep(PAUSES_S[phase])
            change()
    return outputs


async def _ask(
    client: AsyncClient, checkpoint: Path, number: int, until_s: float, outputs: list[JudgedRequest]
) -> None:
    """Ask, read to the end and, while there is time, ask again."""
    draw = random.Random(number)
    while time.monotonic() < until_s:
        length, seed = draw.randint(*PROMPT_LENS), draw.getrandbits(32)
        [prompt_ids] = random_prompts(checkpoint, 1, length, seed)
        output = JudgedRequest(prompt_ids, is_greedy=number % 3 > 0)
        outputs.append(output)
        max_tokens = draw.randint(*OUTPUT_LENS)
        try:
            async for chunk in client.generate(
                prompt_ids,
                max_tokens=max_tokens,
                temperature=0.0,
                ignore_eos=True,
                frequency_penalty=0.0 if output.is_greedy else 0.4,
            ):
                output.token_ids += chunk.token_ids
                output.arrivals_s += [time.monotonic()] * len(chunk.token_ids)
        except ServiceError as error:
            output.error = str(error)
        if not output.error and len(output.token_ids) != max_tokens:
            output.error = f"{len(output.token_ids)} tokens came of {max_tokens}"


def _num_held_frames(service: Service) -> int:
    sample = service.metrics.registry.get_sample_value
    names = ("nanocp:frames_committed", "nanocp:frames_quarantined")
    engines = [{"engine": str(number)} for number in range(NUM_INSTANCES)]
    return round(sum(sample(name, engine) or 0 for name in names for engine in engines))


def _settled(count: Callable[[], int]) -> int:
    """The count once it is 0, or after a limit."""
    deadline_s = time.monotonic() + SETTLE_S
    while (value := count()) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return value


def judge(
    checkpoint: Path, outputs: list[JudgedRequest], service: dict[str, Any], progress: Progress
) -> dict[str, Any]:
    """Every greedy output by one forward of the reference model; the others by their lengths."""
    from data_plane.reference.oracle import Oracle

    oracle = Oracle(checkpoint)
    verdicts = [
        oracle.judge(output.prompt_ids, output.token_ids)
        for output in progress.track(outputs, description=f"checking {service['phase']}")
        if output.is_greedy and not output.error
    ]
    pauses_ms = sorted(output.pause_ms for output in outputs)
    return service | {
        "requests": len(outputs),
        "tokens": sum(len(output.token_ids) for output in outputs),
        "failed": sum(bool(output.error) for output in outputs),
        "wrong": sum(not verdict.exact for verdict in verdicts),
        "near_ties": sum(verdict.near_ties for verdict in verdicts),
        "pause_ms_p50": round(pauses_ms[len(pauses_ms) // 2]),
        "pause_ms_max": round(pauses_ms[-1]),
    }


def show(results: list[dict[str, Any]], console: Console) -> None:
    """The phases side by side."""
    table = Table("", *(result["phase"] for result in results), title="Regroups of four instances")
    for name in [name for name in results[0] if name != "phase"]:
        table.add_row(name, *(f"{result[name]:,}" for result in results))
    console.print(table)


def show_claims(results: list[dict[str, Any]], console: Console) -> bool:
    """Say what holds; True if all does."""
    total = {
        name: sum(result[name] for result in results)
        for name in ("failed", "wrong", "near_ties", "tokens", "frames_not_back", "segments_left")
    }
    claims = [
        ("no accepted request failed", not total["failed"]),
        ("no request has a wrong token", not total["wrong"]),
        (
            f"{total['near_ties']} near-ties of {total['tokens']:,} tokens, at most 1 of 1,000",
            total["near_ties"] <= MAX_NEAR_TIES * total["tokens"],
        ),
        ("every frame came back", not total["frames_not_back"]),
        ("no segment is left", not total["segments_left"]),
        ("every phase had another term", all(result["terms"] > 1 for result in results)),
    ]
    for claim, holds in claims:
        console.print(f"{'holds' if holds else 'DOES NOT HOLD'}: {claim}")
    return all(holds for _, holds in claims)


if __name__ == "__main__":
    typer.run(main)
