"""cost_aware proposes what raises the convex cost least, never what no bound will ever allow."""

from dataclasses import replace
from random import Random

import pytest

from control_plane.scheduler.policies.cost_aware import CostAware
from control_plane.scheduler.state.cluster_state import ClusterState
from harness.hash_clusters.followed_tables import FollowedScheduler
from nanocp.config.cluster import ClusterConfig
from nanocp.config.cost import CostConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.simulator.costs.cluster_file import load_cluster_file
from nanocp.simulator.costs.cost import CostModel

TWO_NODES = ClusterConfig(
    num_instances=8, instances_per_node=4, num_frames=1024, max_model_len=262_144
)
COSTS = CostConfig(
    exchange_tokens=1000,
    exchange_tokens_between_nodes=1000,
    link_tokens=100,
    link_tokens_between_nodes=500,
    dispatch_tokens_per_row=200,
)


def make_scheduler(cluster=TWO_NODES, costs=COSTS, policy="cost_aware"):
    buckets = ((2000, 1),)
    return FollowedScheduler(
        cluster, policy=policy, costs=costs, cp_degree_buckets=buckets, cp_degree_max=4
    )


def test_short_requests_stay_on_one_instance_and_level_both_rows_and_kv():
    scheduler = make_scheduler()
    random = Random(1)
    scheduler.arrive_all(*(random.randrange(10, 1900) for _ in range(240)))
    assert all(scheduler.placement(i).cp_degree == 1 for i in range(1, 241))
    rows, kv_tokens = scheduler.loads("num_rows"), scheduler.loads("kv_tokens")
    assert max(rows) - min(rows) <= 8
    assert max(kv_tokens) <= 1.05 * sum(kv_tokens) / 8


@pytest.mark.parametrize("form", ["latent", "absorbed"])
def test_the_load_of_an_instance_has_the_exchange_that_the_cost_model_charges(form):
    """The slow reference is the simulator's: microseconds of links, some of them between nodes."""
    model = CostModel(load_cluster_file("h200x32-deepseek-v3"), "fitted", wire_form=form)
    us_per_token = model.attention_us(1_000_001, 1) - model.attention_us(1_000_000, 1)
    policy = CostAware(SchedulerConfig(policy="cost_aware", costs=model.in_tokens()))
    state = ClusterState(TWO_NODES)
    for kv_binding in ((0, 1), (0, 1, 5), (0, 5, 6)):
        state.committed.count_row(0, kv_binding, +1)
    for instance, num_links, num_far in ((1, 2, 0), (5, 2, 2), (6, 1, 1)):
        exchange_us = model.exchange_us(num_links, num_far, num_links)
        assert policy._load(state, instance) * us_per_token == pytest.approx(exchange_us, rel=0.01)
    state.committed.rebind((0, 5, 6), 0, 5)
    state.committed.count_links(0, (5,), -1)
    assert state.committed.far_to[:1] + state.committed.far_to[5:7] == [1, 0, 0]
    assert state.committed.far_from[0] == 0 and state.committed.far_from[5] == 1


def test_a_long_request_goes_round_a_loaded_instance():
    """Two nodes, and links between them dear: the second goes where the first is not."""
    scheduler = make_scheduler(costs=replace(COSTS, exchange_tokens_between_nodes=1_000_000))
    scheduler.arrive_all(30_000)
    first = scheduler.placement(1)
    assert first.cp_degree == 4, "alone, a node's instances share it: 30,000 / 4 beats 30,000 / 2"
    scheduler.arrive_all(30_000)
    assert not set(dict(first.kv_split())) & set(dict(scheduler.placement(2).kv_split())), (
        "the other node is empty"
    )


def test_nodes_are_spanned_when_that_pays_and_only_then():
    big = 60_000
    dear = replace(COSTS, exchange_tokens_between_nodes=1_000_000)
    degrees = {}
    for name, costs in (("cheap", COSTS), ("dear", dear)):
        scheduler = make_scheduler(costs=costs)
        scheduler.arrive_all(big)
        degrees[name] = scheduler.placement(1).cp_degree
    assert degrees == {"cheap": 8, "dear": 4}


def test_a_dear_exchange_keeps_a_request_where_it_is():
    scheduler = make_scheduler(costs=replace(COSTS, exchange_tokens=10**9))
    scheduler.arrive_all(20_000)
    assert scheduler.placement(1).cp_degree == 1


def test_what_no_instance_holds_is_spread_over_as_many_as_it_needs():
    small = replace(TWO_NODES, num_frames=100)
    scheduler = make_scheduler(small, replace(COSTS, exchange_tokens=10**9))
    scheduler.arrive_all(64 * 350)
    assert scheduler.placement(1).cp_degree >= 4


def test_it_ends_lower_than_dual_balanced_on_the_same_arrivals():
    random = Random(7)
    lengths = [random.choice([500, 800, 1500, 20_000, 60_000]) for _ in range(60)]
    peaks = {}
    for policy in ("cost_aware", "dual_balanced"):
        scheduler = make_scheduler(replace(TWO_NODES, num_frames=3072), policy=policy)
        for length in lengths:
            scheduler.arrive_all(length)
        peaks[policy] = max(scheduler.loads("kv_tokens"))
    assert peaks["cost_aware"] < peaks["dual_balanced"]


def test_equal_histories_give_equal_placements():
    def placements():
        scheduler, random = make_scheduler(), Random(3)
        for _ in range(50):
            scheduler.arrive_all(random.randrange(10, 40_000))
        return [scheduler.placement(i) for i in range(1, 51)]

    assert placements() == placements()


def test_negative_costs_are_refused():
    with pytest.raises(ValueError, match="link_tokens is -1"):
        CostConfig(link_tokens=-1)


def test_a_phase_counts_against_its_own_mean():
    """A row costs 1% of an instance's KV, yet rows are level: a step waits for both phases."""
    scheduler = make_scheduler(costs=replace(COSTS, dispatch_tokens_per_row=10))
    random = Random(2)
    scheduler.arrive_all(*(1000 for _ in range(8)))
    scheduler.arrive_all(*(random.randrange(10, 1900) for _ in range(240)))
    rows = scheduler.loads("num_rows")
    assert max(rows) - min(rows) <= 2
