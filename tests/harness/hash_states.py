"""Clusters whose rows have states in linear attention layers.

PYTHONPATH=tests python -m harness.seed_campaign --kind states --seed N    replays one
"""

from __future__ import annotations

from random import Random

from harness.hash_cluster import HashCluster
from harness.hash_drafts import crowd_of
from harness.hash_failover import FailoverCluster
from harness.hash_operators import OperatedCluster
from harness.hash_play import played
from harness.hash_recovery import RecoveringCluster


class Stateful(HashCluster):
    """Rows are re-bound, preempted and aborted; nothing is lost."""

    has_states = True


class StatefulLosses(RecoveringCluster):
    """Instances are lost too, and seats come and go."""

    has_states = True


class StatefulFailovers(FailoverCluster):
    """The controller is lost too."""

    has_states = True


class StatefulOperators(OperatedCluster):
    """Operators change seats at any time."""

    has_states = True


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


def play(seed: int) -> HashCluster:
    """Play one seed to its end; a failure names the seed."""
    cluster = make_states(seed)
    if isinstance(cluster, RecoveringCluster):
        cluster.hurries = True
    return played(cluster, f"states --seed {seed}")
