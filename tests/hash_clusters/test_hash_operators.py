"""Operators change seats at any turn while processes and controllers are lost; no change locks.

`make seeds KIND=operators SEEDS=1000` plays many more.
"""

from harness.seed_campaign import OPERATORS, make_cluster


def test_every_change_of_seats_ends_and_none_stops_the_next_one():
    # In 50001 an instance that is left out of the next term is slow to leave the last one.
    clusters = [make_cluster(seed, OPERATORS) for seed in (*range(16), 50001)]
    for cluster in clusters:
        cluster.check_every = 16
        cluster.play()
    for what in ("changes", "losses", "failovers", "refused", "failed", "overdue", "undone"):
        assert sum(getattr(cluster, f"num_{what}") for cluster in clusters), what
