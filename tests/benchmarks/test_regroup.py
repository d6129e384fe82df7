"""A real service on the tiny model regroups while requests run, and its claims are judged."""

import pytest
import regroup
from rich.console import Console
from rich.progress import Progress

QUIET = Console(quiet=True)
SOUND = {
    "phase": "regrouping",
    "terms": 9,
    "failed": 0,
    "wrong": 0,
    "near_ties": 1,
    "tokens": 5000,
    "frames_not_back": 0,
    "segments_left": 0,
}


@pytest.mark.parametrize(
    ("change", "holds"),
    [
        ({}, True),
        ({"failed": 1}, False),
        ({"wrong": 1}, False),
        ({"near_ties": 10}, False),
        ({"frames_not_back": 1}, False),
        ({"segments_left": 1}, False),
        ({"terms": 1}, False),
    ],
)
def test_regroup_judges_its_claims(change, holds):
    assert regroup.show_claims([SOUND, SOUND | change], QUIET) == holds


@pytest.mark.system
@pytest.mark.parametrize(
    ("phase", "seconds"),
    [("regrouping", 5.0), pytest.param("losing", 20.0, marks=pytest.mark.system)],
)
def test_real_instances_begin_another_term_and_every_token_is_the_references(
    tiny_checkpoint, phase, seconds
):
    outputs, service = regroup.play(tiny_checkpoint, phase, seconds)
    found = regroup.judge(tiny_checkpoint, outputs, service, Progress(disable=True))
    assert found["requests"] >= regroup.NUM_CLIENTS and found["terms"] > 1
    assert (found["failed"], found["wrong"]) == (0, 0), [output.error for output in outputs]
    assert (found["frames_not_back"], found["segments_left"]) == (0, 0)
    regroup.show([found, found], QUIET)
