"""Terms end each second while requests run: exactness, and the pauses.

Enters: a checkpoint, a service of four real instances without Ray, the clients of `nanocp chaos`.
Leaves: a result. Does not know: what a term is made of.

Every instance survives; chaos.py shows what losses cost.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

from benchmarks.kit.bench import BenchRun, Claim, at_most, bench
from benchmarks.kit.service import checkpoint_of
from benchmarks.service.chaos import CONFIG, Disturbed, play_in_process
from nanocp.cli.demo.chaos_run import ChaosRun
from nanocp.cli.demo.judge import Judge, ReferenceJudge
from nanocp.cli.demo.load import Asked
from nanocp.cli.demo.losses import Loss
from nanocp.cli.demo.report import claims_of
from nanocp.config.scheduler import SchedulerConfig
from nanocp.values.members import Member

MAX_LEAVE_S = 0.5
"""Goal: in addition to a step, longest time in which 99% of instances leave a term."""
JUDGED_S = 60.0
"""Times are judged in runs of this length or more."""


MAX_KEPT_S = {"tiny": 1.0, "small": 2.0}
"""Preset -> goal: median time without a token of a row that is kept."""
PAUSE_S = {"tiny": 1.0, "small": 10.0}
"""Time from one end of a term to the next: prompts must be computed in between."""


@bench("10 seconds.")
def main(
    run: BenchRun,
    preset: Annotated[Literal["tiny", "small"], "Which model."] = "tiny",
    minutes: Annotated[float, "Of load."] = 5.0,
) -> None:
    """Play the load; the reference model judges every output."""
    checkpoint, seconds = checkpoint_of(preset), 10.0 if run.is_quick else 60 * minutes
    result = regrouping(checkpoint, ReferenceJudge(checkpoint), seconds, preset)
    run.facts(result)
    run.keep(result)
    run.judge([*claims_of(result), *claims_of_terms(result)])


def regrouping(
    checkpoint: Path, judge: Judge, seconds: float, preset: str = "tiny"
) -> dict[str, Any]:
    """The load on a service of its own, whose every term ends after a while."""
    leave_s: list[float] = []

    async def regroup(disturbed: Disturbed, until_s: float) -> None:
        while time.monotonic() < until_s:
            await asyncio.sleep(PAUSE_S[preset])
            disturbed.note("a term ended")
            disturbed.service.regroup()

    result, disturbed = play_in_process(
        replace(CONFIG, scheduler=SchedulerConfig(policy="chaos")),
        ChaosRun(checkpoint, seconds=seconds),
        judge,
        regroup,
        lambda disturbed: _time_leaving(disturbed, leave_s),
    )
    step_s, regroup_s = (
        disturbed.sample(f"nanocp:{name}_seconds_sum")
        / max(disturbed.sample(f"nanocp:{name}_seconds_count"), 1)
        for name in ("step", "recovery")
    )
    kept_s = sorted(kept_pauses_s(disturbed.asked, disturbed.happened))
    return {
        "phase": "regrouping",
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


def claims_of_terms(result: dict[str, Any]) -> Iterator[Claim]:
    """What is claimed of pauses, besides what `nanocp chaos` claims."""
    too_short = "too short" if result["seconds"] < JUDGED_S else ""
    kept = at_most(
        "a kept row pauses {} s in the median",
        result["kept_pause_s_p50"],
        MAX_KEPT_S[result["preset"]],
    )
    leave = at_most(
        f"99% of instances leave a term within {{}} s (a step and {MAX_LEAVE_S} s)",
        result["leave_s_p99"],
        round(MAX_LEAVE_S + result["step_s"], 3),
    )
    yield from (claim.unless(too_short) for claim in (kept, leave))


if __name__ == "__main__":
    main()
