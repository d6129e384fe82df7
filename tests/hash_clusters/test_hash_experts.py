"""Whole clusters whose experts move: every token is right, whenever the table changes.

A row that comes to a slot with another expert, or with one that is half there, makes every later
token wrong. `EXPERT_SEEDS=1000` plays more.
"""

import os
from collections import Counter

import pytest

from harness.hash_clusters.kinds.hash_experts import play

NUM_SEEDS = int(os.environ.get("EXPERT_SEEDS", "200"))


@pytest.mark.parametrize(
    "seeds",
    [range(24), pytest.param(range(NUM_SEEDS), marks=pytest.mark.system)],
    ids=["quick", "all"],
)
def test_every_token_is_right_while_experts_move(seeds):
    clusters = [play(seed) for seed in seeds]
    counts = Counter()
    for cluster in clusters:
        counts += cluster.counts
        counts["losses"] += cluster.num_losses
        counts["seats"] += cluster.num_changes
        counts["adopted"] += getattr(cluster, "num_adopted", 0)
    least = {"moves_done": 30, "experts_moved": 300, "moves_lost": 2, "moves_failed": 3}
    least |= {"losses": 20, "seats": 10, "adopted": 3}
    assert not {name: counts[name] for name, number in least.items() if counts[name] < number}
    steps = [cluster.config.scheduler.steps_per_window for cluster in clusters]
    lanes = [cluster.config.scheduler.lanes for cluster in clusters]
    assert set(steps) == {1, 4} and set(lanes) == {"off", "always", "random"}
