"""The baselines: request-level and uniform CP, as the paper compares with them (2.3)."""

from dataclasses import replace

import pytest

from control_plane.scheduler.policies.registry import make_policy
from harness.hash_clusters import hash_cluster
from harness.hash_clusters.followed_tables import FollowedScheduler
from nanocp.config.cluster import ClusterConfig
from nanocp.config.scheduler import SchedulerConfig

TWO_NODES = ClusterConfig(
    num_instances=8, instances_per_node=4, num_frames=256, max_model_len=65_536
)


def test_least_batch_levels_rows_and_least_cache_levels_kv():
    lengths = [4000] * 4 + [64] * 60
    rows, kv_tokens = {}, {}
    for policy in ("least_batch", "least_cache"):
        scheduler = FollowedScheduler(TWO_NODES, policy=policy)
        scheduler.arrive_all(*lengths)
        rows[policy] = scheduler.loads("num_rows")
        kv_tokens[policy] = scheduler.loads("kv_tokens")
        assert all(scheduler.placement(i).cp_degree == 1 for i in range(1, 65))
    assert rows["least_batch"] == [8] * 8
    assert max(kv_tokens["least_batch"]) > 4000 and min(kv_tokens["least_batch"]) < 600
    # The other four get all the short ones, and still hold less than one long request.
    assert sorted(rows["least_cache"]) == [1] * 4 + [15] * 4
    assert sorted(kv_tokens["least_cache"])[:4] == pytest.approx([15 * 64] * 4, rel=0.05)


def test_round_robin_takes_instances_in_turn_whatever_they_hold():
    scheduler = FollowedScheduler(TWO_NODES, policy="round_robin")
    scheduler.arrive_all(*([4000] + [64] * 7) * 2)
    assert [scheduler.placement(i).moe_binding for i in range(1, 17)] == [*range(1, 8), 0] * 2
    assert sorted(scheduler.loads("kv_tokens"))[-1] > 8000


@pytest.mark.parametrize("policy", ["least_batch", "least_cache", "round_robin"])
def test_a_request_level_policy_spans_only_what_no_instance_could_ever_hold(policy):
    scheduler = FollowedScheduler(TWO_NODES, policy=policy)
    scheduler.arrive_all(250 * 64, 256 * 64 * 2 + 1)
    assert scheduler.placement(1).cp_degree == 1
    assert scheduler.placement(2).cp_degree >= 3


def test_a_request_level_policy_leaves_a_long_request_waiting_beside_free_memory():
    """Figure 5c: every instance has 156 of 256 frames free, and a request of 200 pages waits."""
    waiting = {}
    for policy in ("least_batch", "least_cache", "dual_balanced"):
        scheduler = FollowedScheduler(TWO_NODES, policy=policy)
        scheduler.arrive_all(*[99 * 64] * 8)
        scheduler.arrive_all(200 * 64)
        waiting[policy] = scheduler.scheduler.requests.num_waiting
    assert waiting == {"least_batch": 1, "least_cache": 1, "dual_balanced": 0}


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_uniform_cp_puts_every_request_over_one_whole_group_in_equal_shares(degree):
    scheduler = FollowedScheduler(TWO_NODES, policy=f"uniform_cp:{degree}")
    scheduler.arrive_all(*[64 * 9] * 16)
    for request_id in range(1, 17):
        members = [instance for instance, _ in scheduler.placement(request_id).kv_split()]
        first = members[0] // degree * degree
        assert members == list(range(first, first + degree))
        pages = [count for _, count in scheduler.placement(request_id).kv_split()]
        assert max(pages) - min(pages) <= 1
    assert scheduler.loads("num_rows") == [2] * 8


def test_uniform_cp_grows_round_its_group():
    scheduler = FollowedScheduler(TWO_NODES, policy="uniform_cp:4")
    scheduler.arrive_all(64, max_tokens=64 * 12)
    assert scheduler.placement(1).kv_split(64 * 12) == ((0, 3), (1, 3), (2, 3), (3, 3))


def test_any_node_takes_the_least_loaded_of_the_whole_cluster():
    scheduler = FollowedScheduler(TWO_NODES, policy="dual_balanced_any_node")
    scheduler.arrive_all(200, 1000, 1000, 1000, 200, 1000, 8192)
    assert [instance for instance, _ in scheduler.placement(7).kv_split()] == [0, 4, 6, 7]
    assert max(scheduler.loads("kv_tokens")) <= 8192 // 4 + 400


@pytest.mark.parametrize(("policy", "named"), [
    ("uniform_cp", "needs a degree, like uniform_cp:2"),
    ("uniform_cp:0", "needs a degree, like uniform_cp:2"),
    ("fixed_degree:2:3", "needs a degree, like fixed_degree:2"),
    ("least_batches", "nearest: least_batch"),
    ("dual_balanced:2", "nearest: dual_balanced"),
])  # fmt: skip
def test_a_policy_that_cannot_be_is_named(policy, named):
    with pytest.raises(ValueError, match=named):
        make_policy(SchedulerConfig(policy=policy))


@pytest.mark.parametrize("policy", [
    "least_batch", "least_cache", "uniform_cp:2", "uniform_cp:3", "dual_balanced_any_node",
    "cost_aware",
])  # fmt: skip
def test_every_token_is_right_on_instances_that_would_notice(policy, monkeypatch):
    draw_config = hash_cluster.draw_config

    def with_policy(random):
        config = draw_config(random)
        return replace(config, scheduler=replace(config.scheduler, policy=policy))

    monkeypatch.setattr(hash_cluster, "draw_config", with_policy)
    for seed in range(900, 904):
        hash_cluster.HashCluster(seed).play()


class Mine:
    """A policy of somebody else."""

    def __init__(self, config):
        self.config = config

    def place(self, arrival, state, turns):
        """Place nothing."""


class NoPolicy:
    def __init__(self, config):
        pass


def test_a_policy_may_be_another_module_s_class():
    config = SchedulerConfig(policy=f"{__name__}:Mine")
    assert type(make_policy(config)).__name__ == "Mine"
    assert make_policy(config).config is config


@pytest.mark.parametrize(("policy", "said"), [
    ("no_such_module:Mine", "No module named 'no_such_module'"),
    (f"{__name__}:Yours", "has no attribute 'Yours'"),
    (f"{__name__}:NoPolicy", "NoPolicy has no method place"),
    ("datetime:date", "module:Class must name a class"),
])  # fmt: skip
def test_a_class_that_is_no_policy_is_a_sentence(policy, said):
    with pytest.raises(ValueError, match=f"policy is '{policy}'") as raised:
        make_policy(SchedulerConfig(policy=policy))
    assert said in str(raised.value)
