"""Play hash clusters from seeds: as drawn, levelling, sharing prompts, losing an instance.

PYTHONPATH=tests python -m harness.seed_campaign --kind levelling --seed N    replays one
"""

from dataclasses import replace
from random import Random

from control_plane.scheduler.invariants import check
from harness.hash_clusters.hash_cluster import HashCluster, crowd_of
from harness.hash_clusters.hash_parts import (
    draw_config,
    levelling_config,
    small_moves_between_nodes,
)
from harness.hash_clusters.hash_play import played
from nanocp.config.whole import Config
from nanocp.values.plan import Arrival, ClusterLost, FinishReason


def lose_an_instance(seed: int, config: Config | None = None) -> HashCluster:
    """Play a while, then lose an instance."""
    cluster = HashCluster(seed, config=config)
    for _ in range(2000):
        cluster._turn()
    lost = cluster.random.randrange(len(cluster.processes))
    living = {
        story.request_id
        for story in cluster.stories.values()
        if cluster.scheduler.requests.placement(story.request_id)
    }
    events = [ClusterLost(f"instance {lost} was lost"), Arrival(999, 10, 10)]
    plan = cluster.scheduler.plan_window(events, cluster.now_us)
    requests = cluster.scheduler.requests
    assert plan.window is None and (requests.num_running, requests.num_waiting) == (0, 0)
    assert all(
        ended.reason is FinishReason.FAILED and f"instance {lost} was lost" in ended.message
        for ended in plan.ended
    )
    assert plan.ended[-1].request_id == 999 and living <= {ended.request_id for ended in plan.ended}
    check(cluster.scheduler)
    for load in cluster.scheduler.requests.loads():
        assert load.frames_free == cluster.config.cluster.num_frames, load
    return cluster


def play(seed: int, config: Config | None = None, has_experts: bool = True) -> HashCluster:
    """Play one seed to its end; a failure names the seed."""
    return played(HashCluster(seed, config=config, has_experts=has_experts), f"plain --seed {seed}")


def play_levelling(seed: int) -> HashCluster:
    """Pages move within nodes and between them."""
    with small_moves_between_nodes:
        return play(seed, levelling_config(seed))


def play_crowd(seed: int) -> HashCluster:
    """Rows that are promised no frame outgrow the cluster together: some are preempted."""
    crowd = crowd_of(HashCluster, seed)
    crowd.play()
    return crowd


def play_sharing(seed: int) -> HashCluster:
    """Prompts that begin alike, and room to keep them."""
    config = draw_config(random := Random(seed))
    policy = random.choice(["chaos", "cost_aware", "dual_balanced"])
    cluster = replace(config.cluster, num_frames=random.choice([12, 24, 48]))
    scheduler = replace(config.scheduler, policy=policy, prefix_sharing=True)
    sharing = HashCluster(seed, 24, replace(config, cluster=cluster, scheduler=scheduler))
    sharing.prefix_share = 0.9
    sharing.prefill_share = 0.13
    return played(sharing, f"sharing --seed {seed}")
