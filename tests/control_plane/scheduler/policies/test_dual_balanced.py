"""Policies by name, and what each must and must not do."""

from collections import Counter
from itertools import permutations

import pytest

from control_plane.scheduler.invariants import check
from control_plane.scheduler.policies.registry import make_policy
from control_plane.scheduler.scheduler import Scheduler
from nanocp.config.cluster import BoundsConfig, ClusterConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.values.plan import Arrival, WindowDone


def arrival(request_id, prompt_len, max_tokens=8):
    return Arrival(request_id, prompt_len, max_tokens, needs_prefill=False)


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
    scheduler = Scheduler(
        ClusterConfig(num_frames=64), SchedulerConfig(policy=f"fixed_degree:{degree}")
    )
    lengths = {request_id: 64 * degree + 1 + 97 * request_id for request_id in range(1, 9)}
    scheduler.plan_window([arrival(*item) for item in lengths.items()], 0)
    assert [scheduler.requests.placement(request_id).cp_degree for request_id in lengths] == [
        degree
    ] * 8


def test_fixed_degree_spans_nodes():
    cluster = ClusterConfig(num_instances=4, instances_per_node=2)
    scheduler = Scheduler(cluster, SchedulerConfig(policy="fixed_degree:4"))
    scheduler.plan_window([arrival(1, 600)], 0)
    assert scheduler.requests.placement(1).cp_degree == 4


def test_dual_balanced_keeps_a_request_on_its_node():
    cluster = ClusterConfig(num_instances=8, instances_per_node=4)
    scheduler = Scheduler(cluster, SchedulerConfig(policy="dual_balanced"))
    scheduler.plan_window([arrival(request_id, 3000) for request_id in range(1, 7)], 0)
    nodes = [
        {
            cluster.node_of(instance)
            for instance, _ in scheduler.requests.placement(request_id).kv_split()
        }
        for request_id in range(1, 7)
    ]
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
    scheduler = Scheduler(cluster, SchedulerConfig(policy=policy))
    scheduler.plan_window([arrival(1, 64 * 35, max_tokens=64 * 5)], 0)
    check(scheduler)
    assert scheduler.requests.placement(1).cp_degree == 4
    assert [load.frames_committed for load in scheduler.requests.loads()] == [10, 10, 10, 10]


@pytest.mark.parametrize("policy", ["dual_balanced", "fixed_degree:2"])
@pytest.mark.parametrize("lengths", [*permutations((5, 30, 60))])
def test_the_other_member_is_the_one_with_the_least_kv(policy, lengths):
    """Instances 0 to 2 have a row each, 3 none: it is the MoE binding, and one of them joins."""
    config = SchedulerConfig(policy=policy, cp_degree_buckets=((1024, 1),), cp_degree_max=2)
    scheduler = Scheduler(ClusterConfig(num_instances=4, num_frames=64), config)
    for request_id, length in enumerate((*lengths, 2048)):
        scheduler.plan_window([arrival(request_id, length)], request_id)
    placement = scheduler.requests.placement(3)
    assert placement.moe_binding == 3
    assert {instance for instance, _ in placement.kv_split()} == {3, lengths.index(5)}, "4.2.3"


def test_rows_are_balanced_and_kv_is_levelled():
    scheduler = Scheduler(ClusterConfig(num_frames=256), SchedulerConfig(policy="dual_balanced"))
    scheduler.plan_window([arrival(i, 2100 if i % 5 == 0 else 150) for i in range(1, 41)], 0)
    rows = [load.num_rows for load in scheduler.requests.loads()]
    assert rows == [10, 10, 10, 10]
    # One-instance requests follow the rows alone (4.2.3), so KV is as level as the long ones can
    # make it.
    kv_tokens = [load.kv_tokens for load in scheduler.requests.loads()]
    assert max(kv_tokens) - min(kv_tokens) <= 200


def test_dual_balanced_rebinds_only_where_it_lowers_the_higher_count():
    """It re-binds where rows[new] + 1 < rows[old], by ascending degree, then id.

    Counts move with each re-binding. (The paper's section 4.2.1; protocol.md, hand-offs.)
    """
    scheduler = Scheduler(
        ClusterConfig(num_instances=2, num_frames=64), SchedulerConfig(policy="fixed_degree:2")
    )
    plan = scheduler.plan_window([arrival(i, 130, max_tokens=50) for i in range(1, 9)], 0)
    bindings = {i: scheduler.requests.placement(i).moe_binding for i in range(1, 9)}
    ended = [i for i, moe_binding in bindings.items() if moe_binding == 1]
    assert len(ended) == 4 and plan.window == 0
    scheduler.plan_window([], 1)
    finished = tuple((i, 1, None) for i in ended)
    plan = scheduler.plan_window([WindowDone(0, 0), WindowDone(1, 0, finished)], 2)
    moved = [hand_off.request_id for hand_off in plan.instances[0].hand_offs_out]
    assert moved == sorted(set(bindings) - set(ended))[:2], "4 and 0 become 2 and 2, not 1 and 3"
    assert plan.instances[1].hand_offs_in == tuple((request_id, 0) for request_id in moved)
    check(scheduler)


def test_rows_with_states_are_rebound_in_every_eighth_window_only():
    cluster = ClusterConfig(num_instances=2, num_frames=64, carry_pages=2)
    scheduler = Scheduler(cluster, SchedulerConfig(policy="fixed_degree:2"))
    scheduler.plan_window([arrival(i, 130, max_tokens=50) for i in range(1, 9)], 0)
    policy, state = make_policy(SchedulerConfig(policy="dual_balanced")), scheduler._state
    state.loads.num_rows[:] = [6, 2]
    found = [window for window in range(20) if list(policy.rebindings(state, window))]
    assert found == [0, 8, 16]


def test_no_more_hand_offs_between_two_instances_than_the_mailbox_holds():
    bounds = BoundsConfig(max_hand_offs=1)
    cluster = ClusterConfig(num_instances=2, num_frames=64, bounds=bounds)
    scheduler = Scheduler(cluster, SchedulerConfig(policy="fixed_degree:2"))
    scheduler.plan_window([arrival(i, 130, max_tokens=50) for i in range(1, 9)], 0)
    ended = [i for i in range(1, 9) if scheduler.requests.placement(i).moe_binding == 1]
    finished = tuple((i, 1, None) for i in ended)
    plan = scheduler.plan_window([WindowDone(0, 0), WindowDone(1, 0, finished)], 1)
    assert len(plan.instances[0].hand_offs_out) == 1
    plan = scheduler.plan_window([WindowDone(0, 1), WindowDone(1, 1)], 2)
    assert len(plan.instances[0].hand_offs_out) == 1


def test_chaos_draws_every_degree():
    scheduler = Scheduler(
        ClusterConfig(num_frames=256), SchedulerConfig(policy="chaos", chaos_seed=1)
    )
    scheduler.plan_window([arrival(i, 300) for i in range(1, 41)], 0)
    placements = [scheduler.requests.placement(i) for i in range(1, 41)]
    assert {placement.cp_degree for placement in placements} == {1, 2, 3, 4}
    outside = [p for p in placements if p.moe_binding not in dict(p.kv_split())]
    assert outside, "a MoE binding need not hold KV"
