"""`nanocp experts`: what it says of a service's experts, and of a service that has none."""

import json
from dataclasses import replace
from functools import partial

import pytest

from control_plane.coordinator.flights.expert_changes import ExpertsNow
from harness.exact.settings import configured
from harness.hash_clusters.hash_model import NUM_EXPERTS
from harness.programs.command_line import nanocp
from harness.services.hash_service import CONFIG, generate, hash_service, prompt
from harness.waits import until
from nanocp.cli.operate.experts import lines_of
from nanocp.serve.experts import NO_REPORT, answer_experts
from nanocp.serve.served import why_experts_stay
from nanocp.simulator.costs.cluster_file import load_cluster_file
from nanocp.simulator.loads.expert_loads import expert_imbalance

MOVING = {"redundant_experts": 2, "expert_load_mb_per_s": 100}
FOUND = {
    "is_on": True, "seats": [0, 2], "num_slots": 3, "is_changing": False, "num_loading": 0,
    "failure": "", "changes": {"done": 4, "failed": 1, "lost": 0}, "expert_load_mb_per_s": 100,
    "table": [[0, 1, 2, -1, -1, -1, 2, 3, -1]] * 7, "loads": [[0, 10, 60, 30]] * 7,
    "pairs": [[40, 60]] * 7, "imbalances": [1.2, 1.0, 1.1, 1.9, 1.0, 1.3, 1.0],
}  # fmt: skip
"""Seat 1 is empty; expert 2 has a replica, and instance 2 a free slot."""


def test_the_worst_layers_come_first_and_what_moves_comes_last():
    first, *lines = lines_of(FOUND)
    assert first == "load of the hottest instance over the mean, by MoE layer:"
    assert lines[0] == (
        "  layer 3: 1.90 at instance 2; its hottest experts: 2 with 60.0% of the pairs in 2 "
        "replicas, 3 with 30.0% of the pairs; 1 slots empty, 1 with replicas"
    )
    assert [line.split()[1] for line in lines[:5]] == ["3:", "5:", "0:", "2:", "1:"]
    assert lines[5:] == [
        "2 more layers are more even (--json has all)",
        "no change is under way; changes so far: 4 done, 1 failed, 0 lost",
        "experts follow the load, at 100 MB/s (cluster.expert_load_mb_per_s)",
    ]


@pytest.mark.parametrize(("changed", "said"), [
    ({"is_changing": True}, "rows leave the slots of a change; changes so far"),
    ({"is_changing": True, "num_loading": 5}, "instances load 5 experts; changes so far"),
    ({"failure": "instance 1: no file"}, "the last change that failed: instance 1: no file"),
    ({"is_on": False}, "cluster.redundant_experts and cluster.expert_load_mb_per_s let them"),
])  # fmt: skip
def test_a_change_a_failure_and_how_to_let_experts_move_are_said(changed, said):
    assert said in "\n".join(lines_of(FOUND | changed))


def test_the_load_of_an_instance_is_that_of_its_slots_and_nobody_writes_it():
    names = ("is_on", "seats", "num_slots", "table", "loads", "is_changing", "num_loading",
             "failure", "changes")  # fmt: skip
    now = ExpertsNow(*(FOUND[name] for name in names))
    answer = partial(answer_experts, "", 100, lambda: now)
    assert json.loads(answer(None, "")) == FOUND | {"imbalances": [1.2] * 7, "num_experts": 4}
    with pytest.raises(ValueError, match="alice cannot change experts so"):
        answer(b"{}", "alice")


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    file = tmp_path_factory.mktemp("keys") / "operators"
    file.write_text("alice her-key\n")
    config = configured(CONFIG, operator_keys_file=str(file), **MOVING)
    with hash_service(config, num_experts=NUM_EXPERTS) as service:
        yield service


def ask(service, *words, key="her-key"):
    target = "--target", service.metrics_address
    done = nanocp("experts", *target, *words, NANOCP_OPERATOR_KEY=key)
    return done.exit_code, done.stdout, done.stderr


def test_a_service_is_asked_with_a_key_and_the_simulator_reads_its_answer(service, tmp_path):
    assert ask(service) == (1, "", f"nanocp experts: {NO_REPORT}\n")

    def is_reported():
        generate(service.address, prompt(70, 1), 200)
        return ask(service)[0] == 0

    until(is_reported, limit_s=60)
    status, said, errors = ask(service)
    assert (status, errors) == (0, "") and said.startswith("load of the hottest instance")
    assert "experts follow the load, at 100 MB/s" in said
    found = json.loads(ask(service, "--json")[1])
    assert found["num_experts"] == NUM_EXPERTS and found["seats"] == [0, 1, 2, 3]
    num_layers = len(found["table"])
    for layer, loads, pairs in zip(found["table"], found["loads"], found["pairs"], strict=True):
        assert {*layer} - {-1} == {*range(NUM_EXPERTS)} and len(pairs) == 4
        assert sum(loads) == pytest.approx(sum(pairs))
    assert sum(found["loads"][0]) > 0 and "layer 1: no row has come to its experts" in said
    (tmp_path / "experts.json").write_text(json.dumps(found))
    shape = load_cluster_file("h200x32-deepseek-v3").model
    model = replace(shape, num_experts=NUM_EXPERTS, num_moe_layers=num_layers)
    measured = expert_imbalance(str(tmp_path / "experts.json"), model, 4)
    assert measured > 1 and measured == pytest.approx(found["imbalances"][0])


@pytest.mark.parametrize("key", ["", "another"])
def test_who_is_no_operator_is_told_so(service, key):
    status, said, errors = ask(service, key=key)
    assert (status, said) == (1, "") and "asks for an operator's key" in errors


@pytest.mark.parametrize(("settings", "num_experts", "sentence"), [
    ({"layout": "pipeline", "num_instances": 2}, 8, "a stage of a pipeline has all experts"),
    ({}, 0, "the model is dense"),
    ({"num_instances": 1}, 8, "the only instance has all experts"),
    ({}, None, "the service ends with the first loss"),
    ({"recovery_timeout_ms": 0}, 8, "the service ends with the first loss"),
    ({"device": "cuda", "dispatch_backend": "deep_ep"}, 8, "the service ends with the first loss"),
])  # fmt: skip
def test_experts_that_cannot_move_have_a_reason(settings, num_experts, sentence):
    assert sentence in why_experts_stay(configured(**settings), num_experts)


def test_experts_that_can_move_have_none():
    assert not why_experts_stay(configured(**MOVING), 8)


def test_a_service_without_experts_and_one_that_is_not_there_are_told_apart():
    with hash_service() as service:
        assert ask(service)[0] == 1 and "the service ends with the first loss" in ask(service)[2]
    status, said, errors = ask(service)
    assert (status, said) == (2, "") and "no NanoCP answers at" in errors
