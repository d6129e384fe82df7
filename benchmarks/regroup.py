"""Terms end each second, then members are lost: exactness, and the pauses.

    python benchmarks/regroup.py [--quick] [--only regrouping|losing] [--preset tiny|small]
        [--minutes M] [--seed S] [--json PATH]

Enters: a checkpoint, a service of four real instances without Ray, the clients of `nanocp chaos`.
Leaves: a result for each phase; exit status 1 if a claim does not hold. Does not know: what a term
is made of.

In the phase `regrouping` every instance survives; the phase `losing` is `nanocp chaos`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from chaos_in_process import Disturbed, play_in_process
from machine import describe, write_results
from rich.console import Console
from service import checkpoint_of

from nanocp.chaos.judge import Judge, ReferenceJudge
from nanocp.chaos.load import Asked
from nanocp.chaos.losses import Loss
from nanocp.chaos.report import claims_of
from nanocp.chaos.run import ChaosRun, play
from nanocp.cli.console import output, print_claims
from nanocp.config.cluster import ClusterConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.config.service import ServiceConfig
from nanocp.config.whole import Config
from nanocp.values.members import Member

NUM_INSTANCES = 4
MAX_LEAVE_S = 0.5
"""Goal: in addition to a step, longest time in which 99% of instances leave a term."""
JUDGED_S = 60.0
"""Times are judged in runs of this length or more."""


class RegroupPhase(StrEnum):
    """What is run alone."""

    REGROUPING = "regrouping"
    LOSING = "losing"


class RegroupPreset(StrEnum):
    """Which model is served."""

    TINY = "tiny"
    SMALL = "small"

    @property
    def max_kept_s(self) -> float:
        """Goal: median time without a token of a row that is kept."""
        return 1.0 if self is RegroupPreset.TINY else 2.0

    @property
    def pause_s(self) -> float:
        """Time from one end of a term to the next: prompts must be computed in between."""
        return 1.0 if self is RegroupPreset.TINY else 10.0


CONFIG = Config(
    cluster=ClusterConfig(num_instances=NUM_INSTANCES, num_frames=128, max_model_len=2048),
    scheduler=SchedulerConfig(policy="chaos"),
    service=ServiceConfig(grpc_port=0, metrics_port=0, http_port=0),
)


def main(
    quick: Annotated[bool, typer.Option(help="10 and 25 seconds: about a minute.")] = False,
    only: Annotated[RegroupPhase | None, typer.Option(help="One phase; by default both.")] = None,
    preset: Annotated[RegroupPreset, typer.Option(help="Which model.")] = RegroupPreset.TINY,
    minutes: Annotated[float, typer.Option(help="Of each phase.")] = 5.0,
    seed: Annotated[int, typer.Option(help="Of the requests and the losses.")] = 0,
    json: Annotated[
        Path | None, typer.Option(help="Write the results here, the machine beside it.")
    ] = None,
) -> None:
    """Play the phases; the reference model judges every output."""
    load_before = os.getloadavg()[0]
    console = output()
    checkpoint = checkpoint_of(preset)
    results: list[dict[str, Any]] = []
    if only is not RegroupPhase.LOSING:
        judge, seconds = ReferenceJudge(checkpoint), 10.0 if quick else 60 * minutes
        results.append(regrouping(checkpoint, judge, seconds, preset))
    if only is not RegroupPhase.REGROUPING:
        settings = {"cluster.num_frames": 128, "cluster.max_model_len": 2048}
        run = ChaosRun(
            checkpoint, NUM_INSTANCES, 25.0 if quick else 60 * minutes, seed, settings=settings
        )
        found = play(run, ReferenceJudge, lambda step: print(step, file=sys.stderr))
        results.append({"phase": RegroupPhase.LOSING, **found})
    if json is not None:
        write_results(json, results, describe(load_before))
    shown = [show(result, console) for result in results]
    raise typer.Exit(0 if all(shown) else 1)


def regrouping(
    checkpoint: Path, judge: Judge, seconds: float, preset: RegroupPreset = RegroupPreset.TINY
) -> dict[str, Any]:
    """The load on a service of its own, whose every term ends after a while."""
    leave_s: list[float] = []

    async def regroup(disturbed: Disturbed, until_s: float) -> None:
        while time.monotonic() < until_s:
            await asyncio.sleep(preset.pause_s)
            disturbed.note("a term ended")
            disturbed.service.regroup()

    run = ChaosRun(checkpoint, seconds=seconds)
    result, disturbed = play_in_process(
        CONFIG, run, judge, regroup, lambda disturbed: _time_leaving(disturbed, leave_s)
    )
    step_s, regroup_s = (
        disturbed.sample(f"nanocp:{name}_seconds_sum")
        / max(disturbed.sample(f"nanocp:{name}_seconds_count"), 1)
        for name in ("step", "recovery")
    )
    kept_s = sorted(kept_pauses_s(disturbed.asked, disturbed.happened))
    return {
        "phase": RegroupPhase.REGROUPING,
        "preset": preset,
        **result,
        "losses": disturbed.service.term - 1,
        "regroup_s": round(regroup_s, 3),
        "step_s": round(step_s, 4),
        "leave_s_p99": round(sorted(leave_s)[len(leave_s) * 99 // 100], 3),
        "kept_pause_s_p50": round(kept_s[len(kept_s) // 2], 3),
        "kept_pause_s_max": round(kept_s[-1], 3),
    }


def _time_leaving(disturbed: Disturbed, took_s: list[float]) -> None:
    """Note how long each instance takes from Leave to Left. On the controller's thread."""
    members, asked_s = disturbed.service._controller.members, dict[Member, float]()
    ask, has_left = members.ask_to_leave, members.terms.has_left

    def timed_ask(instance: Member) -> None:
        asked_s.setdefault(instance, time.monotonic())
        ask(instance)

    def timed_left(instance: Member, term: int) -> None:
        if instance in asked_s:
            took_s.append(time.monotonic() - asked_s.pop(instance))
        has_left(instance, term)

    members.ask_to_leave = timed_ask  # type: ignore[method-assign]
    members.terms.has_left = timed_left  # type: ignore[method-assign]


