"""The scheduler's benchmark brings the churn that it says, and judges what it claims."""

import pytest
import scheduler_churn
import scheduler_step
from rich.console import Console
from scheduler_step import ChurnShape, StressPoint
from typer.testing import CliRunner

QUIET = Console(quiet=True)


def result(point, ms):
    return point._asdict() | {"mean_ms": ms, "p50_ms": ms, "p99_ms": ms, "plan_bytes": 1}


@pytest.mark.parametrize("policy", ["dual_balanced", "cost_aware"])
def test_a_step_brings_the_churn_of_each_kind(policy):
    measured = scheduler_step.measure_point(StressPoint(8, 64, policy, 1.0), 40)
    changes = measured["changes_per_step"]
    assert changes["admitted"] == changes["ended"] == 1.0
    assert 0.7 <= changes["re-bound"] <= 1.3 and 0.5 <= changes["outgrown"] <= 1.5
    assert 0 < measured["p50_ms"] <= measured["p99_ms"] and measured["plan_bytes"] > 0
    assert 0 < measured["share_of_step"] < 1


def test_fit_tells_churn_from_instances_and_rows():
    shape = ChurnShape(((32, 256),), (0.5,), (32, 256), 1)
    rest = scheduler_step.at_rest(32, 256, "p")
    few = scheduler_step.at_rest(32, 32, "p").churn_per_step
    points = [
        rest,
        rest._replace(churn_per_step=rest.churn_per_step / 2),
        StressPoint(32, 256, "p", few),
    ]
    # 0.01 ms for each instance, 0.005 ms for each change.
    results = [result(point, 0.32 + 0.005 * 4 * point.churn_per_step) for point in points]
    results.append(result(StressPoint(32, 32, "p", few), 0.2))
    found = scheduler_step.fit(shape, "p", results)
    assert (found.us_per_change, found.us_per_instance) == (5.0, 10.0)
    assert found.rows_ratio == pytest.approx((0.32 + 0.02 * few) / 0.2, abs=1e-3)


def simulated(policy, rows, ms, share=0.001):
    return {
        "policy": policy,
        "load": f"simulated, {rows} rows",
        "mean_ms": ms,
        "share_of_step": share,
    }


@pytest.mark.parametrize(
    ("results", "holds"),
    [
        ([simulated("dual_balanced", 45, 0.2)], True),
        ([simulated("dual_balanced", 45, 0.21)], False),
        ([simulated("cost_aware", 256, 1.25)], True),
        ([simulated("cost_aware", 256, 1.0, share=0.011)], False),
        ([simulated("least_batch", 45, 9.0)], True),
        (
            [result(StressPoint(32, 256, "cost_aware", 13.0), 9.0) | {"load": "stress, 13.0 x 4"}],
            True,
        ),
    ],
)
def test_claims_are_about_the_simulated_load_only(results, holds):
    assert scheduler_step.show_claims(results, {}, QUIET) == holds


def test_a_simulated_load_has_the_churn_of_a_service():
    measured = scheduler_churn.measure(45, "cost_aware", 0.1, 0.6)
    assert 35 <= measured["rows"] <= 55 and measured["load"] == "simulated, 45 rows"
    assert 0 < measured["p50_ms"] <= measured["p99_ms"] and measured["plan_bytes"] > 0
    changes = measured["changes_per_step"]
    # 34 requests a second, about 24 windows a second.
    assert 0.5 <= changes["started"] <= 4 and 0.5 <= changes["ended"] <= 4


def test_unknown_policy_is_named():
    import typer

    app = typer.Typer()
    app.command()(scheduler_step.main)
    found = CliRunner().invoke(app, ["--policy", "dual_balance"])
    assert found.exit_code == 2 and "dual_balance" in found.output
