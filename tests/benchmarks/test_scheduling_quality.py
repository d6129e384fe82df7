"""scheduling_quality.py: rates decide its claims, and a quick run has its shape."""

import json
from dataclasses import replace

import pytest

from benchmarks.simulated import scheduling_quality
from benchmarks.simulated.scheduling_claims import POLICIES, RIVALS, claims
from benchmarks.simulated.scheduling_quality import SearchTask, search, take_ready
from nanocp.simulator.costs.cluster_file import load_cluster_file
from nanocp.simulator.loads.workload import Workload
from nanocp.simulator.outcome import Slo
from nanocp.simulator.trial import Trial

FILE = load_cluster_file("h200x32-deepseek-v3")
RATES = dict.fromkeys(POLICIES, 10.0) | {"dual_balanced": 13.0, "cost_aware": 17.25, "fluid": 20.7}


def num_missed(results):
    return sum(claim.holds is False for claim in claims(results))


@pytest.mark.parametrize(("key", "change", "num_broken"), [
    ("issue-1", {}, 0),
    ("issue-1@peak", {"dual_balanced": 17.0}, 0),
    ("issue-1@peak", {"fluid": 99.0}, 0),
    ("issue-1", {"fluid": 20.8}, 1),
    ("issue-1", {"dual_balanced": 15.1}, 1),
    ("issue-5", {"dual_balanced": 14.0}, 1),
    ("issue-5", {"uniform_cp:4": 12.9}, 1),
    ("issue-5@peak", {"uniform_cp:2": 17.8}, 1),
    ("issue-0", {"least_cache": 17.8}, 1),
    ("issue-100", {"uniform_cp:8": 17.6}, 0),
    ("mooncake", {"least_batch": 14.4}, 1),
    ("mooncake-x8", {"uniform_cp:8": 17.8, "fluid": 99.0}, 1),
])  # fmt: skip
def test_a_claim_that_the_rates_do_not_bear_is_broken(key, change, num_broken):
    assert num_missed({"max_rate": {key: RATES | change}}) == num_broken


def test_what_was_not_measured_is_shown_and_not_judged():
    found = list(claims({"max_rate": {"issue-1": {"fluid": 30.0, "cost_aware": 29.0}}}))
    assert [claim.holds for claim in found] == [None, True, None, None]
    assert str(found[0]).startswith("cannot be judged here (not measured): issue-1: cost_aware / ")


@pytest.mark.parametrize(
    ("fails_at", "num_broken"), [({}, 0), ({"least_cache": 17.8}, 1), ({"dual_balanced": 15.1}, 1)]
)
def test_a_rate_at_which_a_rival_fails_is_as_good_as_its_highest(fails_at, num_broken):
    rates = {"issue-1": {"cost_aware": 17.25}}
    fails_at = dict.fromkeys(RIVALS, 12.7) | {"dual_balanced": 15.0} | fails_at
    results = {"max_rate": rates, "fails_at": {"issue-1": fails_at}}
    assert num_missed(results) == num_broken


@pytest.mark.parametrize(
    ("cpu_s", "num_rows", "holds"),
    [(7_200.0, 6, True), (7_200.0, 5, None), (7_201.0, 6, False), (7_201.0, 5, False)],
)
def test_more_than_an_hour_on_two_cores_breaks_a_claim(cpu_s, num_rows, holds):
    rows = {f"issue-0@{number}": RATES for number in range(num_rows)}
    *others, minutes = claims({"max_rate": rows, "cpu_s": {"issue-0": {"fluid": cpu_s}}})
    assert minutes.holds is holds and "minutes" in minutes.sentence
    assert all(claim.holds for claim in others)


