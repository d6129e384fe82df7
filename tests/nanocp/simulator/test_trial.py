"""Trials: how full a cluster is when one begins."""

from dataclasses import replace
from statistics import fmean

import pytest

from nanocp.simulator.costs.cluster_file import load_cluster_file
from nanocp.simulator.loads.workload import Workload
from nanocp.simulator.outcome import measure_us_at
from nanocp.simulator.trial import Trial

H200 = load_cluster_file("h200x32-deepseek-v3")
FOUR = replace(
    H200,
    model=replace(H200.model, num_experts=32),
    cluster=replace(H200.cluster, num_instances=4, instances_per_node=4),
    cp_degrees=(1, 2, 4),
)


@pytest.mark.parametrize("policy", ["cost_aware", "least_batch", "fluid"])
def test_a_trial_begins_as_full_as_it_stays(policy):
    ratios = []
    for seed in range(3):
        trial = Trial(FOUR, policy, Workload("issue-0", 4.0, seed), measure_us=60_000_000)
        filled = trial.filled()
        outcome = filled.play()
        ratios.append(1e3 * outcome.tpot_ms_p50 / filled.workload.steady_tpot_us)
        assert not outcome.is_drifting and outcome.num_not_judged > 0
        # Running requests were there at once: nothing was transferred for them.
        assert outcome.ttft_ms_p99 < 200
    assert fmean(ratios) == pytest.approx(1, rel=0.1)


def test_a_trial_that_begins_empty_or_static_is_left_alone():
    for trial in (
        Trial(FOUR, "least_batch", Workload("issue-0", 4.0), begins_empty=True),
        Trial(FOUR, "least_batch", Workload("static-1", 4.0)),
    ):
        assert trial.filled() is trial
    assert trial.run.measure_us == 60_000_000
    assert measure_us_at(100.0) == 60_000_000 and measure_us_at(2.0) == 1_100_000_000
