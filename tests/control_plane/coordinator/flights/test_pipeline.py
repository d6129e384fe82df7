"""Bubbles of stages by cause: the waits that stages report, of a pipeline that rests or not."""

import pytest
from prometheus_client import CollectorRegistry

from control_plane.coordinator.flights.pipeline import PipelineFlights
from control_plane.observe.metrics.stages import StageMetrics
from control_plane.ports.controller_interface import Submission
from harness.exact.settings import configured
from nanocp.cli.operate.top import _stages
from nanocp.config.cluster import ClusterConfig
from nanocp.config.whole import Config
from nanocp.values.members import Member
from nanocp.values.passes import WAIT_CAUSES, LayersMoved
from nanocp.values.plan import Arrival, WindowDone


class Sent:
    """Members that take every message."""

    def send(self, member, message):
        """Nothing."""


def test_a_wait_for_a_pass_is_a_bubble_only_while_one_is_in_flight():
    registry = CollectorRegistry()
    config = Config(cluster=ClusterConfig(num_instances=2, layout="pipeline"))
    flights = PipelineFlights(config, Sent(), 4, StageMetrics(registry, 2))
    submission = Submission(Arrival(1, 10, 9), [5] * 10)
    assert [one["waits"] for one in flights.stages.now()] == [{}, {}]
    assert all("waits" not in str(line) for line in _stages(flights.stages.now()))
    for number in range(2):
        events = [submission.event(0)] if number == 0 else []
        plan = flights.plan(events, 0)
        assert plan.window == number
        list(flights.prepare(plan, {1: submission}))
        flights.send(plan)

    def ran(stage, number, *waits_us):
        busy_us, waited_us = 600, sum(waits_us[:3])
        done = WindowDone(stage, number, (), busy_us + waited_us, waited_us, waits_us=waits_us)
        assert flights.window_done(done) is (stage == 1)

    # The pipeline rested before pass 0, and not before pass 1.
    ran(0, 0, 0, 0, 0, 9_000_000)
    ran(0, 1, 0, 300, 0, 100)
    ran(1, 0, 500, 0, 0, 9_000_000)
    ran(1, 1, 100, 0, 200, 0)
    first, last = (one["waits"] for one in flights.stages.now())
    assert first == pytest.approx({"fill": 0, "tail": 300 / 1600, "kv": 0, "work": 100 / 1600})
    assert last == pytest.approx({"fill": 600 / 2000, "tail": 0, "kv": 200 / 2000, "work": 0})
    for cause, stage, seconds in (("work", 0, 1e-4), ("work", 1, 0), ("fill", 1, 6e-4)):
        labels = {"engine": str(stage), "cause": cause}
        assert registry.get_sample_value(
            "nanocp:stage_wait_seconds_total", labels
        ) == pytest.approx(seconds)
    shown = str(_stages(flights.stages.now())[2])
    assert "it waits 30% for rows, 0% for tokens, 10% for moved layers, 0% for a pass" in shown


def test_a_stage_that_reports_layers_which_nobody_moves_is_refused():
    config = configured(num_instances=2, layout="pipeline", layer_policy="chaos_layers")
    flights = PipelineFlights(config, Sent(), 4, StageMetrics(CollectorRegistry(), 2))
    submission, moves = Submission(Arrival(1, 10, 90), [5] * 10), None
    events = [submission.event(0)]
    with pytest.raises(ValueError, match="stage 1 reported layers 1, which nobody moves"):
        flights.reported(Member("instance", 1), LayersMoved(1, 1))
    for number in range(40):
        plan, events = flights.plan(events, 0), []
        list(flights.prepare(plan, {1: submission}))
        flights.send(plan)
        for stage in range(2):
            done = WindowDone(stage, number, waits_us=(0,) * len(WAIT_CAUSES))
            flights.window_done(done)
            events.append(done)
        if plan.layer_moves is not None:
            moves = plan.layer_moves.number
            break
    assert moves == 1, "the policy moves no layer"
    moved = LayersMoved(0, moves)
    assert flights.reported(Member("instance", 0), moved) == moved
    for stage, number in ((0, moves), (1, moves + 1)):
        with pytest.raises(ValueError, match=f"stage {stage} reported layers {number}, which"):
            flights.reported(Member("instance", stage), LayersMoved(stage, number))