@pytest.mark.system
def test_a_quick_run_writes_rates_by_workload_and_policy(tmp_path, capsys):
    path = tmp_path / "quality.json"
    flags = ["--quick", "--policy", "fluid", "--policy", "dual_balanced"]
    flags += ["--processes", "1", "--json", str(path)]
    with pytest.raises(SystemExit) as ended:
        scheduling_quality.main(flags)
    printed = capsys.readouterr().out
    assert ended.value.code == 0
    assert "holds" not in printed, "nothing is judged"
    assert "issue-1, dual_balanced: only" in printed, "misses that were allowed"
    results = json.loads(path.read_text())
    rates = results["max_rate"]["issue-1"]
    assert rates["fluid"] > rates["dual_balanced"] > 0
    for name in ("ttft_ms_p99", "tpot_ms_p99", "normalized_ms_p99", "num_judged", "num_missed"):
        assert set(results[name]["issue-1"]) == {"fluid", "dual_balanced"}

    path.write_text(json.dumps({"max_rate": {"issue-1": {"dual_balanced": 1.0}}}))
    with pytest.raises(SystemExit):
        scheduling_quality.main([*flags, "--resume"])
    resumed = json.loads(path.read_text())
    assert list(resumed["max_rate"]["issue-1"]) == ["fluid", "dual_balanced"], (
        "in the order of the policies"
    )
    assert resumed["max_rate"]["issue-1"] == {"fluid": rates["fluid"], "dual_balanced": 1.0}
    assert set(resumed["cpu_s"]["issue-1"]) == {"fluid"}, "what is known is not searched for again"


def task_of(policy, key="issue-1"):
    name, _, constants = key.partition("@")
    workload = Workload(name, 25.0)
    trial = Trial(FILE, policy, workload, constants=constants)
    return SearchTask(name, trial, 3, 1.02)


def test_a_search_begins_at_the_rate_of_a_neighbour():
    task = task_of("cost_aware")
    rates = {}
    results = {"max_rate": rates, "rates_by_seed": {}}
    assert task.near(results).trial == task.trial
    rates["issue-1"] = {"fluid": 38.0, "least_cache": 0.0}
    assert task.near(results).trial.workload.rate_per_s == 38.0, "of another policy of the row"


def test_a_rival_is_asked_whether_it_sustains_what_would_break_a_claim():
    rows = {"issue-1": {"cost_aware": 23.0}, "issue-1@peak": {"cost_aware": 46.0}}
    results = {"max_rate": rows, "rates_by_seed": {"issue-1@peak": {"cost_aware": [45, 46, 47]}}}
    assert task_of("dual_balanced").near(results).bounds == pytest.approx([20.0] * 3)
    assert task_of("least_batch").near(results).bounds == (23.0,) * 3
    assert task_of("dual_balanced", "issue-1@peak").near(results).bounds == (45, 46, 47)
    assert task_of("least_batch", "issue-0").near(results).bounds == (), "search for it"
    assert task_of("fluid").near(results).bounds == ()


def test_a_policy_is_searched_for_only_if_it_sustains_its_bound():
    workload = Workload("fixed:1000:50", 10.0, seed=1)
    times = {"warm_up_us": 1_000_000, "measure_us": 6_000_000}
    trial = Trial(
        replace(FILE, cluster=replace(FILE.cluster, max_model_len=8192)).of_size(8), "fluid",
        workload, constants="fitted", slo=Slo(tpot_us=25_000), **times,
    )  # fmt: skip
    assert search(SearchTask("fixed", trial, 1, 1.1, bounds=(40.0,))).found is None
    assert search(SearchTask("fixed", trial, 1, 1.1, bounds=(20.0,))).found.rate_per_s > 20 / 1.1


def test_rivals_wait_for_their_rows_cost_aware():
    first, rival, fluid = map(task_of, ("cost_aware", "dual_balanced", "fluid"))
    missing = [rival, fluid, first]
    assert take_ready(missing, []) is fluid
    assert take_ready(missing, []) is first
    assert take_ready(missing, [first]) is None
    assert take_ready(missing, []) is rival


def test_the_traces_workloads_need_the_trace(capsys):
    with pytest.raises(SystemExit) as ended:
        scheduling_quality.main(["--workload", "mooncake"])
    assert ended.value.code == 2 and "mooncake needs the trace" in capsys.readouterr().err