def kept_pauses_s(asked: Sequence[Asked], ends: Sequence[Loss]) -> list[float]:
    """For each end of a term but the last: how long a row that was kept paused.

    Nothing is lost, so the rows of all streams are kept. Of the streams that run from this end to
    the next one it is the median; ends through which no stream runs are left out.
    """
    streams = [arrivals for each in asked for arrivals in each.arrivals_s if arrivals]
    pauses = []
    for end, later in itertools.pairwise(ends):
        through = [each for each in streams if each[0] < end.at_s and each[-1] > later.at_s]
        longest = [
            max(
                after - before
                for before, after in itertools.pairwise(each)
                if after > end.at_s and before < later.at_s
            )
            for each in through
        ]
        pauses += [median(longest)] if longest else []
    return pauses or [float("inf")]


def show(result: dict[str, Any], console: Console) -> bool:
    """Print a phase's numbers and claims; True if all claims hold."""
    for name, value in result.items():
        console.print(f"{name}: {value}", highlight=False, markup=False)
    claims = claims_of(result)
    if result["phase"] == RegroupPhase.REGROUPING:
        max_kept_s = RegroupPreset(result["preset"]).max_kept_s
        max_leave_s = round(MAX_LEAVE_S + result["step_s"], 3)
        timed = [
            (f"a kept row pauses {result['kept_pause_s_p50']} s in the median, at most "
             f"{max_kept_s}", result["kept_pause_s_p50"] <= max_kept_s),
            (f"99% of instances leave a term within {result['leave_s_p99']} s, at most "
             f"{max_leave_s} (a step and {MAX_LEAVE_S} s)", result["leave_s_p99"] <= max_leave_s),
        ]  # fmt: skip
        if result["seconds"] < JUDGED_S:
            timed = [(f"{sentence}; too short to judge", True) for sentence, _ in timed]
        claims += timed
    return print_claims(console, claims)


if __name__ == "__main__":
    typer.run(main)
