"""The paper's figures: every picture and claim from few short runs; the claims' arithmetic."""

import pytest

from benchmarks.simulated import paper_figures
from benchmarks.simulated.paper_figures import Figures, Plans


@pytest.mark.system
def test_every_picture_and_claim_comes_from_the_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(paper_figures, "STATIC", {"static-1": 1, "static-7": 7})
    monkeypatch.setattr(paper_figures, "UNIFORM", ("uniform_cp:8",))
    monkeypatch.setattr(paper_figures, "COMPARED", {"issue-0": 20.0, "issue-1": 10.0})
    monkeypatch.setattr(paper_figures, "ROWS", (16, 32))
    monkeypatch.setattr(paper_figures, "STEADY_TPOT_US", 15_000)
    rates = {"issue-0": (20.0,), "issue-1": (10.0,), "issue-100": (0.4,)}
    plan = Plans(0.2, 0.5, rates, ("least_batch", "least_cache", "uniform_cp:8"))
    figures = Figures(
        plan, dict(paper_figures.play(task) for task in dict.fromkeys(plan.tasks())), tmp_path
    )
    figures.draw()
    assert sorted(path.stem for path in tmp_path.iterdir()) == [
        "figure_12_rates", "figure_13_static", "figure_14_balance", "figure_14_queue",
        "figure_15_layers", "figure_16_scheduler", "figure_18_cp", "latency",
    ]  # fmt: skip
    assert {claim.figure for claim in figures.claims} == {
        "12", "13", "14", "5c, 14", "15", "16", "18",
    }  # fmt: skip
    # This one holds in any run, however short: it follows from the policies.
    holds = {claim.claim: claim.holds for claim in figures.claims}
    assert holds["smallest attention of the slowest instance"]


@pytest.mark.parametrize(("points", "most"), [
    ([(10, 1.0), (20, 0.99), (30, 0.98), (40, 1.0)], 20),
    ([(10, 0.5), (20, 1.0)], 0),
    ([(10, 1.0), (20, 1.0)], 20),
])  # fmt: skip
def test_the_rate_sustained_is_the_last_before_a_miss(points, most):
    assert paper_figures.most_sustained(points) == most
