"""Hash clusters whose rows have drafts, few or most of which are right, of every kind.

PYTHONPATH=tests python -m harness.seed_campaign --kind drafts --seeds 1000
"""

from dataclasses import replace
from random import Random

from harness.hash_clusters.hash_cluster import HashCluster
from harness.hash_clusters.hash_offload import LosingCluster, OffloadingCluster
from harness.hash_clusters.hash_parts import draw_config, levelling_config
from harness.hash_clusters.hash_play import played
from harness.hash_clusters.hash_recovery import RecoveringCluster
from harness.hash_clusters.losses.hash_failover import FailoverCluster
from nanocp.config.whole import Config


class Drafting(HashCluster):
    has_drafts = True


class DraftingOffload(OffloadingCluster):
    has_drafts = True


class DraftingLosses(RecoveringCluster):
    has_drafts = True


class DraftingOffloadLosses(LosingCluster):
    has_drafts = True


class DraftingFailovers(FailoverCluster):
    has_drafts = True


def without_sharing(config: Config) -> Config:
    """Then the KV of the MTP layer is of one continuation, and is judged."""
    return replace(config, scheduler=replace(config.scheduler, prefix_sharing=False))


def crowded(config: Config) -> Config:
    """Few frames, none of which is promised."""
    bounds = replace(config.cluster.bounds, max_rows=8, max_attention_rows=8)
    cluster = replace(config.cluster, num_instances=2, num_frames=6, bounds=bounds)
    scheduler = replace(config.scheduler, growth_promise="tokens:0", max_queued_requests=1024)
    return replace(config, cluster=cluster, scheduler=scheduler)


def crowd_of(kind: type[HashCluster], seed: int) -> HashCluster:
    """Rows that are promised no frame outgrow the cluster together."""
    crowd = kind(seed, config=crowded(draw_config(Random(seed))))
    for _ in range(12):
        crowd._arrive(crowd.random.randrange(30, 64), crowd.random.randrange(60, 150))
    crowd.abort_share /= 10
    crowd.speeds = [max(speed, 0.3) for speed in crowd.speeds]
    return crowd


def make_drafts(seed: int) -> HashCluster:
    """The cluster of a seed: kinds take turns."""
    match seed % 10:
        case 0 | 1:
            return Drafting(seed)
        case 2 | 3:
            return Drafting(seed, config=without_sharing(draw_config(Random(seed))))
        case 4:
            return Drafting(seed, config=without_sharing(levelling_config(seed)))
        case 5:
            return crowd_of(Drafting, seed)
        case 6:
            return DraftingOffload(seed)
        case 7:
            return DraftingLosses(seed, max_losses=4, max_regroups=2, max_changes=6)
        case 8:
            return DraftingOffloadLosses(seed)
        case _:
            return DraftingFailovers(seed)


def play(seed: int) -> HashCluster:
    """Play one seed to its end; a failure names the seed."""
    return played(make_drafts(seed), f"drafts --seed {seed}")
