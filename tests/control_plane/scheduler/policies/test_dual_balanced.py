"""Policies by name, and what each must and must not do."""

from collections import Counter
from itertools import permutations

import pytest

from control_plane.scheduler.policies.registry import make_policy
from harness.hash_clusters.followed_tables import FollowedScheduler
from nanocp.config.cluster import BoundsConfig, ClusterConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.values.plan import Finished, FinishReason, WindowDone


@pytest.mark.parametrize(("name", "message"), [
    ("dual_balance", "nearest: dual_balanced"),
    ("foo", r"fixed_degree:N$"),
    ("fixed_degre:2", "nearest: fixed_degree:N"),
    ("fixed_degree", "needs a degree, like fixed_degree:2"),
    ("fixed_degree:0", "needs a degree"),
    ("fixed_degree:x", "needs a degree"),
    ("chaos:1", "must be one of"),
])  # fmt: skip
def test_an_unknown_policy_names_the_nearest(name, message):
    with pytest.raises(ValueError, match=message):
        make_policy(SchedulerConfig(policy=name))


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_fixed_degree_is_the_degree_of_every_prompt_with_enough_pages(degree):
    scheduler = FollowedScheduler(ClusterConfig(num_frames=64), policy=f"fixed_degree:{degree}")
    scheduler.arrive_all(*(64 * degree + 1 + 97 * number for number in range(1, 9)))
    assert [scheduler.placement(number).cp_degree for number in range(1, 9)] == [degree] * 8


def test_fixed_degree_spans_nodes():
    cluster = ClusterConfig(num_instances=4, instances_per_node=2)
    scheduler = FollowedScheduler(cluster, policy="fixed_degree:4")
    scheduler.arrive(600)
    assert scheduler.placement().cp_degree == 4


def test_dual_balanced_keeps_a_request_on_its_node():
    cluster = ClusterConfig(num_instances=8, instances_per_node=4)
    scheduler = FollowedScheduler(cluster, policy="dual_balanced")
    scheduler.arrive_all(*[3000] * 6)
    splits = [scheduler.placement(request_id).kv_split() for request_id in range(1, 7)]
    nodes = [{cluster.node_of(instance) for instance, _ in split} for split in splits]
    assert all(len(node) == 1 for node in nodes), "a request is on one node"
    assert Counter(node.pop() for node in nodes) == {0: 3, 1: 3}, (
        "4.2.2: the node with the fewest requests"
    )


@pytest.mark.parametrize("policy", ["dual_balanced", "cost_aware"])
def test_a_request_larger_than_a_node_spans_nodes(policy):
    """It takes all frames: shares are even, whatever links cost."""
    cluster = ClusterConfig(
        num_instances=4, instances_per_node=2, num_frames=10, max_model_len=4096
    )
    scheduler = FollowedScheduler(cluster, policy=policy)
    scheduler.arrive(64 * 35, max_tokens=64 * 5)
    assert scheduler.placement().cp_degree == 4
    assert scheduler.loads("frames_committed") == [10, 10, 10, 10]


@pytest.mark.parametrize("policy", ["dual_balanced", "fixed_degree:2"])
@pytest.mark.parametrize("lengths", [*permutations((5, 30, 60))])
def test_the_other_member_is_the_one_with_the_least_kv(policy, lengths):
    """Instances 0 to 2 have a row each, 3 none: it is the MoE binding, and one of them joins."""
    config = {"policy": policy, "cp_degree_buckets": ((1024, 1),), "cp_degree_max": 2}
    scheduler = FollowedScheduler(ClusterConfig(num_instances=4, num_frames=64), **config)
    for length in (*lengths, 2048):
        scheduler.arrive(length)
    placement = scheduler.placement(4)
    assert placement.moe_binding == 3
    assert {instance for instance, _ in placement.kv_split()} == {3, lengths.index(5)}, "4.2.3"


def test_rows_are_balanced_and_kv_is_levelled():
    scheduler = FollowedScheduler(ClusterConfig(num_frames=256), policy="dual_balanced")
    scheduler.arrive_all(*([150] * 4 + [2100]) * 8)
    assert scheduler.loads("num_rows") == [10, 10, 10, 10]
    # One-instance requests follow the rows alone (4.2.3), so KV is as level as the long ones can
    # make it.
    kv_tokens = scheduler.loads("kv_tokens")
    assert max(kv_tokens) - min(kv_tokens) <= 200


def eight_on_two(**cluster):
    """Eight requests over two instances, and the first window."""
    config = ClusterConfig(num_instances=2, num_frames=64, **cluster)
    scheduler = FollowedScheduler(config, policy="fixed_degree:2")
    assert scheduler.arrive_all(*[130] * 8, max_tokens=50).window == 0
    return scheduler


def end_all_at_1(scheduler):
    """In the oldest window in flight all rows of instance 1 stop."""
    ended = [i for i in range(1, 9) if scheduler.placement(i).moe_binding == 1]
    finished = tuple(Finished(i, 1, FinishReason.STOP) for i in ended)
    scheduler.window += 1
    window = scheduler.window - 1
    return scheduler.plan(WindowDone(0, window), WindowDone(1, window, finished))


def test_dual_balanced_rebinds_only_where_it_lowers_the_higher_count():
    """It re-binds where rows[new] + 1 < rows[old], by ascending degree, then id.

    Counts move with each re-binding. (The paper's section 4.2.1; protocol.md, hand-offs.)
    """
    scheduler = eight_on_two()
    scheduler.plan()
    ended = [i for i in range(1, 9) if scheduler.placement(i).moe_binding == 1]
    assert len(ended) == 4
    plan = end_all_at_1(scheduler)
    moved = [hand_off.request_id for hand_off in plan.instances[0].hand_offs_out]
    assert moved == sorted({*range(1, 9)} - {*ended})[:2], "4 and 0 become 2 and 2, not 1 and 3"
    assert plan.instances[1].hand_offs_in == tuple((request_id, 0) for request_id in moved)


def test_rows_with_states_are_rebound_in_every_eighth_window_only():
    policy = make_policy(SchedulerConfig(policy="dual_balanced"))
    state = eight_on_two(carry_pages=2).scheduler._state
    state.loads.num_rows[:] = [6, 2]
    found = [window for window in range(20) if list(policy.rebindings(state, window))]
    assert found == [0, 8, 16]


def test_no_more_hand_offs_between_two_instances_than_the_mailbox_holds():
    scheduler = eight_on_two(bounds=BoundsConfig(max_hand_offs=1))
    for plan in (end_all_at_1(scheduler), scheduler.step()):
        assert len(plan.instances[0].hand_offs_out) == 1


def test_chaos_draws_every_degree():
    scheduler = FollowedScheduler(ClusterConfig(num_frames=256), policy="chaos", chaos_seed=1)
    scheduler.arrive_all(*[300] * 40)
    placements = [scheduler.placement(i) for i in range(1, 41)]
    assert {placement.cp_degree for placement in placements} == {1, 2, 3, 4}
    outside = [p for p in placements if p.moe_binding not in dict(p.kv_split())]
    assert outside, "a MoE binding need not hold KV"
