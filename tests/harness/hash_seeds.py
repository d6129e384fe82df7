"""Play hash clusters from seeds: as drawn, levelling, sharing prompts, losing an instance.

python tests/harness/hash_seeds.py [--levelling | --sharing | --losses] --seeds 1000
python tests/harness/hash_seeds.py [...] --seed N       replays one
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from random import Random

from control_plane.scheduler.invariants import check
from harness.hash_cluster import HashCluster
from harness.hash_parts import draw_config, levelling_config, small_moves_between_nodes
from nanocp.config.whole import Config
from nanocp.values.plan import (
    Arrival,
    ClusterLost,
    FinishReason,
)


def lose_an_instance(seed: int, config: Config | None = None) -> HashCluster:
    """Play a while, then lose an instance.

    Every request ends FAILED, no frame is held, no window follows, later arrivals fail.
    """
    cluster = HashCluster(seed, config=config)
    for _ in range(2000):
        cluster._turn()
    lost = cluster.random.randrange(len(cluster.processes))
    living = {
        story.request_id
        for story in cluster.stories.values()
        if cluster.scheduler.placement(story.request_id)
    }
    plan = cluster.scheduler.plan_window(
        [ClusterLost(f"instance {lost} was lost"), Arrival(999, 10, 10)], cluster.now_us
    )
    assert plan.window is None and (
        cluster.scheduler.num_running,
        cluster.scheduler.num_waiting,
    ) == (0, 0)
    assert all(
        ended.reason is FinishReason.FAILED and f"instance {lost} was lost" in ended.message
        for ended in plan.ended
    )
    assert plan.ended[-1].request_id == 999 and living <= {ended.request_id for ended in plan.ended}
    check(cluster.scheduler)
    for load in cluster.scheduler.loads():
        assert load.frames_free == cluster.config.cluster.num_frames, load
    return cluster


def play(seed: int, config: Config | None = None, has_experts: bool = True) -> HashCluster:
    """Play one seed to its end; a failure names the seed."""
    cluster = HashCluster(seed, config=config, has_experts=has_experts)
    try:
        cluster.play()
    except Exception as error:
        how = "--levelling " if config else ""
        error.add_note(
            f"replay: python tests/harness/hash_seeds.py {how}--seed {seed}   ({cluster.config})"
        )
        raise
    return cluster


def play_levelling(seed: int) -> HashCluster:
    """Pages move within nodes and between them."""
    with small_moves_between_nodes:
        return play(seed, levelling_config(seed))


def play_crowd(seed: int) -> HashCluster:
    """Rows that are promised no frame outgrow the cluster together: some are preempted."""
    config = draw_config(Random(seed))
    bounds = replace(config.cluster.bounds, max_rows=8, max_attention_rows=8)
    cluster = replace(config.cluster, num_instances=2, num_frames=6, bounds=bounds)
    scheduler = replace(config.scheduler, growth_promise="tokens:0", max_queued_requests=1024)
    crowd = HashCluster(seed, config=replace(config, cluster=cluster, scheduler=scheduler))
    for _ in range(12):
        crowd._arrive(crowd.random.randrange(30, 64), crowd.random.randrange(60, 150))
    crowd.abort_share /= 10
    crowd.speeds = [max(speed, 0.3) for speed in crowd.speeds]
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
    try:
        sharing.play()
    except Exception as error:
        error.add_note(f"replay: python tests/harness/hash_seeds.py --sharing --seed {seed}")
        raise
    return sharing


def main() -> None:
    """Play seeds from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seeds", type=int, default=1000, help="play seeds FIRST .. FIRST + SEEDS - 1"
    )
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument(
        "--levelling", action="store_true", help="under cost_aware, with page moves"
    )
    parser.add_argument("--sharing", action="store_true", help="prompts that begin alike")
    parser.add_argument(
        "--losses", action="store_true", help="lose an instance in the middle of each"
    )
    parser.add_argument("--seed", type=int, help="play this one only")
    arguments = parser.parse_args()
    seeds = (
        range(arguments.first, arguments.first + arguments.seeds)
        if arguments.seed is None
        else [arguments.seed]
    )
    HashCluster.check_every = 1
    begin = time.monotonic()
    names = (
        *("windows", "tokens", "hand-offs", "extensions", "moves", "moves between nodes"),
        *("calls with parked rows", "preemptions", "resyncs", "shared tokens"),
    )
    totals = dict.fromkeys(names, 0)
    ends: dict[str, int] = {}
    for seed in seeds:
        if arguments.sharing:
            cluster = play_sharing(seed)
        elif arguments.losses:
            config = levelling_config(seed) if arguments.levelling else None
            cluster = lose_an_instance(seed, config)
        else:
            cluster = play_levelling(seed) if arguments.levelling else play(seed)
        totals["windows"] += cluster.num_windows
        totals["resyncs"] += cluster.num_resyncs
        totals["hand-offs"] += cluster.num_hand_offs
        totals["extensions"] += cluster.num_extensions
        totals["moves"] += cluster.num_moves
        totals["moves between nodes"] += cluster.num_moves_between_nodes
        totals["calls with parked rows"] += cluster.num_calls_with_parked_rows
        totals["preemptions"] += cluster.num_preemptions
        totals["shared tokens"] += cluster.scheduler.prefix_sharing.num_hit_tokens
        for story in cluster.stories.values():
            totals["tokens"] += len(story.output)
            end = story.reason.value if story.reason else "complete"
            ends[end] = ends.get(end, 0) + 1
    print(
        f"{len(seeds)} seeds in {time.monotonic() - begin:.1f} s: {totals}, requests {ends}",
        file=sys.stdout,
    )


if __name__ == "__main__":
    main()
