"""Clusters side by side: one is the cluster itself, several share the load, and repeat exactly."""

from dataclasses import replace

import pytest

from benchmarks.simulated.plan_load import all_sustained
from harness.programs.command_line import nanocp
from nanocp.simulator.analyser import groups
from nanocp.simulator.analyser.groups import play_groups
from nanocp.simulator.costs.cluster_file import load_cluster_file
from nanocp.simulator.loads.workload import Workload
from nanocp.simulator.loads.workload_request import WorkloadRequest
from nanocp.simulator.trial import Trial
from nanocp.values.group_load import GroupLoad
from nanocp.values.plan import InstanceLoad

FILE = load_cluster_file("h200x32-deepseek-v3", 16)


def trial(rate, name="issue-5"):
    workload = Workload(name, rate, seed=3)
    return Trial(FILE, "cost_aware", workload, warm_up_us=500_000, measure_us=4_000_000)


def told(outcome):
    """All of an outcome but the processor's time."""
    return replace(outcome, plan_ms_mean=0, plan_share=0)


def test_one_group_is_the_cluster_itself():
    (alone,) = play_groups(trial(6.0), 1)
    assert told(alone) == told(trial(6.0).filled().play()) and alone.num_not_judged


def test_groups_repeat_and_a_router_with_newer_numbers_is_no_worse():
    found = [list(map(told, play_groups(trial(24.0), 3, stale_us))) for stale_us in (200_000,) * 2]
    assert found[0] == found[1]
    kv = [one.kv_tokens_mean for one in found[0]]
    assert max(kv) < 1.3 * sum(kv) / 3, "the load is shared"


def test_a_group_that_fails_is_not_silent(monkeypatch):
    def fail(self, requests):
        for _ in requests:
            raise RuntimeError("it broke")

    monkeypatch.setattr("nanocp.simulator.simulation.Simulation.run", fail)
    with pytest.raises(RuntimeError, match="it broke"):
        play_groups(trial(6.0), 2)


def test_a_group_that_gets_nothing_goes_on_in_time():
    """A long request ends on one of two groups, and the router sees it."""
    long = WorkloadRequest(0, 400_000, 20, 20)
    short = [WorkloadRequest(200_000 * i, 50, 2, 2) for i in range(1, 30)]
    load = Workload("log", 5.0, given=(long, *short))
    here = replace(trial(5.0), workload=load, measure_us=6_000_000, begins_empty=True)
    outcomes = play_groups(here, 2, stale_us=500_000)
    assert min(outcome.num_judged for outcome in outcomes) >= 5


def test_all_groups_together_meet_the_slo_or_do_not():
    good = replace(
        trial(2.0).filled().play(), num_judged=1000, num_missed=0, drift=0.0, is_drifting=False
    )
    assert all_sustained([good, replace(good, num_missed=19)])
    assert not all_sustained([good, replace(good, num_missed=21)])
    assert not all_sustained([good, replace(good, is_drifting=True, drift=0.5)])
    assert all_sustained([good, replace(good, is_drifting=True, drift=-0.5)])
    assert not all_sustained([replace(good, num_judged=0)])


def test_the_load_of_a_group():
    loads = [
        InstanceLoad(1000, 3, 10, 0, 5),
        InstanceLoad(0, 1, 7, 1, 0),
        InstanceLoad(0, 0, 0, 0, 0),
    ]
    found = GroupLoad.of(loads, max_rows=8, row_tokens=50)
    assert found == GroupLoad(1000, 17 * 64, 4, 12, 600.0), "a seat that serves nothing is left out"
    assert found.longest_prompt(10_000) == 17 * 64 and found.longest_prompt(500) == 500
    assert GroupLoad.of(loads, max_rows=2, row_tokens=0).longest_prompt(500) == 0, "no row is free"


def test_the_command_has_a_column_for_each_group(monkeypatch):
    monkeypatch.setattr(groups, "STALE_US", 100_000)
    words = ("simulate", "--rate", 6, "--set", "groups=2", "--set", "instances=16", "--seconds", 2)
    result = nanocp(*words, "--set", "warm_up=0.2", "--workload", "issue-0")
    assert "cost_aware, group 2" in " ".join(result.stdout.split()), result.output
    refused = nanocp(*words, "--policy", "fluid")
    assert refused.exit_code == 2 and "groups is not for policy fluid" in refused.output
