"""Instances come and go while requests run: exactness, pauses, attempts, tokens a second, spares.

    python benchmarks/elastic.py [--quick] [--only changing|replacing] [--minutes M] [--seed S]
        [--json PATH]

Enters: the tiny checkpoint, services of four real instances without Ray, the clients of `nanocp
chaos`. Leaves: a result for each phase; exit status 1 if a claim does not hold. Does not know: how
an instance is emptied, how a spare takes a seat.

In the phase `changing`, with redundant experts, instance 3 is drained and taken back again and
again; between the changes the service runs with four, and then with three. The last change is a
kill: the survivors go on alone. In the phase `replacing` nothing is redundant. Minutes in which an
instance is killed while a spare stands by take turns with minutes in which none is. Then instances
are killed one after the other, while a spare stands by, and while none does.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from machine import describe, write_results
from service import checkpoint_of

from control_plane.member_streams import Member
from data_plane.model.config import ModelConfig
from data_plane.model.weights import expert_range, load_experts
from data_plane.startup.cpu import load_shared_weights
from data_plane.startup.shared_parts import torch_dtype
from nanocp.chaos.in_process import Disturbed, play_in_process
from nanocp.chaos.judge import Judge, ReferenceJudge
from nanocp.chaos.load import Asked
from nanocp.chaos.run import ChaosRun
from nanocp.cli.console import output, print_claims
from nanocp.config import ClusterConfig, Config, ServiceConfig

Kind = TypeVar("Kind", int, str)

NUM_INSTANCES = 4
ALL, FEWER = [0, 1, 2, 3], [0, 1, 2]
MAX_PAUSE_S = 1.0
MAX_SPARE_S = 2.0
"""Goal: longest time by a spare, besides the loading of its experts."""
MAX_SPARE_RATIO = 0.6
MAX_NOTICED_S = 0.5
MIN_KILL_RATIO = 0.7
"""Goal: tokens in a minute with a kill, of those in one without."""
_MINUTE_S, _QUICK_MINUTE_S = 60.0, 5.0
_JUDGED_S = 120.0
"""Tokens a second are compared in runs of this length or more."""
_LOADED_S = 5.0
"""Time before a kill, in which requests begin to run."""
_LOOK_S = 0.02
_WAIT_S = 180.0
"""Longest wait for a seat to be filled, or a spare to be ready."""
CONFIG = Config(
    cluster=ClusterConfig(
        num_instances=NUM_INSTANCES, num_frames=128, max_model_len=2048, redundant_experts=2
    ),
    service=ServiceConfig(grpc_port=0, metrics_port=0, http_port=0),
)
WITH_SPARE = replace(CONFIG, cluster=replace(CONFIG.cluster, redundant_experts=0, spares=1))


class ElasticPhase(StrEnum):
    """What is run alone."""

    CHANGING = "changing"
    REPLACING = "replacing"


def main(
    quick: Annotated[
        bool, typer.Option(help="25 seconds of changes, and one kill of each kind.")
    ] = False,
    only: Annotated[ElasticPhase | None, typer.Option(help="One phase; by default both.")] = None,
    minutes: Annotated[float, typer.Option(help="Of each phase.")] = 5.0,
    seed: Annotated[int, typer.Option(help="Of the requests.")] = 0,
    json: Annotated[
        Path | None, typer.Option(help="Write the results here, the machine beside it.")
    ] = None,
) -> None:
    """Run the phases under load; the reference model judges every output."""
    load_before = os.getloadavg()[0]
    console = output()
    checkpoint = checkpoint_of("tiny")
    judge, seconds = ReferenceJudge(checkpoint), 25.0 if quick else 60 * minutes
    results, claims = [], []
    if only is not ElasticPhase.REPLACING:
        results.append(changing(checkpoint, judge, seconds, seed))
        claims += claims_of(results[-1])
    if only is not ElasticPhase.CHANGING:
        results.append(replacing(checkpoint, judge, 0.0 if quick else seconds, seed))
        claims += claims_of_spares(results[-1])
    if json is not None:
        write_results(json, results, describe(load_before))
    for result in results:
        for name, value in result.items():
            console.print(f"{name}: {value}", highlight=False, markup=False)
    raise typer.Exit(not print_claims(console, claims))


def changing(checkpoint: Path, judge: Judge, seconds: float, seed: int) -> dict[str, Any]:
    """The load on a service of its own, whose instances come and go."""
    serving: list[tuple[float, int]] = []
    attempts = 0.0

    async def change(disturbed: Disturbed, until_s: float) -> None:
        nonlocal attempts

        async def want(seats: list[int], name: str) -> None:
            disturbed.note(name)
            await asyncio.to_thread(disturbed.service.want_seats, seats)
            serving.append((time.monotonic(), len(seats)))

        serving.append((time.monotonic(), NUM_INSTANCES))
        await asyncio.sleep(seconds / 8)
        while time.monotonic() < until_s - seconds / 4:
            await want(FEWER, "drain")
            await asyncio.sleep(seconds / 8)
            await want(ALL, "scale")
            await asyncio.sleep(seconds / 8)
        attempts = disturbed.sample("nanocp:request_attempts_total")
        disturbed.note("kill")
        serving.append((time.monotonic(), 0))
        disturbed.launcher.kill(Member("instance", 1))

    run = ChaosRun(checkpoint, seconds=seconds, seed=seed)
    result, disturbed = play_in_process(CONFIG, run, judge, change)
    by_number = tokens_per_s(disturbed.asked, serving)
    return {
        "phase": "changing",
        **result,
        "attempts_of_planned_changes": attempts,
        "tokens_per_s": by_number,
        "ratio": round(by_number[3] / max(by_number[4], 1e-9), 2),
    }


def replacing(checkpoint: Path, judge: Judge, seconds: float, seed: int) -> dict[str, Any]:
    """The load on a service of its own, whose instances are killed with and without a spare.

    seconds: of kills; at least one of each kind.
    """
    took_s: dict[str, list[float]] = {"with a spare": [], "without": []}
    minute_s, num_pairs = (_MINUTE_S, 3) if seconds else (_QUICK_MINUTE_S, 1)
    minutes: list[tuple[float, str]] = []
    noticed_s: list[float] = []

    async def has_spare(disturbed: Disturbed) -> None:
        minutes.append((time.monotonic(), ""))
        await _until(lambda: disturbed.service.num_ready_spares > 0)

    async def kill_each_minute(disturbed: Disturbed) -> None:
        for number in range(num_pairs):
            await has_spare(disturbed)
            minutes.append((time.monotonic(), "undisturbed"))
            await asyncio.sleep(minute_s)
            minutes.append((time.monotonic(), "a kill"))
            disturbed.note("kill, with a spare")
            disturbed.launcher.kill(Member("instance", number))
            await asyncio.sleep(minute_s)

    async def kill(disturbed: Disturbed, until_s: float) -> None:
        await kill_each_minute(disturbed)
        service, begins_s = disturbed.service, time.monotonic()
        while not took_s["without"] or time.monotonic() < begins_s + seconds:
            await has_spare(disturbed)
            for kind, times in took_s.items():
                await asyncio.sleep(_LOADED_S)
                if kind == "without":
                    disturbed.launcher.end_spares()
                instance, term = len(disturbed.happened) % NUM_INSTANCES, service.term
                disturbed.note(f"kill, {kind}")
                killed_s = time.monotonic()
                disturbed.launcher.kill(Member("instance", instance))
                await _until(lambda term=term: _is_noticed(disturbed, term))
                noticed_s.append(round(time.monotonic() - killed_s, 2))
                await _until(lambda term=term: service.term > term and service.is_whole)
                times.append(round(time.monotonic() - killed_s, 2))

    num_minutes_s = 2 * num_pairs * minute_s
    run = ChaosRun(checkpoint, seconds=max(seconds, 25.0) + num_minutes_s, seed=seed)
    result, disturbed = play_in_process(
        WITH_SPARE, run, judge, kill, lambda disturbed: asyncio.run(has_spare(disturbed))
    )
    by_minute = tokens_per_s(disturbed.asked, minutes)
    spare_s, process_s = (statistics.median(times) for times in took_s.values())
    return {
        "phase": "replacing",
        **result,
        "noticed_s": statistics.median(noticed_s),
        "whole_again_s": took_s,
        "experts_load_s": _experts_load_s(checkpoint),
        "spare_s": spare_s,
        "new_process_s": process_s,
        "spare_ratio": round(spare_s / process_s, 2),
        "minute_s": minute_s,
        "tokens_per_s_by_minute": by_minute,
        "kill_ratio": round(by_minute["a kill"] / max(by_minute["undisturbed"], 1e-9), 2),
    }


async def _until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + _WAIT_S
    while not await asyncio.to_thread(condition):
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"it did not happen in {_WAIT_S:.0f} s")
        await asyncio.sleep(_LOOK_S)


def _is_noticed(disturbed: Disturbed, term: int) -> bool:
    """Whether this term has ended: the next one may have begun already."""
    return disturbed.sample("nanocp:recovering") > 0 or disturbed.service.term > term


def _experts_load_s(checkpoint: Path) -> float:
    """Seconds in which one instance's experts are loaded into weights that are here."""
    weights, dtype = load_shared_weights(WITH_SPARE, checkpoint), torch_dtype(WITH_SPARE)
    model = ModelConfig.from_folder(checkpoint)
    held = dict(enumerate(expert_range(model, 0, NUM_INSTANCES)))
    began_s = time.monotonic()
    load_experts(checkpoint, model, dtype, weights, held)
    return round(time.monotonic() - began_s, 3)


