"""Instances come and go while requests run: exactness, pauses, attempts, tokens a second, spares.

Enters: the tiny checkpoint, services of four real instances without Ray, the clients of `nanocp
chaos`. Leaves: a result for each phase. Does not know: how an instance is emptied, how a spare
takes a seat.

In the phase `changing`, with redundant experts, instance 3 is drained and taken back again and
again; between the changes the service runs with four, and then with three. Then every instance is
upgraded, or one in a short run. The last change is a kill: the survivors go on alone. In the phase
`replacing` nothing is redundant. Minutes in which an instance is killed while a spare stands by
take turns with minutes in which none is. Then instances are lost one after the other: killed while
a spare stands by, killed while none does, and stopped.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from benchmarks.kit.bench import BenchRun, Claim, at_least, at_most, bench, none
from benchmarks.kit.service import MEMBER, checkpoint_of
from benchmarks.service.chaos import CONFIG, NUM_INSTANCES, Disturbed, play_in_process
from control_plane.launchers.processes import ProcessLauncher
from data_plane.member.lifetime import SpareSpec
from data_plane.model.config import ModelConfig
from data_plane.moe.expert_weights import ExpertWeights
from data_plane.startup.cpu import load_shared_weights
from data_plane.startup.shared_parts import torch_dtype
from nanocp.cli.demo.chaos_run import ChaosRun
from nanocp.cli.demo.judge import Judge, ReferenceJudge
from nanocp.cli.demo.load import Asked
from nanocp.config.whole import Config
from nanocp.serve.service import member_environment, open_checkpoint
from nanocp.values.experts import home_table
from nanocp.values.members import Member

Kind = TypeVar("Kind", int, str)

ALL, FEWER = [0, 1, 2, 3], [0, 1, 2]
MAX_PAUSE_S = 1.0
MAX_SPARE_S = 2.0
"""Goal: longest time by a spare, besides the loading of its experts."""
MAX_SPARE_RATIO = 0.6
MAX_START_RATIO, MAX_AFTER_START_S = 1.2, 2.0
"""Goal: longest time by a new process, of the start of one, and besides it."""
MAX_NOTICED_S = {"killed": 0.5, "stopped": Config().limits.suspect_ms / 1000 + 1}
MIN_KILL_RATIO = 0.7
"""Goal: tokens in a minute with a kill, of those in one without."""
_MINUTE_S, _QUICK_MINUTE_S = 60.0, 5.0
_JUDGED_S = 120.0
"""Tokens a second are compared in runs of this length or more."""
_LOADED_S = 5.0
"""Time before a kill, in which requests begin to run."""
_BEFORE_KILL_S = 0.5
_LOOK_S = 0.02
_WAIT_S = 180.0
"""Longest wait for a seat to be filled, or a spare to be ready."""
REDUNDANT = replace(CONFIG, cluster=replace(CONFIG.cluster, redundant_experts=2))
WITH_SPARE = replace(CONFIG, cluster=replace(CONFIG.cluster, spares=1))


@bench("25 seconds of changes, and one kill of each kind.")
def main(
    run: BenchRun,
    only: Annotated[Literal["changing", "replacing"] | None, "One phase; by default both."] = None,
    minutes: Annotated[float, "Of each phase."] = 5.0,
    seed: Annotated[int, "Of the requests."] = 0,
) -> None:
    """Run the phases under load; the reference model judges every output."""
    checkpoint = checkpoint_of("tiny")
    judge, seconds = ReferenceJudge(checkpoint), 25.0 if run.is_quick else 60 * minutes
    if only != "replacing":
        run.keep(changing(checkpoint, judge, seconds, seed))
        run.judge(claims_of(run.results[-1]))
    if only != "changing":
        run.keep(replacing(checkpoint, judge, 0.0 if run.is_quick else seconds, seed))
        run.judge(claims_of_spares(run.results[-1]))
    for result in run.results:
        run.facts(result)


def changing(checkpoint: Path, judge: Judge, seconds: float, seed: int) -> dict[str, Any]:
    """The load on a service of its own, whose instances come and go."""
    serving: list[tuple[float, int]] = []
    attempts = 0.0

    async def change(disturbed: Disturbed, until_s: float) -> None:
        nonlocal attempts

        async def want(seats: list[int], name: str) -> None:
            disturbed.note(name)
            await asyncio.to_thread(disturbed.service.want_seats, seats)

        async def stay(num_instances: int) -> None:
            serving.append((time.monotonic(), num_instances))
            await asyncio.sleep(seconds / 8)

        await stay(NUM_INSTANCES)
        while len(serving) < 2 or time.monotonic() < until_s - seconds / 4:
            await want(FEWER, "drain")
            await stay(len(FEWER))
            await want(ALL, "scale")
            await stay(NUM_INSTANCES)
        serving.append((time.monotonic(), 0))
        for seat in ALL if seconds >= _JUDGED_S else ALL[:1]:
            await want([each for each in ALL if each != seat], "upgrade")
            await want(ALL, "upgrade")
        attempts = disturbed.sample("nanocp:request_attempts_total")
        # The last token before the kill belongs to no change.
        disturbed.note("nothing")
        await asyncio.sleep(_BEFORE_KILL_S)
        disturbed.note("kill")
        disturbed.launcher.kill(Member("instance", 1))

    chaos = ChaosRun(checkpoint, seconds=seconds, seed=seed)
    result, disturbed = play_in_process(REDUNDANT, chaos, judge, change)
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
    noticed_s: dict[str, list[float]] = {"killed": [], "stopped": []}
    own_start_s = 0.0

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

    async def lose(disturbed: Disturbed, how: str, kind: str) -> float:
        """Kill or stop an instance; returns the seconds until all serve again."""
        service = disturbed.service
        instance = Member("instance", len(disturbed.happened) % NUM_INSTANCES)
        term, lost_s = service.term, time.monotonic()
        disturbed.note(kind)
        number = signal.SIGKILL if how == "killed" else signal.SIGSTOP
        os.kill(disturbed.launcher.pid(instance), number)
        await _until(lambda: _is_noticed(disturbed, term))
        noticed_s[how].append(round(time.monotonic() - lost_s, 2))
        await _until(lambda: service.term > term and service.is_whole)
        return round(time.monotonic() - lost_s, 2)

    async def lose_one_by_one(disturbed: Disturbed, until_s: float) -> None:
        await kill_each_minute(disturbed)
        begins_s = time.monotonic()
        while not noticed_s["stopped"] or time.monotonic() < begins_s + seconds:
            await has_spare(disturbed)
            for kind, times in took_s.items():
                await asyncio.sleep(_LOADED_S)
                if kind == "without":
                    disturbed.launcher.end_spares()
                times.append(await lose(disturbed, "killed", f"kill, {kind}"))
            await asyncio.sleep(_LOADED_S)
            await lose(disturbed, "stopped", "stop")

    def before(disturbed: Disturbed) -> None:
        nonlocal own_start_s
        asyncio.run(has_spare(disturbed))
        own_start_s = _own_start_s(checkpoint)

    num_minutes_s = 2 * num_pairs * minute_s
    chaos = ChaosRun(checkpoint, seconds=max(seconds, 25.0) + num_minutes_s, seed=seed)
    result, disturbed = play_in_process(WITH_SPARE, chaos, judge, lose_one_by_one, before)
    by_minute = tokens_per_s(disturbed.asked, minutes)
    spare_s, process_s = (statistics.median(times) for times in took_s.values())
    return {
        "phase": "replacing",
        **result,
        "noticed_s": {how: statistics.median(times) for how, times in noticed_s.items()},
        "noticed_s_max": {how: max(times) for how, times in noticed_s.items()},
        "whole_again_s": took_s,
        "experts_load_s": _experts_load_s(checkpoint),
        "spare_s": spare_s,
        "new_process_s": process_s,
        "own_start_s": own_start_s,
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


def _own_start_s(checkpoint: Path) -> float:
    """Seconds in which a process starts, and loads all but experts, beside an idle service."""
    factory = open_checkpoint(WITH_SPARE, checkpoint).spare_factory
    launcher, began_s = ProcessLauncher(MEMBER, member_environment(WITH_SPARE)), time.monotonic()
    try:
        spec = SpareSpec("spare", factory, WITH_SPARE, checkpoint)
        launcher.start_spare("spare", spec, lambda how, was_ready: None)
        asyncio.run(_until(lambda: any(launcher.spares)))
        return round(time.monotonic() - began_s, 2)
    finally:
        launcher.end_spares()


def _experts_load_s(checkpoint: Path) -> float:
    """Seconds in which one instance's experts are loaded into weights that are here."""
    weights, dtype = load_shared_weights(WITH_SPARE, checkpoint), torch_dtype(WITH_SPARE.data_plane)
    model = ModelConfig.from_folder(checkpoint)
    home = home_table(model.num_experts, NUM_INSTANCES)
    began_s = time.monotonic()
    ExpertWeights(checkpoint, model, dtype, weights, 0).load(home)
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


