"""How unevenly rows choose experts: drawn, or as a service counted it."""

import json
from dataclasses import replace

import pytest

from nanocp.simulator.costs.cluster_file import load_cluster_file
from nanocp.simulator.costs.cost import CostModel, Loads
from nanocp.simulator.loads.expert_loads import expert_imbalance, expert_shares, with_a_slot_more

FILE = load_cluster_file("h200x32-deepseek-v3")


def write(path, **changed):
    even = {"num_experts": 256, "pairs": [[10] * 32] * 57 + [[10] * 31 + [330]]}
    path.write_text(json.dumps(even | changed))
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
    before, after = with_a_slot_more(256, 8, 32)
    assert before > 2.2 and after < 1.12


@pytest.mark.parametrize(("changed", "named"), [
    ({"num_experts": 128}, r"instances\) \(128, 58, 32\); simulated are \(256, 58, 32\)"),
    ({"pairs": [[10] * 32] * 60}, r"\(256, 60, 32\)"),
    ({"pairs": [[10] * 8] * 58}, r"\(256, 58, 8\)"),
    ({"pairs": [[10] * 31 + [-1]] * 58}, r"has pairs below zero \(-1\)"),
    ({"pairs": "many"}, "is no file of `nanocp experts --json`"),
])  # fmt: skip
def test_a_file_of_another_model_and_impossible_counts_are_refused(tmp_path, changed, named):
    with pytest.raises(ValueError, match=named):
        expert_imbalance(write(tmp_path / "loads.json", **changed), FILE.model, 32)


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