def tokens_per_s(asked: list[Asked], phases: list[tuple[float, Kind]]) -> dict[Kind, float]:
    """Tokens a second by kind of phase, which begins at its time; 0 and "" are of no kind."""
    times = sorted(at_s for each in asked for arrivals in each.arrivals_s for at_s in arrivals)
    kinds = {kind for _, kind in phases if kind}
    tokens, seconds = dict.fromkeys(kinds, 0), dict.fromkeys(kinds, 1e-9)
    ends = [at_s for at_s, _ in phases[1:]]
    for (begin_s, kind), end_s in zip(phases, ends, strict=False):
        if kind:
            tokens[kind] += sum(begin_s <= at_s < end_s for at_s in times)
            seconds[kind] += end_s - begin_s
    return {kind: round(tokens[kind] / seconds[kind], 1) for kind in kinds}


def claims_of(result: dict[str, Any]) -> list[tuple[str, bool]]:
    """What is claimed of changes, and whether it holds."""
    least = 0.95 * (NUM_INSTANCES - 1) / NUM_INSTANCES
    planned = [result["by_kind"][kind]["pause_s_max"] for kind in ("drain", "scale")]
    return [
        *_nothing_failed(result),
        ("planned changes began no attempt", not result["attempts_of_planned_changes"]),
        (f"planned pauses of {max(planned)} s are at most 1 s", max(planned) <= MAX_PAUSE_S),
        (f"three give {result['ratio']} of four's tokens, at least {least:.2f}; too short to judge"
         if result["seconds"] < _JUDGED_S else
         f"three give {result['ratio']} of four's tokens, at least {least:.2f}",
         result["ratio"] >= least or result["seconds"] < _JUDGED_S),
    ]  # fmt: skip


