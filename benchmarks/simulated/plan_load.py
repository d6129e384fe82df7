"""`nanocp plan --log` on three loads, and what its answers rest on; costs of measured operators.

Enters: the simulator, the whole public traces. Leaves: a table, which claims hold, and a list of
lines {case, verdict, gain, rates, ...}. Does not know: how a policy decides.

Rates and times of steps are simulated: they do not depend on the load of the machine. Processor
minutes do.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

from benchmarks.kit.bench import BenchRun, Claim, at_least, at_most, bench
from nanocp.simulator.analyser.analysis import (
    COST_GROUPS,
    Analysis,
    LoadVerdict,
    analyse,
    changed_costs,
    step_us,
)
from nanocp.simulator.analyser.groups import play_groups
from nanocp.simulator.costs.cluster_file import load_cluster_file
from nanocp.simulator.costs.cost import CostModel
from nanocp.simulator.loads.request_logs import read_log
from nanocp.simulator.loads.workload import Workload
from nanocp.simulator.loads.workload_request import WorkloadRequest
from nanocp.simulator.outcome import ATTAINMENT, Outcome
from nanocp.simulator.sweep import highest_sustained_rate, sweep
from nanocp.simulator.trial import Trial

CLUSTER = "h200x32-deepseek-v3"
NUM_DRAWN = 6000
"""Requests of the log that is drawn from the paper's mix, 1% of them long."""
VERDICTS = {
    "azure": LoadVerdict.NOT_NEEDED,
    "mooncake-x8": LoadVerdict.NOT_NEEDED,
    "issue-1": LoadVerdict.PAYS,
}
CHECKED = (("attention", 2.0), ("exchange", 0.5))
"""Sensitivities that are held against whole runs: group of costs, factor."""
NUM_GROUPS = 4

Line = dict[str, Any]


def cases(azure: Path, mooncake: Path) -> Iterator[tuple[str, Trial, Sequence[WorkloadRequest]]]:
    """(name, trial, requests of the log)."""
    drawn = tuple(islice(Workload("issue-1", 34.2).requests(1 << 20), NUM_DRAWN))
    for name, num_instances, rate, scale, requests in (
        ("azure", 16, 60.0, 1.0, read_log(azure).requests),
        ("mooncake-x8", 16, 5.0, 8.0, read_log(mooncake).requests),
        ("issue-1", 32, 34.2, 1.0, drawn),
    ):
        workload = Workload("log", rate, length_scale=scale, given=requests)
        file = load_cluster_file(CLUSTER, num_instances)
        yield name, Trial(file, "cost_aware", workload), requests


def line_of(name: str, found: Analysis, minutes: float) -> Line:
    """What is kept of an analysis."""
    return {
        "case": name,
        "verdict": str(found.verdict),
        "gain": round(found.gain, 3),
        "best": found.best.policy,
        "rates": {way.policy: round(way.rate_per_s, 2) for way in found.ways},
        "step_ms": {way.policy: round(way.outcome.step_ms_mean, 2) for way in found.ways},
        "cp_share": round(found.ours.outcome.cp_share, 4),
        "num_gpus": found.num_gpus,
        "sensitivities": {
            s.group: [round(s.low, 3), round(s.high, 3)] for s in found.sensitivities
        },
        "cpu_minutes": round(minutes, 2),
    }


def sampled_against_whole(trial: Trial, found: Analysis) -> Iterator[Line]:
    """Ratios of steps with a changed cost: from timed samples, and from whole runs."""
    for group, factor in CHECKED:
        costs = changed_costs(trial.file.costs_of(""), COST_GROUPS[group], factor)
        there = replace(trial, file=replace(trial.file, costs={"operators": costs}))
        steps_ms = [
            replace(there, policy=way.policy).filled().play().step_ms_mean
            for way in (found.best, found.ours)
        ]
        sampled_us = [step_us(there, way) for way in (found.best, found.ours)]
        yield {
            "case": f"{group} x {factor:g}",
            "sampled": round(sampled_us[0] / sampled_us[1], 3),
            "whole": round(steps_ms[0] / steps_ms[1], 3),
        }


def told_others(trial: Trial) -> Line:
    """A step of cost_aware that is told the fitted costs, over one that is told the true ones."""
    true_ms = trial.filled().play().step_ms_mean
    fitted = CostModel(trial.file, "fitted").in_tokens()
    with patch.object(CostModel, "in_tokens", lambda self, num_drafts=0: fitted):
        told_ms = trial.filled().play().step_ms_mean
    return {"case": "told the fitted costs", "step": round(told_ms / true_ms, 4)}


