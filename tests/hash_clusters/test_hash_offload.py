"""Whole clusters whose pages go to slots and come back: every token is right, no slot is lost.

OFFLOAD_SEEDS=100 plays more.
"""

import os

from harness.hash_clusters.hash_offload import play_crowded, play_cut, play_losing, play_offloading

NUM_SEEDS = int(os.environ.get("OFFLOAD_SEEDS", "4"))


def test_conversations_find_their_history_outside_the_frames():
    clusters = [play_offloading(seed) for seed in range(NUM_SEEDS)]
    offloads = [cluster.scheduler.offload for cluster in clusters]
    assert sum(each.num_stowed[0] for each in offloads) > 30
    assert sum(sum(each.num_fetched) for each in offloads) > 5


def test_preempted_requests_come_back_from_there_with_the_same_tokens():
    crowds = [play_crowded(seed) for seed in range(1, 2 * NUM_SEEDS, 2)]
    assert sum(crowd.num_preemptions for crowd in crowds) > 0
    assert sum(sum(crowd.scheduler.offload.num_fetched) for crowd in crowds) > 0


def test_a_lost_instance_loses_its_slots_and_no_token():
    clusters = [play_losing(seed) for seed in range(NUM_SEEDS // 2)]
    assert sum(cluster.num_losses for cluster in clusters) > 0


def test_a_connection_that_is_cut_leaves_no_ticket_open():
    """Also where the page under way came from a peer's slot, which its ticket does not name."""
    clusters = [play_cut(seed) for seed in (5, 9, 15, 19)]
    assert all(cluster.num_cuts_of_slots for cluster in clusters)
    assert sum(cluster.num_moves for cluster in clusters)
