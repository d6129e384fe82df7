"""controller_window.py: real streams of both kinds, and a wait for every window."""

import pytest

from benchmarks.service import controller_window
from benchmarks.service.controller_window import SizedCluster


@pytest.mark.system
@pytest.mark.parametrize("node_streams", [False, True])
def test_every_window_has_a_wait_and_the_controller_a_cost(node_streams, monkeypatch):
    monkeypatch.setattr(controller_window, "NUM_PROCESSES", 2)
    line = controller_window.measure(SizedCluster(16, 45, 20), node_streams)
    assert line["num_windows"] >= 20
    assert 0 < line["wait_ms_p50"] <= line["wait_ms_p99"]
    assert 0 < line["plan_ms"] < line["loop_ms"] <= line["process_ms"]


def test_only_the_sizes_with_a_claim_are_judged():
    line = {"instances": 256, "rows": 256, "streams": "node", "share_p99": 0.5}
    lines = [line, line | {"share_p99": 0.51}, line | {"streams": "instance", "share_p99": 9.0}]
    assert [claim.holds for claim in controller_window.claims(lines)] == [True, False]
