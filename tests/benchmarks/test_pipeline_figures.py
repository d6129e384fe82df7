"""The pipeline's figures: what a table of runs says, and one short run of each kind."""

import json
import re
from dataclasses import replace

import pytest

from benchmarks.kit.machine import ROOT
from benchmarks.pipeline.pipeline_figures import between, capacity
from benchmarks.pipeline.pipeline_runs import FULL, QUICK, play


def test_capacity_is_where_the_attainment_falls_below_90_percent():
    assert capacity([(10, 1.0), (20, 0.8)]) == pytest.approx(15)
    assert capacity([(10, 0.5), (20, 0.95)]) == 10
    assert capacity([(10, 1.0), (20, 0.95)]) == 20


def test_a_value_between_rates_is_on_their_line():
    points = [(10, 1.0), (20, 3.0), (30, 3.0)]
    assert [between(points, rate) for rate in (5, 10, 15, 30, 99)] == [1, 1, 2, 3, 3]


def test_controls_take_something_away():
    controls = QUICK.controls()
    greedy = play(controls["greedy"])[1]
    assert (greedy.num_changes, greedy.mean_r < 0.2) == (0, True)
    one = [
        play(replace(controls[f"one {policy}"], seconds=2.0))[1].e2el_ms_mean
        for policy in ("level", "even", "fluid")
    ]
    assert one[0] > 0
    assert max(one) <= 1.001 * min(one)
    assert play(controls["shuffled"])[1].num_judged


def test_every_figure_of_the_paper_has_runs():
    tasks = set(FULL.tasks())
    assert {task.model for task in tasks} == {"14B", "32B"}
    assert {task.links for task in tasks} == {"", "tcp"}
    assert {task.passes for task in tasks} == {"ours", "gllm", "vllm", "sarathi", "no_mixing"}


def test_the_page_says_of_each_criterion_that_does_not_hold_why_with_a_number():
    results = json.loads((ROOT / "benchmarks/results/pipeline_figures.json").read_text())
    criteria = [one for one in results if "criterion" in one]
    failed = {one["criterion"] for one in criteria if one["holds"] is False}
    page = (ROOT / "docs/research/pipeline-figures.md").read_text()
    rows = dict(re.findall(r"^\| (.*?) \| .* \| (yes|\*\*no\*\*) \|$", page, re.MULTILINE))
    assert {name for name, holds in rows.items() if holds != "yes"} == failed and failed
    reasons = dict(re.findall(r"^- \*\*(.*?)\*\*: (.*?)(?=\n- |\n\n)", page, re.MULTILINE | re.S))
    assert reasons.keys() == failed
    assert all(re.search(r"\d", why) and len(why) > 60 for why in reasons.values())
