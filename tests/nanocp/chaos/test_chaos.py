"""Chaos on a real service of HashInstances: it finds nothing, and finds each planted fault."""

import sys
from pathlib import Path

import pytest

from harness.paths import TESTS
from harness.services.judges import HashJudge
from nanocp.cli.demo.chaos_run import NUM_CLIENTS, ChaosRun, play
from nanocp.cli.demo.losses import PROCESS_KINDS
from nanocp.cli.demo.report import claims_of

SEED = 6
SETTINGS = {"cluster.num_frames": 64, "cluster.max_model_len": 2048}


def chaos(fault, timeout_s=300.0, seconds=12.0, pauses_s=(1.0, 4.0), **more):
    program = [sys.executable, str(TESTS / "nanocp/chaos/faulty_serve.py"), fault]
    run = ChaosRun(
        Path("no-checkpoint"), seconds=seconds, seed=SEED, timeout_s=timeout_s, settings=SETTINGS,
        program=program, pauses_s=pauses_s, **more,
    )  # fmt: skip
    return play(run, HashJudge, lambda step: None)


@pytest.fixture(autouse=True)
def member_path(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{TESTS}:{TESTS.parent}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.system
def test_a_service_under_chaos_loses_nothing():
    result = chaos("sound")
    assert [claim for claim, holds in claims_of(result) if not holds] == [], (
        result["failures"],
        result["log_end"],
    )
    assert result["requests"] >= NUM_CLIENTS and len(result["requests_by_kind"]) == NUM_CLIENTS
    assert sum(kind["losses"] for kind in result["by_kind"].values()) >= 2


@pytest.mark.system
@pytest.mark.parametrize(("fault", "number"), [
    ("doubled", "doubled"),
    ("other_output_ids", "wrong"),
    ("forgotten", "lost"),
    ("leaking", "frames_left"),
    ("unanswered", "tickets_left"),
])  # fmt: skip
def test_chaos_sees_a_planted_fault(fault, number):
    # A term that ends would void the open tickets.
    ends_terms = ("all instances killed", "instance killed")
    kinds = ("prefill killed",) if fault == "unanswered" else ends_terms
    result = chaos(fault, timeout_s=60.0, kinds=kinds)
    assert result[number] > 0, result
    assert not all(holds for _, holds in claims_of(result))


@pytest.mark.system
def test_a_service_that_ends_by_itself_ends_the_run():
    result = chaos("ending", seconds=3000.0)
    assert result["seconds"] < 300 and result["exit_status"] == 3 and result["ended_early"]
    assert 0 < result["lost"] == result["requests"]
    assert not all(holds for _, holds in claims_of(result))


@pytest.mark.system
def test_front_ends_and_controllers_are_lost_under_chaos_and_no_request_is():
    result = chaos("sound", seconds=45.0, pauses_s=(5.0, 9.0), has_processes=True)
    assert [claim for claim, holds in claims_of(result) if not holds] == [], (
        result["failures"],
        result["log_end"],
    )
    assert set(result["by_kind"]) & set(PROCESS_KINDS)


@pytest.mark.system
@pytest.mark.parametrize(("fault", "number", "kind"), [
    ("doubled", "doubled", "front end killed"),
    ("other_output_ids", "wrong", "front end killed"),
    ("forgotten", "lost", "controller killed"),
])  # fmt: skip
def test_chaos_sees_a_planted_fault_of_a_process(fault, number, kind):
    result = chaos(fault, timeout_s=60.0, pauses_s=(3.0, 6.0), kinds=(kind,), has_processes=True)
    assert result[number] > 0, result
    assert set(result["by_kind"]) == {kind}
    assert not all(holds for _, holds in claims_of(result))
