"""Whole clusters of HashInstances in two lanes: forced, drawn, and off at no cost.

`HASH_SEEDS=1000` plays more of the drawn ones (test_hash_cluster.py).
"""

from dataclasses import replace
from random import Random

import pytest

from control_plane.scheduler.scheduler import Scheduler
from control_plane.scheduler.windows.lanes import Lanes
from harness.hash_clusters import hash_play
from harness.hash_clusters.hash_parts import draw_config
from harness.hash_clusters.kinds.hash_seeds import HashCluster, play
from nanocp.config.cluster import ClusterConfig
from nanocp.config.data_plane import DataPlaneConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.config.whole import Config as ClusterSettings
from nanocp.values.plan import Arrival, InstancePlan


def config(seed: int, lanes: str, **changes: object) -> ClusterSettings:
    drawn = draw_config(Random(seed))
    return replace(drawn, scheduler=replace(drawn.scheduler, lanes=lanes, **changes))


@pytest.mark.parametrize("lanes", ["always", "random"])
def test_every_token_is_right_in_lanes_under_chaos(lanes):
    clusters = [
        play(
            seed,
            config(seed, lanes, policy="chaos", chaos_period_windows=1, growth_promise="tokens:0"),
        )
        for seed in range(300, 304)
    ]
    assert sum(cluster.num_moves for cluster in clusters) > 1
    assert sum(cluster.num_extensions for cluster in clusters) > 5
    assert sum(len(s.output) for cluster in clusters for s in cluster.stories.values()) > 150


def test_models_without_experts_are_right_in_lanes(monkeypatch):
    monkeypatch.setattr(hash_play, "MAX_TURNS", 150_000)
    clusters = [
        HashCluster(seed, config=config(seed, "random", policy="chaos"), has_experts=False)
        for seed in range(320, 323)
    ]
    for cluster in clusters:
        cluster.play()


CLUSTER = ClusterConfig(num_instances=2, num_frames=64)


def plans(num_requests: int, **scheduler: object) -> list[InstancePlan]:
    """The first window's plans of a cluster with so many short requests."""
    arrivals = [
        Arrival(number, 100, 40, needs_prefill=False) for number in range(1, num_requests + 1)
    ]
    plan = Scheduler(CLUSTER, SchedulerConfig(**scheduler)).plan_window(arrivals, now_us=0)
    return list(plan.instances)


def test_rows_are_shared_out_between_the_lanes():
    for plan in plans(12, lanes="always"):
        lanes = [change.lane for change in plan.changes.rows]
        assert plan.two_lanes and lanes.count(0) == lanes.count(1) == 3


def test_links_are_in_the_lane_of_their_row():
    for plan in plans(8, lanes="random", policy="fixed_degree:2", chaos_seed=3):
        lane_of = {change.request_id: change.lane for change in plan.changes.rows}
        assert set(lane_of.values()) == {0, 1} and plan.changes.q_route
        assert all(link.lane == lane_of[link.request_id] for link in plan.changes.q_route)


def test_the_table_of_what_was_measured_decides():
    first, second = "nanoflow", "behind_first"
    table = ((4, 0, 130, first), (16, 0, 80, second), (16, 8, 99, first))
    config = SchedulerConfig(lanes="measured", lane_table=table)
    assert config.lane_orders == (first, second) and SchedulerConfig().lane_orders == (second,)
    sizes = (3, 0), (5, 0), (16, 3), (64, 0)
    assert [config.lane_order(*size) for size in sizes] == [0, 2, 0, 0]
    always = replace(config, lanes="always")
    assert [always.lane_order(*size) for size in sizes] == [1, 2, 1, 1]
    for num_requests, order in ((4, 0), (20, 2)):
        issued = plans(num_requests, lanes="measured", lane_table=table)
        assert [plan.two_lanes for plan in issued] == [order] * 2, "equal on all instances"
    drawn = [Lanes(2, replace(config, lanes="random")).order(at, 1, 1) for at in range(30)]
    assert {*drawn} == {0, 1, 2}
    with pytest.raises(ValueError, match="nanocp profile --overlap writes it"):
        SchedulerConfig(lanes="measured")
    with pytest.raises(ValueError, match="on a GPU it must be exchange"):
        ClusterSettings(
            scheduler=SchedulerConfig(lanes="always"), data_plane=DataPlaneConfig(device="cuda")
        )


def test_without_lanes_all_of_a_plan_is_in_lane_0():
    (plan, _) = plans(4)
    assert not plan.two_lanes
    changes = plan.changes
    assert not any(each.lane for each in (*changes.rows, *changes.q_route, *changes.res_route))


def test_rows_change_lanes_where_those_that_left_made_them_differ():
    """The six rows of lane 1 end; one row for each instance and window goes over."""
    scheduler = Scheduler(ClusterConfig(num_instances=1), SchedulerConfig(lanes="always"))
    arrivals = [
        Arrival(number, 100, 40 if number % 2 else 3, needs_prefill=False)
        for number in range(1, 13)
    ]
    lanes = scheduler._rows._lanes
    scheduler.plan_window(arrivals, now_us=0)
    assert lanes._loads[0] == lanes._loads[1]
    for now_us in range(1, 9):
        scheduler._rows.in_flight.clear()
        scheduler.plan_window([], now_us)
    loads = [load[0] for load in lanes._loads]
    assert len(lanes._places) == 6 and max(loads) <= 2 * min(loads)
