"""Terms end and instances are lost at any turn, and every token is right all the same.

`make seeds` plays many more.
"""

import pytest

from harness.hash_clusters import hash_play
from harness.hash_clusters.hash_parts import offloading_config
from harness.hash_clusters.losses.hash_failover import FailoverCluster
from harness.hash_clusters.losses.hash_recovery_seeds import play, play_failovers
from harness.seed_campaign import make_cluster


def test_terms_end_without_a_loss_and_every_token_is_right():
    clusters = [play(seed, max_losses=0, max_regroups=10) for seed in range(4)]
    assert sum(cluster.num_terms for cluster in clusters) > 10
    assert sum(cluster.num_kept for cluster in clusters) > 5, "no request kept its pages"
    assert not any(cluster.num_losses for cluster in clusters)


@pytest.mark.parametrize("seeds", [
    (0, 1, 4, 5),
    pytest.param((6, 10, 14, 15), marks=pytest.mark.system),
    pytest.param((18, 21, 22, 24), marks=pytest.mark.system),
])  # fmt: skip
def test_instances_are_lost_at_any_turn_and_every_token_is_right(seeds):
    clusters = [play(seed) for seed in seeds]
    assert sum(cluster.num_losses for cluster in clusters) > 10
    assert sum(cluster.num_attempts for cluster in clusters) > 10


def test_the_play_meets_what_it_is_for():
    """The control: late tokens and late reports of an earlier term, and requests that are kept."""
    clusters = [play(seed) for seed in (1, 4, 18)]
    assert sum(cluster.num_stale_tokens for cluster in clusters)
    assert sum(cluster.num_stale_events for cluster in clusters)
    assert sum(cluster.num_kept for cluster in clusters)


@pytest.mark.parametrize("seed", [50002, 50003, 50010, 50011, 50013, 50014, 50018, 50050])
def test_a_seed_that_sees_planted_faults_is_right_without_them(seed, monkeypatch):
    """Each sees some of the mutants (tests/mutants), and they are few."""
    monkeypatch.setattr(hash_play, "MAX_TURNS", 150_000)
    make_cluster(seed).play()


def test_seats_come_and_go_in_order_and_no_request_begins_another_attempt():
    clusters = [play(seed, max_losses=0, max_changes=12) for seed in range(100, 113)]
    assert sum(cluster.num_changes for cluster in clusters) > 5
    assert sum(cluster.num_attempts for cluster in clusters) == 0
    assert sum(cluster.num_moves for cluster in clusters) > 5


def test_instances_are_lost_while_seats_come_and_go():
    # In 80111 pages of a parked row move that has none at its position.
    seeds = (*range(110, 117), 80111)
    clusters = [play(seed, max_losses=4, max_changes=12) for seed in seeds]
    assert sum(cluster.num_changes for cluster in clusters) > 5
    assert sum(cluster.num_losses for cluster in clusters) > 10
    assert sum(cluster.num_shrinks for cluster in clusters) > 2


@pytest.mark.parametrize(
    "seeds", [(2, 8, 11, 80), pytest.param(range(20, 60), marks=pytest.mark.system)]
)
def test_the_controller_and_front_ends_are_lost_at_any_turn_and_clients_get_every_token(seeds):
    clusters = [play_failovers(seed) for seed in seeds]
    for what in ("failovers", "front_ends_lost", "resumed", "stale_tokens"):
        assert sum(getattr(cluster, f"num_{what}") for cluster in clusters), what


def test_the_controller_is_lost_while_pages_are_in_slots():
    # A process that copies nothing under the next controller never ends these.
    clusters = [FailoverCluster(seed, config=offloading_config(seed)) for seed in (501, 502, 503)]
    for cluster in clusters:
        cluster.play()
        assert cluster.num_failovers and cluster.scheduler.offload.num_stowed[0]