def claims_of(result: dict[str, Any]) -> Iterator[Claim]:
    """What is claimed of changes."""
    too_short = "too short" if result["seconds"] < _JUDGED_S else ""
    yield from _nothing_failed(result)
    yield none("attempt was begun by planned changes", result["attempts_of_planned_changes"])
    planned = (result["by_kind"][kind]["pause_s_max"] for kind in ("upgrade", "drain", "scale"))
    yield at_most("planned pauses take {} s", max(planned), MAX_PAUSE_S).unless(too_short)
    least = 0.95 * (NUM_INSTANCES - 1) / NUM_INSTANCES
    yield at_least("three give {} of four's tokens", result["ratio"], least).unless(too_short)


def claims_of_spares(result: dict[str, Any]) -> Iterator[Claim]:
    """What is claimed of spares."""
    too_short = "too short" if result["minute_s"] < _MINUTE_S else ""
    load_s = result["experts_load_s"]
    start_s = MAX_START_RATIO * (result["own_start_s"] + load_s) + MAX_AFTER_START_S
    yield from _nothing_failed(result)
    for how, limit in MAX_NOTICED_S.items():
        what = f"a process that is {how} is missed after {{}} s"
        yield at_most(what, result["noticed_s"][how], limit)
    what = "all serve again {} s after a loss by a spare (2 s and the experts' load)"
    yield at_most(what, result["spare_s"], MAX_SPARE_S + load_s)
    what = "that is {} of the time with a new process"
    yield at_most(what, result["spare_ratio"], MAX_SPARE_RATIO)
    what = f"by a new process {{}} s ({MAX_START_RATIO} of its own start, {MAX_AFTER_START_S} s)"
    yield at_most(what, result["new_process_s"], round(start_s, 2))
    what = "minutes with a kill give {} of the tokens of others"
    yield at_least(what, result["kill_ratio"], MIN_KILL_RATIO).unless(too_short)


def _nothing_failed(result: dict[str, Any]) -> Iterator[Claim]:
    phase = result["phase"]
    yield none(f"accepted request was lost ({phase})", result["lost"])
    yield none(f"output has a wrong token ({phase})", result["wrong"])
    yield none(f"token was given twice ({phase})", result["doubled"])
    yield none(
        f"frame or segment is left ({phase})", result["frames_left"] + result["segments_left"]
    )


if __name__ == "__main__":
    main()
