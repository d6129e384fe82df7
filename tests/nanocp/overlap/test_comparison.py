"""The cost model's numbers are those that the paper prints, and another number would be seen."""

from dataclasses import replace

import pytest

from nanocp.overlap import paper
from nanocp.overlap.comparison import compare
from nanocp.overlap.roofline import MODELS, Machine, Requests, demands


def test_every_number_is_the_papers():
    compared = compare()
    assert {each.table for each in compared} >= {"Figure 2", "Figure 3"}
    assert [each for each in compared if each.holds is False] == []
    other_readings = [each.what for each in compared if each.holds is None]
    assert len(other_readings) == 2, other_readings
    assert len(compared) - len(other_readings) == 103
    assert all(each.holds is None for each in compared if each.paper == "-")


@pytest.mark.parametrize("field", ["gflop", "mem_gb", "compute_ms", "memory_ms"])
def test_a_number_that_is_2_percent_off_is_seen(monkeypatch, field):
    line = paper.TABLE_2[0]
    changed = line._replace(**{field: getattr(line, field) * 1.02 + 0.02})
    monkeypatch.setattr(paper, "TABLE_2", (changed, *paper.TABLE_2[1:]))
    (wrong,) = [each for each in compare() if each.holds is False]
    assert wrong.what.startswith("KQV")


def test_the_optimal_throughput_scales_with_the_parameters():
    machine, model = paper.MACHINE, paper.LLAMA_2_70B
    half = replace(model, num_parameters=35e9)
    assert machine.optimal_tokens_per_s(half) == 2 * machine.optimal_tokens_per_s(model)


def test_one_gpu_moves_nothing_and_no_output_means_no_decode():
    alone = Machine(paper.TABLE_1[3][0], 1)
    by_name = {each.name: each for each in demands(MODELS[1], Requests(512, 1), 512, 1)}
    assert by_name["Net"].net_gb == 0 and alone.times(by_name["Net"]).network_ms == 0
    assert by_name["DecAttn"].gflop < 0.01 * by_name["PfAttn"].gflop
