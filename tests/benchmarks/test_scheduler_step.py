"""The brain's benchmark brings the churn that it says, and judges what it claims."""

import pytest
import scheduler_step
from rich.console import Console
from scheduler_step import Fit, Point, Shape
from typer.testing import CliRunner

QUIET = Console(quiet=True)


def result(point, ms):
    return point._asdict() | {"mean_ms": ms, "p50_ms": ms, "p99_ms": ms, "plan_bytes": 1}


@pytest.mark.parametrize("policy", ["dual_balanced", "cost_aware"])
def test_a_step_brings_the_churn_of_each_kind(policy):
    measured = scheduler_step.measure_point(Point(8, 64, policy, 1.0), 40)
    changes = measured["changes_per_step"]
    assert changes["admitted"] == changes["ended"] == 1.0
    assert 0.7 <= changes["re-bound"] <= 1.3 and 0.5 <= changes["outgrown"] <= 1.5
    assert 0 < measured["p50_ms"] <= measured["p99_ms"] and measured["plan_bytes"] > 0
    assert 0 < measured["share_of_step"] < 1


def test_fit_tells_churn_from_instances_and_rows():
    shape = Shape(((32, 256),), (0.5,), (32, 256), 1)
    rest = scheduler_step.at_rest(32, 256, "p")
    few = scheduler_step.at_rest(32, 32, "p").churn_per_step
    points = [rest, rest._replace(churn_per_step=rest.churn_per_step / 2), Point(32, 256, "p", few)]
    # 0.01 ms for each instance, 0.005 ms for each change.
    results = [result(point, 0.32 + 0.005 * 4 * point.churn_per_step) for point in points]
    results.append(result(Point(32, 32, "p", few), 0.2))
    found = scheduler_step.fit(shape, "p", results)
    assert (found.us_per_change, found.us_per_instance) == (5.0, 10.0)
    assert found.rows_ratio == pytest.approx((0.32 + 0.02 * few) / 0.2, abs=1e-3)


def test_claims_look_at_the_claimed_points_at_rest():
    point = scheduler_step.at_rest(32, 256, "dual_balanced")
    slow = [
        result(point, 0.6),
        result(point._replace(churn_per_step=1.0), 9.0),
        result(Point(32, 128, "x", 1.0), 9.0),
    ]
    assert [claim[2:] for claim in scheduler_step.claims(slow, {})] == [(0.6, 0.5)]
    assert not scheduler_step.show_claims(slow, {}, QUIET)
    assert scheduler_step.show_claims(
        [result(point, 0.4)], {"dual_balanced": Fit(5.0, 10.0, 1.2)}, QUIET
    )
    assert not scheduler_step.show_claims(
        [result(point, 0.4)], {"dual_balanced": Fit(5.0, 10.0, 1.6)}, QUIET
    )


def test_unknown_policy_is_named():
    import typer

    app = typer.Typer()
    app.command()(scheduler_step.main)
    found = CliRunner().invoke(app, ["--policy", "dual_balance"])
    assert found.exit_code == 2 and "dual_balance" in found.output
