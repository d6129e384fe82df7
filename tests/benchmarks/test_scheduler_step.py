"""The scheduler's benchmark brings the churn that it says, and judges what it claims."""

import pytest

from benchmarks.service import scheduler_step


def simulated(policy, rows, ms, share=0.001):
    return {
        "policy": policy, "load": f"simulated, {rows} rows", "mean_ms": ms, "share_of_step": share,
    }  # fmt: skip


@pytest.mark.parametrize(("result", "holds"), [
    (simulated("dual_balanced", 45, 0.30), [True]),
    (simulated("dual_balanced", 45, 0.31), [False]),
    (simulated("cost_aware", 256, 1.25), [True, True]),
    (simulated("cost_aware", 256, 1.0, share=0.011), [True, False]),
    (simulated("least_batch", 45, 9.0), []),
])  # fmt: skip
def test_claims_are_of_two_policies(result, holds):
    assert [claim.holds for claim in scheduler_step.claims([result])] == holds


def test_a_simulated_load_has_the_churn_of_a_service():
    measured = scheduler_step.measure(45, "cost_aware", 0.1, 0.6)
    assert 35 <= measured["rows"] <= 55 and measured["load"] == "simulated, 45 rows"
    assert 0 < measured["p50_ms"] <= measured["p99_ms"] and measured["plan_bytes"] > 0
    changes = measured["changes_per_step"]
    # 34 requests a second, about 24 windows a second.
    assert 0.5 <= changes["started"] <= 4 and 0.5 <= changes["ended"] <= 4


def test_unknown_policy_is_named(capsys):
    with pytest.raises(SystemExit) as ended:
        scheduler_step.main(["--policy", "dual_balance"])
    assert ended.value.code == 2 and "dual_balance" in capsys.readouterr().err
