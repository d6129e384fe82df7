"""Hash clusters whose experts move at any window, while instances are lost and seats change.

PYTHONPATH=tests python -m harness.seed_campaign --kind experts --seeds 1000
"""

from collections import Counter
from random import Random
from typing import Any

from harness.hash_clusters.expert_moves import move_at_random
from harness.hash_clusters.hash_cluster import of_kind
from harness.hash_clusters.hash_play import played
from harness.hash_clusters.hash_recovery import RecoveringCluster
from harness.hash_clusters.losses.hash_failover import FailoverCluster
from nanocp.config.whole import Config


class MovingLosses(RecoveringCluster):
    """Experts move, and instances are lost."""

    has_moves = True

    def __init__(self, seed: int, **most: int) -> None:
        self.counts: Counter[str] = Counter()
        """Changes by outcome."""
        self._of_moves = Random(seed + 3)
        self.redundant_experts = self._of_moves.choice([1, 1, 2, 4])
        super().__init__(seed, **most)

    def _new_coordinator(self, config: Config, first_term: int = 0) -> None:
        super()._new_coordinator(config, first_term)
        if (experts := self.coordinator.flights.experts) is not None:
            move_at_random(experts, self._of_moves.randrange(1 << 32), self.counts)


class MovingFailovers(MovingLosses, FailoverCluster):
    """Experts move, and controllers are lost too."""


DraftingMoves = of_kind(MovingLosses, has_drafts=True)


def make_moves(seed: int) -> MovingLosses:
    """The cluster of a seed: kinds take turns."""
    match seed % 4:
        case 0:
            return MovingLosses(seed, max_losses=4)
        case 1:
            return MovingLosses(seed, max_losses=2, max_changes=8)
        case 2:
            return DraftingMoves(seed, max_losses=2, max_regroups=2)
    return MovingFailovers(seed)


def play(seed: int) -> Any:
    """Play one seed to its end; a failure names the seed."""
    cluster = make_moves(seed)
    cluster.hurries = True
    return played(cluster, f"experts --seed {seed}")
