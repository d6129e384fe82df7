"""Hash clusters whose rows have drafts, few or most of which are right, of every kind.

PYTHONPATH=tests python -m harness.seed_campaign --kind drafts --seeds 1000
"""

from dataclasses import replace
from random import Random

from harness.hash_clusters.hash_cluster import HashCluster, crowd_of, of_kind
from harness.hash_clusters.hash_offload import LosingCluster, OffloadingCluster
from harness.hash_clusters.hash_parts import draw_config, levelling_config
from harness.hash_clusters.hash_play import played
from harness.hash_clusters.hash_recovery import RecoveringCluster
from harness.hash_clusters.losses.hash_failover import FailoverCluster
from nanocp.config.whole import Config

Drafting = of_kind(HashCluster, has_drafts=True)
DraftingOffload = of_kind(OffloadingCluster, has_drafts=True)
DraftingLosses = of_kind(RecoveringCluster, has_drafts=True)
DraftingOffloadLosses = of_kind(LosingCluster, has_drafts=True)
DraftingFailovers = of_kind(FailoverCluster, has_drafts=True)


def without_sharing(config: Config) -> Config:
    """Then the KV of the MTP layer is of one continuation, and is judged."""
    return replace(config, scheduler=replace(config.scheduler, prefix_sharing=False))


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
