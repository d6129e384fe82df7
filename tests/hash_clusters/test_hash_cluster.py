"""Whole clusters of HashInstances: every token is right, and every frame comes back.

HASH_SEEDS=1000 plays more; a seed that fails says how to replay it.
"""

import os

import pytest

from control_plane.scheduler.pages import quarantine
from data_plane.instance.rows import Row
from harness.hash_clusters.expert_moves import HashSlots
from harness.hash_clusters.hash_instance import HashInstance
from harness.hash_clusters.hash_model import NUM_EXPERTS
from harness.hash_clusters.kinds.hash_seeds import (
    HashCluster,
    levelling_config,
    lose_an_instance,
    play,
    play_crowd,
    play_levelling,
    play_sharing,
)
from harness.transports.random_tables import random_table

NUM_SEEDS = int(os.environ.get("HASH_SEEDS", "100"))
CHUNK = 25


def played(quick, long):
    """Seeds of a test, and those of the system test that is its long form."""
    forms = [quick, pytest.param(long, marks=pytest.mark.system)]
    return pytest.mark.parametrize("seeds", forms, ids=["quick", "long"])


@pytest.mark.parametrize(
    "first",
    [
        first if first < NUM_SEEDS // 4 else pytest.param(first, marks=pytest.mark.system)
        for first in range(0, NUM_SEEDS, CHUNK)
    ],
)
def test_every_token_is_right_and_every_frame_comes_back(first):
    clusters = [play(seed) for seed in range(first, min(first + CHUNK, NUM_SEEDS))]
    # A harness that no longer reaches what it is for would be green for ever.
    assert sum(cluster.num_hand_offs for cluster in clusters) > 10
    assert sum(cluster.num_resyncs for cluster in clusters) > 10
    assert (
        sum(len(story.output) for cluster in clusters for story in cluster.stories.values()) > 1000
    )


@played((20003, 20005, 20006, 20009, 20012, 20016, 20017, 20019), range(20_000, 20_040))
def test_models_without_experts_are_right_though_no_dispatch_bounds_who_runs_ahead(seeds):
    """Instances run at speeds that differ thirtyfold, and only replies and windows hold them."""
    clusters = [play(seed, has_experts=False) for seed in seeds]
    assert sum(cluster.num_hand_offs for cluster in clusters) > 10
    assert sum(cluster.num_moves for cluster in clusters) > 5


@played(range(21_000, 21_006), range(21_000, 21_012))
def test_experts_may_be_anywhere_in_each_layer(seeds):
    for seed in seeds:
        played_with_a_table(seed)


def played_with_a_table(seed):
    """A cluster whose experts are in random slots, some in several."""
    cluster = HashCluster(seed)
    num, layers = cluster.config.cluster.num_instances, cluster.model.num_moe_layers
    cluster.place_experts(random_table(NUM_EXPERTS, num, seed, num_layers=layers))
    cluster.play()


@played((10000, 10006, 10009, 10013, 10014, 10018, 10028, 10029, 10056), range(10_000, 10_060))
def test_rows_park_and_bindings_are_extended(seeds):
    clusters = [play(seed) for seed in seeds]
    assert sum(cluster.num_calls_with_parked_rows for cluster in clusters) > 5
    assert sum(cluster.num_extensions for cluster in clusters) > 5
    assert sum(cluster.num_moves for cluster in clusters) > 5


@played((4, 8, 10, 12, 14, 15), range(16))
def test_preempted_requests_resume_without_losing_or_doubling_a_token(seeds):
    crowds = [play_crowd(seed) for seed in seeds]
    resumed = [
        story for crowd in crowds for story in crowd.stories.values() if story.num_preemptions
    ]
    assert len(resumed) > 10 and sum(story.reason is None for story in resumed) > 8


def test_it_sees_a_resumed_row_that_forgot_what_it_generated(monkeypatch):
    start = Row.start.__func__

    def without_output_ids(cls, row_start):
        row = start(cls, row_start)
        row.output_ids = []
        return row

    monkeypatch.setattr(Row, "start", classmethod(without_output_ids))
    with pytest.raises(AssertionError):
        for seed in range(12):
            play_crowd(seed)


def test_a_seed_replays_alone():
    assert play(3).scheduler.requests.loads() == play(3).scheduler.requests.loads()
    first, second = HashCluster(5), HashCluster(5)
    first.play()
    second.play()
    assert (first.num_windows, first.now_us) == (second.num_windows, second.now_us)
    assert [story.output for story in first.stories.values()] == [
        story.output for story in second.stories.values()
    ]


@played(range(8), range(20))
def test_losing_an_instance_ends_everything(seeds):
    for seed in seeds:
        lose_an_instance(seed)
        lose_an_instance(seed, levelling_config(seed))


@played((2, 5, 8, 17, 19), range(20))
def test_cost_aware_moves_pages_and_every_token_is_right(seeds):
    clusters = [play_levelling(seed) for seed in seeds]
    assert sum(cluster.num_moves for cluster in clusters) > 10
    assert sum(cluster.num_moves_between_nodes for cluster in clusters) > 3


@played((1, 3, 4, 6, 7, 8, 9, 14), range(16))
def test_requests_share_pages_and_every_token_is_right(seeds):
    clusters = [play_sharing(seed) for seed in seeds]
    assert sum(cluster.scheduler.prefix_sharing.num_hit_tokens for cluster in clusters) > 5000
    assert sum(cluster.num_moves for cluster in clusters) > 10


def is_seen(num_seeds: int = 60, played=lambda seed: HashCluster(seed).play()) -> bool:
    for seed in range(num_seeds):
        try:
            played(seed)
        except Exception:
            return True
    return False


def test_it_sees_frames_that_are_freed_too_early(monkeypatch):
    """Windows that were sent and contain the request count (protocol.md, quarantine)."""
    hold = quarantine.Quarantine.hold

    def hold_too_short(self, frames, last_window, bound, ticket, receivers):
        return hold(
            self, frames, None if last_window is None else last_window - 1, bound, ticket, receivers
        )

    monkeypatch.setattr(quarantine.Quarantine, "hold", hold_too_short)
    assert is_seen()


def test_it_sees_a_hand_off_without_output_ids(monkeypatch):
    received = Row.received.__func__

    def without_output_ids(cls, state):
        row = received(cls, state)
        row.output_ids = []
        return row

    monkeypatch.setattr(Row, "received", classmethod(without_output_ids))
    assert is_seen()


@pytest.mark.parametrize("fault", ["neighbour", "layer 0"])
def test_it_sees_rows_at_wrong_slots(monkeypatch, fault):
    """Rows name slots of the neighbour, or those of the first layer in every layer."""
    follow = HashSlots.follow

    def follow_wrongly(self, table):
        follow(self, table)
        first, total = self.names[0], len(table.experts())
        if fault == "neighbour":
            self.names[0] = lambda *row: (first(*row) + table.num_slots) % total
        else:
            self.names = [first] * len(self.names)

    monkeypatch.setattr(HashSlots, "follow", follow_wrongly)
    assert is_seen(20, played_with_a_table)


def test_it_sees_an_append_at_the_wrong_position(monkeypatch):
    attend = HashInstance._attend

    def append_late(self, layer, request_id, position, query, appends):
        return attend(self, layer, request_id, position + (position % 64 == 5), query, appends)

    monkeypatch.setattr(HashInstance, "_attend", append_late)
    assert is_seen(20)
