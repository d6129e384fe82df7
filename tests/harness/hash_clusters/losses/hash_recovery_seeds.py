"""Play clusters that lose instances, controllers and front ends, each from one seed."""

from harness.hash_clusters.hash_play import played
from harness.hash_clusters.hash_recovery import RecoveringCluster
from harness.hash_clusters.losses.hash_failover import FailoverCluster


def play(
    seed: int, max_losses: int = 6, max_regroups: int = 0, max_changes: int = 0
) -> RecoveringCluster:
    """Play one seed to its end; a failure names the seed."""
    kind = "regroups" if max_regroups else "changes" if max_changes else "losses"
    cluster = RecoveringCluster(seed, max_losses, max_regroups, max_changes)
    return played(cluster, f"{kind} --seed {seed}")


def play_failovers(seed: int) -> FailoverCluster:
    """Play one seed whose controller and front ends are lost too; a failure names the seed."""
    return played(FailoverCluster(seed), f"failovers --seed {seed}")
