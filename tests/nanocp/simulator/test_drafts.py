"""Drafts in a simulated cluster: what a step with them takes, who chooses, what rows get."""

import pytest

from control_plane.scheduler.invariants import check
from harness.exact.settings import configured
from nanocp.simulator.costs.cluster_file import load_cluster_file
from nanocp.simulator.costs.cost import CostModel, Loads
from nanocp.simulator.drafted_rows import Speculation, come
from nanocp.simulator.loads.workload_request import WorkloadRequest
from nanocp.simulator.outcome import Run
from nanocp.simulator.simulation import Mechanisms, make_simulation

KIMI = load_cluster_file("h200x32-kimi-k2")
SMALL = configured(KIMI, num_instances=8, num_frames=512, max_model_len=30_000)


def run(text="", num_requests=60, over_run=0):
    """A simulation of requests that arrive every 20 ms, and its outcome; text: the drafts."""
    speculation = Speculation.read(text) if text else None
    simulation = make_simulation(
        SMALL, "fitted", "cost_aware", Run(0, 10**12), Mechanisms(speculation=speculation)
    )
    given = (
        WorkloadRequest(20_000 * i, 300 + 97 * i % 2000, 50 + 13 * i % 90, 150 + over_run)
        for i in range(num_requests)
    )
    return simulation, simulation.run(given)


def loads(rows, tokens_each=4096):
    return Loads([rows * tokens_each] * 32, [rows] * 32, [rows] * 32, [0] * 32, [0] * 32)


@pytest.mark.parametrize(("name", "rows", "break_even"), [
    ("h200x32-deepseek-v3", 2, 0.15),
    ("h200x32-deepseek-v3", 64, 0.80),
    ("h200x32-kimi-k2", 8, 0.26),
    ("h200x32-glm-4.5", 32, 0.33),
])  # fmt: skip
def test_a_draft_costs_little_with_few_rows_and_most_with_128_heads(name, rows, break_even):
    """The share of drafts that must be right, for one draft to win anything."""
    model = CostModel(load_cluster_file(name), "fitted")
    ratio = model.step_with_drafts(loads(rows), 1).step_us / model.step(loads(rows)).step_us
    assert ratio - 1 == pytest.approx(break_even, abs=0.01)


def test_a_cluster_with_drafts_weighs_the_exchange_by_what_attention_takes_then():
    v3 = CostModel(load_cluster_file("h200x32-deepseek-v3"), "fitted")
    kimi = CostModel(KIMI, "fitted")
    assert v3.in_tokens(1).exchange_tokens == pytest.approx(
        v3.in_tokens().exchange_tokens / 2, 0.01
    )
    assert kimi.in_tokens(1).exchange_tokens > 0.85 * kimi.in_tokens().exchange_tokens


@pytest.mark.parametrize("how", ["", ":always"])
def test_every_row_gets_its_tokens_and_no_more(how):
    simulation, outcome = run(f"2:.8,.6{how}")
    check(simulation.scheduler)
    assert not simulation._requests and not simulation._num_tokens and outcome.num_judged == 60
    free = [load.frames_free for load in simulation.scheduler.requests.loads()]
    assert free == [simulation.scheduler._state.cluster.num_frames] * 8
    assert free[0] < SMALL.cluster.num_frames, "each frame has one layer more"


def test_time_per_token_falls_with_drafts_that_are_right_and_rises_by_little_with_others():
    """Where drafts are hardly ever right few are tried."""
    tpot = {text: run(text)[1].tpot_ms_p50 for text in ("", "1:.85", "1:0", "1:0:always")}
    assert tpot["1:.85"] < 0.75 * tpot[""]
    assert tpot["1:0"] < 1.02 * tpot[""] and 1.05 * tpot[""] < tpot["1:0:always"]


def test_what_a_row_gets_is_drawn_alike_in_every_run():
    counts = [[0, 0], [0, 0]]
    came = [come((0.8, 0.5), 7, 100 * step, 4, 1000, counts) for step in range(500)]
    assert came == [
        come((0.8, 0.5), 7, 100 * step, 4, 1000, [[0, 0], [0, 0]]) for step in range(500)
    ]
    assert counts[0][1] / counts[0][0] == pytest.approx(0.8, abs=0.05)
    assert counts[1][0] == counts[0][1] and counts[1][1] / counts[1][0] == pytest.approx(
        0.5, abs=0.05
    )
    assert come((1.0, 1.0), 7, 0, 4, 5, [[0, 0], [0, 0]]) == (5, 1)


@pytest.mark.parametrize("text", ["", "1", "0:.5", "1:1.5", "1:.5,.4", "x:.5", "1:.5:never"])
def test_what_is_no_speculation_is_refused(text):
    with pytest.raises(ValueError, match=r"speculate is .*; it must be the number of drafts"):
        Speculation.read(text)
    assert Speculation.read("3:.9,.5").shares == (0.9, 0.5, 0.5)
