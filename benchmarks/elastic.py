"""Instances come and go while requests run: exactness, pauses, attempts, tokens a second.

    python benchmarks/elastic.py [--quick] [--minutes M] [--seed S] [--json PATH]

Enters: the tiny checkpoint, a service of four real instances without Ray with redundant experts,
the clients of `nanocp chaos`. Leaves: one result; exit status 1 if a claim does not hold. Does not
know: how an instance is emptied.

Instance 3 is drained and taken back again and again; between the changes the service runs with
four, and then with three. The last change is a kill: the survivors go on alone.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from machine import describe, write_results
from service import checkpoint_of

from control_plane.launchers import ProcessLauncher
from control_plane.member_streams import Member
from nanocp.chaos.judge import ReferenceJudge
from nanocp.chaos.load import Asked
from nanocp.chaos.losses import Loss
from nanocp.chaos.report import judged, pauses_by_kind
from nanocp.chaos.run import ChaosRun, ask_all, settled
from nanocp.cli.console import output
from nanocp.config import ClusterConfig, Config, ServiceConfig
from nanocp.serve.process import HELD_FRAMES
from nanocp.serve.service import Service, member_environment, open_checkpoint

NUM_INSTANCES = 4
ALL, FEWER = [0, 1, 2, 3], [0, 1, 2]
MAX_PAUSE_S = 1.0
_JUDGED_S = 120.0
"""Tokens a second are compared in runs of this length or more."""
CONFIG = Config(
    cluster=ClusterConfig(
        num_instances=NUM_INSTANCES, num_frames=128, max_model_len=2048, redundant_experts=2
    ),
    service=ServiceConfig(grpc_port=0, metrics_port=0, http_port=0),
)


def main(
    quick: Annotated[bool, typer.Option(help="25 seconds of load.")] = False,
    minutes: Annotated[float, typer.Option(help="Of load.")] = 5.0,
    seed: Annotated[int, typer.Option(help="Of the requests.")] = 0,
    json: Annotated[
        Path | None, typer.Option(help="Write the results here, the machine beside it.")
    ] = None,
) -> None:
    """Run the changes under load; the reference model judges every output."""
    load_before = os.getloadavg()[0]
    console = output()
    result = changing(checkpoint_of("tiny"), 25.0 if quick else 60 * minutes, seed)
    if json is not None:
        write_results(json, [result], describe(load_before))
    for name, value in result.items():
        console.print(f"{name}: {value}", highlight=False, markup=False)
    claims = claims_of(result)
    for claim, holds in claims:
        console.print(f"{'holds' if holds else 'DOES NOT HOLD'}: {claim}", highlight=False)
    raise typer.Exit(0 if all(holds for _, holds in claims) else 1)


def changing(checkpoint: Path, seconds: float, seed: int) -> dict[str, Any]:
    """The load on a service of its own, whose instances come and go."""
    command = [sys.executable, "-m", "data_plane.member.process"]
    launcher = ProcessLauncher(command, member_environment(CONFIG))
    service = Service(CONFIG, open_checkpoint(CONFIG, checkpoint), launcher)
    sample = service.metrics.registry.get_sample_value
    asked: list[Asked] = []
    happened: list[Loss] = []
    serving: list[tuple[float, int]] = []
    attempts = 0.0

    async def change(until_s: float) -> None:
        nonlocal attempts

        async def want(seats: list[int], name: str) -> None:
            happened.append(Loss(name, time.monotonic(), ()))
            await asyncio.to_thread(service.want_seats, seats)
            serving.append((time.monotonic(), len(seats)))

        serving.append((time.monotonic(), NUM_INSTANCES))
        await asyncio.sleep(seconds / 8)
        while time.monotonic() < until_s - seconds / 4:
            await want(FEWER, "drain")
            await asyncio.sleep(seconds / 8)
            await want(ALL, "scale")
            await asyncio.sleep(seconds / 8)
        attempts = sample("nanocp:request_attempts_total") or 0.0
        happened.append(Loss("kill", time.monotonic(), ()))
        serving.append((time.monotonic(), 0))
        launcher.kill(Member("instance", 1))

    try:
        service.start(lambda step: None)
        run = ChaosRun(checkpoint, seconds=seconds, seed=seed)
        http_url = f"http://{service.http_address}"
        asyncio.run(ask_all(run, service.address, http_url, change, asked))
        labels = [{"engine": str(number)} for number in range(NUM_INSTANCES)]
        frames_left = settled(
            lambda: round(sum(sample(n, label) or 0 for n in HELD_FRAMES for label in labels))
        )
    finally:
        service.stop()
    by_number = tokens_per_s(asked, serving)
    return {
        "seconds": seconds,
        **judged(asked, ReferenceJudge(checkpoint)),
        "attempts_of_planned_changes": attempts,
        "frames_left": frames_left,
        "segments_left": sum(service.cluster_id in name for name in os.listdir("/dev/shm")),
        "by_kind": pauses_by_kind(asked, happened),
        "tokens_per_s": by_number,
        "ratio": round(by_number[3] / max(by_number[4], 1e-9), 2),
    }


def tokens_per_s(asked: list[Asked], serving: list[tuple[float, int]]) -> dict[int, float]:
    """Tokens a second by the number of instances, from the moment that so many served."""
    times = sorted(at_s for each in asked for arrivals in each.arrivals_s for at_s in arrivals)
    tokens, seconds = {3: 0, 4: 0}, {3: 1e-9, 4: 1e-9}
    ends = [at_s for at_s, _ in serving[1:]]
    for (begin_s, number), end_s in zip(serving, ends, strict=False):
        if number:
            tokens[number] += sum(begin_s <= at_s < end_s for at_s in times)
            seconds[number] += end_s - begin_s
    return {number: round(tokens[number] / seconds[number], 1) for number in tokens}


def claims_of(result: dict[str, Any]) -> list[tuple[str, bool]]:
    """What is claimed, and whether it holds."""
    least = 0.95 * (NUM_INSTANCES - 1) / NUM_INSTANCES
    planned = [result["by_kind"][kind]["pause_s_max"] for kind in ("drain", "scale")]
    return [
        ("no accepted request was lost", not result["lost"]),
        ("no output has a wrong token", not result["wrong"]),
        ("no token was given twice", not result["doubled"]),
        ("no frame and no segment is left", not (result["frames_left"] + result["segments_left"])),
        ("planned changes began no attempt", not result["attempts_of_planned_changes"]),
        (f"planned pauses of {max(planned)} s are at most 1 s", max(planned) <= MAX_PAUSE_S),
        (f"three give {result['ratio']} of four's tokens, at least {least:.2f}; too short to judge"
         if result["seconds"] < _JUDGED_S else
         f"three give {result['ratio']} of four's tokens, at least {least:.2f}",
         result["ratio"] >= least or result["seconds"] < _JUDGED_S),
    ]  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
