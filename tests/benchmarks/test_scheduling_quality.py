"""benchmarks/scheduling_quality.py: rates decide its claims, and a quick run has its shape."""

import json

import pytest
import scheduling_quality
import typer
from rich.console import Console
from scheduling_quality import POLICIES, SearchTask, judge
from typer.testing import CliRunner

from nanocp.simulator.cluster_file import load_cluster_file
from nanocp.simulator.trial import Trial
from nanocp.simulator.workload import Workload

QUIET = Console(quiet=True)
RATES = dict.fromkeys(POLICIES, 10.0) | {"dual_balanced": 15.0, "cost_aware": 17.25, "fluid": 18.7}


@pytest.mark.parametrize(
    ("key", "change", "num_broken"),
    [
        ("issue-1", {}, 0),
        ("issue-1@peak", {"dual_balanced": 17.0}, 0),
        ("issue-1@peak", {"fluid": 18.8}, 1),
        ("issue-1", {"cost_aware": 17.2}, 1),
        ("issue-5", {"cost_aware": 17.2}, 1),
        ("issue-5", {"fluid": 19.2}, 1),
        ("issue-5@peak", {"uniform_cp:2": 17.8}, 1),
        ("issue-5@peak/absorbed", {"fluid": 18.8}, 1),
        ("issue-1/absorbed", {"dual_balanced": 15.1}, 1),
        ("issue-0", {"least_cache": 17.8}, 1),
        ("issue-100", {"uniform_cp:8": 17.7}, 0),
        ("mooncake-x8", {"uniform_cp:8": 17.8, "fluid": 99.0}, 1),
    ],
)
def test_a_claim_that_the_rates_do_not_bear_is_broken(key, change, num_broken):
    assert judge({"max_rate": {key: RATES | change}}, QUIET) == num_broken


def test_what_was_not_measured_is_not_judged():
    assert judge({"max_rate": {"issue-1": {"fluid": 30.0, "cost_aware": 29.0}}}, QUIET) == 0


@pytest.mark.parametrize(("cpu_s", "num_broken"), [(10_800.0, 0), (10_801.0, 1)])
def test_a_run_of_more_than_90_minutes_on_two_cores_breaks_a_claim(cpu_s, num_broken):
    assert judge({"max_rate": {}, "cpu_s": {"issue-1": {"fluid": cpu_s}}}, QUIET) == num_broken


@pytest.mark.system
def test_a_quick_run_writes_rates_by_workload_and_policy(tmp_path):
    app = typer.Typer()
    app.command()(scheduling_quality.main)
    path = tmp_path / "quality.json"
    flags = [
        "--quick",
        "--policy",
        "fluid",
        "--policy",
        "dual_balanced",
        "--processes",
        "1",
        "--json",
        str(path),
    ]
    result = CliRunner().invoke(app, flags)
    assert result.exit_code == 0
    assert "holds" not in result.output, "nothing is judged"
    assert "issue-1, dual_balanced: only" in result.output, "misses that were allowed"
    results = json.loads(path.read_text())
    assert (
        results["max_rate"]["issue-1"]["fluid"]
        > results["max_rate"]["issue-1"]["dual_balanced"]
        > 0
    )
    for name in ("ttft_ms_p99", "tpot_ms_p99", "normalized_ms_p99", "num_judged", "num_missed"):
        assert set(results[name]["issue-1"]) == {"fluid", "dual_balanced"}

    path.write_text(json.dumps({"max_rate": {"issue-1": {"dual_balanced": 1.0}}}))
    assert CliRunner().invoke(app, [*flags, "--resume"]).exit_code == 0
    resumed = json.loads(path.read_text())
    assert list(resumed["max_rate"]["issue-1"]) == ["fluid", "dual_balanced"], (
        "in the order of the policies"
    )
    assert resumed["max_rate"]["issue-1"] == {
        "fluid": results["max_rate"]["issue-1"]["fluid"],
        "dual_balanced": 1.0,
    }
    assert set(resumed["cpu_s"]["issue-1"]) == {"fluid"}, "what is known is not searched for again"


def test_a_search_begins_at_the_rate_of_a_neighbour():
    trial = Trial(
        load_cluster_file("h200x32-deepseek-v3"),
        "cost_aware",
        Workload("issue-1", 25.0),
        wire_form="absorbed",
    )
    task = SearchTask("issue-1", trial, 1, 1.02)
    rates = {"issue-1/absorbed": {"fluid": 38.0, "least_cache": 0.0}}
    assert task.near({}).trial == trial
    assert task.near(rates).trial.workload.rate_per_s == 38.0, "of another policy of the row"
    rates["issue-1"] = {"cost_aware": 34.0}
    assert task.near(rates).trial == trial.at_rate(34.0), "of the policy in another wire form"


def test_the_traces_workloads_need_the_trace():
    app = typer.Typer()
    app.command()(scheduling_quality.main)
    result = CliRunner().invoke(app, ["--workload", "mooncake"])
    assert result.exit_code == 2
    assert "mooncake needs the trace" in " ".join(result.output.replace("\u2502", " ").split())
