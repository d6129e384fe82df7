"""How unevenly rows choose experts: drawn, or as a service counted it."""

import json
from dataclasses import replace

import pytest

from control_plane.coordinator.flights.expert_changes import ExpertsNow
from nanocp.serve.experts import answer_experts
from nanocp.simulator.costs.cluster_file import load_cluster_file
from nanocp.simulator.costs.cost import CostModel, Loads
from nanocp.simulator.loads.expert_loads import expert_imbalance, expert_shares, with_a_slot_more
from nanocp.values.experts import home_table

FILE = load_cluster_file("h200x32-deepseek-v3")


def write(path, **changed):
    even = {"num_experts": 256, "pairs": [[10] * 32] * 57 + [[10] * 31 + [330]]}
    loads = [[1.25] * 256] * 57 + [[1.25] * 255 + [321.25]]
    path.write_text(json.dumps(even | {"loads": loads} | changed))
    return str(path)


def test_a_row_chooses_no_expert_twice():
    for kind, size in (("lognormal", 0.0), ("lognormal", 1.2), ("zipf", 1.1), ("zipf", 4.0)):
        shares = expert_shares(kind, size, 256, 8, seed=3)
        assert sum(shares) == pytest.approx(8, rel=1e-6) and max(shares) <= 1


def test_the_imbalance_is_that_of_the_distribution_or_the_file(tmp_path):
    assert expert_imbalance("lognormal:0", FILE.model, 32) == pytest.approx(1)
    assert 2.2 < expert_imbalance("lognormal:1.2", FILE.model, 32) < 2.8  # 2.56 published
    one_layer = 330 * 32 / 640
    measured = expert_imbalance(write(tmp_path / "loads.json"), FILE.model, 32)
    assert measured == pytest.approx((57 + one_layer) / 58)
    unused = write(
        tmp_path / "drafts.json", pairs=[[1] * 32] * 58 + [[0] * 32], loads=[[1] * 256] * 59
    )
    assert expert_imbalance(unused, FILE.model, 32) == 1
    before, after = with_a_slot_more(256, 8, 32)
    assert before > 2.2 and after < 1.12


@pytest.mark.parametrize(("changed", "named"), [
    ({"num_experts": 128}, r"loads\) \(128, 58, 58\); simulated are \(256, 58, 58\)"),
    ({"pairs": [[10] * 32] * 60}, r"\(256, 60, 58\)"),
    ({"loads": [[10] * 256] * 57}, r"\(256, 58, 57\)"),
    ({"loads": [[10] * 255] * 58}, r"\(256, 58, 58\)"),
    ({"pairs": [[10] * 31 + [-1]] * 58}, r"has pairs below zero \(-1\)"),
    ({"pairs": "many"}, "is no file of `nanocp experts --json`"),
])  # fmt: skip
def test_a_file_of_another_model_and_impossible_counts_are_refused(tmp_path, changed, named):
    with pytest.raises(ValueError, match=named):
        expert_imbalance(write(tmp_path / "loads.json", **changed), FILE.model, 32)


def test_what_a_service_says_is_read_for_its_instances_and_for_others(tmp_path):
    """One layer is uneven: expert 0 has replicas on two instances, where at home it has one."""
    num, loads = FILE.model.num_moe_layers, [600.0] + [1.0] * 255
    home = [*home_table(256, 32, 1).experts()]
    experts = [*home]
    experts[9 + 8] = 0
    table, of_layers = [experts, *[home] * (num - 1)], [loads, *[[1.0] * 256] * (num - 1)]
    now = ExpertsNow(True, tuple(range(32)), 9, table, of_layers, False, 0, "", {"done": 1})
    said = answer_experts("", 100, lambda: now, None, "")
    path = tmp_path / "experts.json"
    path.write_bytes(said)
    for num_instances, busiest in ((32, 300 + 8), (16, 600 + 15)):
        measured = expert_imbalance(str(path), FILE.model, num_instances)
        hot = busiest * num_instances / sum(loads)
        assert measured == pytest.approx((num - 1 + hot) / num)


def test_the_slowest_instance_has_more_pairs_than_the_mean():
    even, skewed = (
        CostModel(replace(FILE, expert_imbalance=each), "operators")
        .step(Loads([1000] * 32, [64] * 31 + [96], [64] * 31 + [96], [0] * 32, [0] * 32))
        .layer
        for each in (1.0, 2.0)
    )
    costs, mean_rows = FILE.costs_of("operators"), 65
    mflop = 8 * mean_rows * FILE.model.expert_mflop
    assert skewed.expert_us - even.expert_us == pytest.approx(mflop / costs.gemm_tflops)
    per_row = (even.dispatch_combine_us - costs.dispatch_combine_us) / 96
    assert skewed.dispatch_combine_us - even.dispatch_combine_us == pytest.approx(34 * per_row)