def all_sustained(outcomes: list[Outcome]) -> bool:
    """Whether all requests together meet the SLO, and no group fills up."""
    num_judged = sum(outcome.num_judged for outcome in outcomes)
    num_missed = sum(outcome.num_missed for outcome in outcomes)
    is_met = num_missed <= (1 - ATTAINMENT) * num_judged
    fills_up = any(outcome.is_drifting and outcome.drift > 0 for outcome in outcomes)
    return is_met and num_judged > 0 and not fills_up


def groups_against_one(trial: Trial) -> Line:
    """Rate of four groups behind a router with loads 5 s old, over that of one times four."""
    one = sweep(trial, precision=1.02, num_seeds=1).rate_per_s

    def attempt(rate: float) -> Any:
        outcomes = play_groups(trial.at_rate(rate), NUM_GROUPS)
        attainment = ATTAINMENT if all_sustained(outcomes) else 0.0
        fullest = max(outcomes, key=lambda outcome: outcome.tpot_ms_p99)
        return replace(fullest, attainment=attainment, drift=0.0, is_drifting=False)

    four = highest_sustained_rate(attempt, NUM_GROUPS * one, precision=1.02)
    ratio = four.rate_per_s / NUM_GROUPS / one
    return {"case": f"{NUM_GROUPS} groups", "one": round(one, 2), "ratio": round(ratio, 3)}


@bench("One load, quickly: a minute; only its processor time is judged.")
def main(
    run: BenchRun,
    azure: Annotated[Path | None, "The whole Azure trace; needed."] = None,
    mooncake: Annotated[Path | None, "The whole Mooncake trace; needed."] = None,
) -> None:
    """Analyse three loads, and hold the answers against whole runs."""
    for option, path in (("--azure", azure), ("--mooncake", mooncake)):
        if path is None or not path.exists():
            run.refuse(f"{option}: {path or 'the whole trace'} is not there")
    assert azure is not None and mooncake is not None
    lines: list[Line] = []
    given = list(cases(azure, mooncake))[1 if run.is_quick else 0 : 2 if run.is_quick else None]
    for name, trial, requests in run.track(given, "loads", len(given)):
        began_s = time.process_time()
        found = analyse(trial, requests, is_quick=run.is_quick)
        lines.append(line_of(name, found, (time.process_time() - began_s) / 60))
        run.facts(lines[-1])
        run.keep(*lines, is_quick=run.is_quick)
        if name == "issue-1":
            lines += sampled_against_whole(trial, found)
    if not run.is_quick:
        mix = Trial(load_cluster_file(CLUSTER), "cost_aware", Workload("issue-1", 39.0))
        lines += [told_others(mix), groups_against_one(mix)]
    for line in lines[3:]:
        run.facts(line)
    run.keep(*lines, is_quick=run.is_quick)
    run.judge(claims(lines, run.is_quick))


def claims(lines: Sequence[Line], is_quick: bool) -> Iterator[Claim]:
    """What is claimed of the lines that are there."""
    of = {line["case"]: line for line in lines}
    for name, verdict in VERDICTS.items():
        if name in of and not is_quick:
            said = of[name]["verdict"]
            yield Claim(f"{name}: {said}, as claimed {verdict}", said == verdict)
    if heavy := of.get("mooncake-x8"):
        most = 1 if is_quick else 3
        yield at_most("mooncake-x8: processor minutes", heavy["cpu_minutes"], most)
        if not is_quick:
            yield at_least(
                "mooncake-x8: cost_aware / static CP of 8",
                heavy["rates"]["cost_aware"] / heavy["rates"]["uniform_cp:8"],
                0.97,
            )
    for group, factor in CHECKED:
        if point := of.get(f"{group} x {factor:g}"):
            off = abs(point["sampled"] / point["whole"] - 1)
            yield at_most(f"{point['case']}: samples timed again, off whole runs by", off, 0.03)
    if told := of.get("told the fitted costs"):
        yield at_most("told the fitted costs: step over told the true ones", told["step"], 1.04)
    if groups := of.get(f"{NUM_GROUPS} groups"):
        yield at_least(
            "four groups, loads 5 s old: rate over four times one's", groups["ratio"], 0.97
        )


if __name__ == "__main__":
    main()