def claims_of_spares(result: dict[str, Any]) -> list[tuple[str, bool]]:
    """What is claimed of spares, and whether it holds."""
    limit_s = MAX_SPARE_S + result["experts_load_s"]
    is_short = result["minute_s"] < _MINUTE_S
    return [
        *_nothing_failed(result),
        (
            f"a kill is noticed after {result['noticed_s']} s, at most {MAX_NOTICED_S}",
            result["noticed_s"] <= MAX_NOTICED_S,
        ),
        (
            f"all serve again {result['spare_s']} s after a loss by a spare, at most {limit_s} s "
            "(2 s and the experts' load)",
            result["spare_s"] <= limit_s,
        ),
        (
            f"that is {result['spare_ratio']} of the time with a new process, at most 0.6",
            result["spare_ratio"] <= MAX_SPARE_RATIO,
        ),
        (
            f"minutes with a kill give {result['kill_ratio']} of the tokens of others, at least "
            f"{MIN_KILL_RATIO}" + "; too short to judge" * is_short,
            result["kill_ratio"] >= MIN_KILL_RATIO or is_short,
        ),
    ]


def _nothing_failed(result: dict[str, Any]) -> list[tuple[str, bool]]:
    phase = result["phase"]
    return [
        (f"{phase}: no accepted request was lost", not result["lost"]),
        (f"{phase}: no output has a wrong token", not result["wrong"]),
        (f"{phase}: no token was given twice", not result["doubled"]),
        (
            f"{phase}: no frame and no segment is left",
            not (result["frames_left"] + result["segments_left"]),
        ),
    ]


if __name__ == "__main__":
    typer.run(main)
