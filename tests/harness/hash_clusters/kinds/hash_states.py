"""Clusters whose rows have states in linear attention layers.

PYTHONPATH=tests python -m harness.seed_campaign --kind states --seed N    replays one
"""

from random import Random

from harness.hash_clusters.hash_cluster import HashCluster, crowd_of, of_kind
from harness.hash_clusters.hash_offload import LosingCluster, OffloadingCluster
from harness.hash_clusters.hash_offload import crowd_of as crowd_of_offload
from harness.hash_clusters.hash_play import played
from harness.hash_clusters.hash_recovery import RecoveringCluster
from harness.hash_clusters.losses.hash_failover import FailoverCluster
from harness.hash_clusters.losses.hash_operators import OperatedCluster

Stateful = of_kind(HashCluster, has_states=True)
StatefulLosses = of_kind(RecoveringCluster, has_states=True)
StatefulFailovers = of_kind(FailoverCluster, has_states=True)
StatefulOperators = of_kind(OperatedCluster, has_states=True)
StatefulOffload = of_kind(OffloadingCluster, has_states=True)
StatefulOffloadLosses = of_kind(LosingCluster, has_states=True)


def make_states(seed: int) -> HashCluster:
    """The cluster of a seed: one of all kinds."""
    match Random(seed).randrange(7):
        case 0 | 1:
            return Stateful(seed)
        case 6:
            return crowd_of(Stateful, seed)
        case 2:
            return StatefulLosses(seed, max_losses=6)
        case 3:
            return StatefulLosses(seed, max_losses=3, max_changes=12)
        case 4:
            return StatefulFailovers(seed)
    return StatefulOperators(seed)


def play_offload(seed: int) -> OffloadingCluster:
    """Play a seed of clusters with slots."""
    match seed % 4:
        case 0:
            cluster: OffloadingCluster = StatefulOffload(seed)
        case 1:
            cluster = StatefulOffloadLosses(seed)
        case _:
            # Where memory has few slots, a state may not find one for each of its pages.
            cluster = crowd_of_offload(StatefulOffload, seed // 2, [20, 4][seed % 2])
    return played(cluster, f"states-offload --seed {seed}")


def play(seed: int) -> HashCluster:
    """Play one seed to its end; a failure names the seed."""
    cluster = make_states(seed)
    if isinstance(cluster, RecoveringCluster):
        cluster.hurries = True
    return played(cluster, f"states --seed {seed}")
