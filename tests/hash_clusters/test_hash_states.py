"""Whole clusters whose rows have states: every token is right, wherever states go.

A state knows all tokens in their order, so one that is lost, doubled, stale or of another position
makes every later token wrong. `STATE_SEEDS=1000` plays more; a seed that fails says how to replay
it.
"""

import os
from collections import Counter

import pytest

from control_plane.scheduler.pages.offload import Offload
from harness.hash_clusters import hash_play
from harness.hash_clusters.hash_model import HashModel, fold
from harness.hash_clusters.hash_state_pool import MAX_DEPTH
from harness.hash_clusters.kinds.hash_states import (
    Stateful,
    StatefulFailovers,
    StatefulLosses,
    StatefulOperators,
    make_states,
    play,
    play_offload,
)
from nanocp.values.plan import CARRY_PAGE

NUM_SEEDS = int(os.environ.get("STATE_SEEDS", "200"))
QUICK = (71001, 71002, 71006, 71008, 71009, 71011, 71012, 71018, 71021, 71022)
SEEN_BY = (71004, 71006, 71037, 71060, 71172, 7545)
"""Each sees some of the mutants (tests/mutants/of_states.py), or saw a fault that was mended."""
KINDS = {Stateful, StatefulFailovers, StatefulLosses, StatefulOperators}


@pytest.mark.parametrize(
    "seeds", [QUICK, pytest.param(range(NUM_SEEDS), marks=pytest.mark.system)], ids=["quick", "all"]
)
def test_every_token_is_right_with_states(seeds):
    clusters = [play(seed) for seed in seeds]
    assert {type(cluster) for cluster in clusters} == KINDS
    assert {cluster.config.cluster.carry_pages for cluster in clusters} == {1, 2, 3}
    windows = [(each.depth, each.config.scheduler.steps_per_window) for each in clusters]
    assert set(windows) == {(1, 1), (1, 4), (MAX_DEPTH, 1), (MAX_DEPTH, 4)}
    counts = Counter()
    for cluster in clusters:
        counts["hand_offs"] += cluster.num_hand_offs
        counts["preemptions"] += cluster.num_preemptions
        counts["losses"] += getattr(cluster, "num_losses", 0)
    assert any(each.depth == MAX_DEPTH and each.num_hand_offs for each in clusters)
    assert counts["hand_offs"] >= 20 and counts["preemptions"] >= 5 and counts["losses"] >= 5


@pytest.mark.parametrize(
    "seeds",
    [range(8), pytest.param(range(NUM_SEEDS // 4), marks=pytest.mark.system)],
    ids=["quick", "all"],
)
def test_states_go_to_slots_and_come_back(seeds, monkeypatch):
    """A preempted row goes on with its state, or with one that a prefill has made."""
    num_fetched = []
    find = Offload._found

    def found(offload, request):
        pages = find(offload, request)
        num_fetched.append(sum(page.page >= CARRY_PAGE for _, page in pages))
        return pages

    monkeypatch.setattr(Offload, "_found", found)
    clusters = [play_offload(seed) for seed in seeds]
    assert sum(cluster.num_preemptions for cluster in clusters) >= 3
    assert sum(num_fetched) >= 3 and 0 in num_fetched


@pytest.mark.parametrize("seed", SEEN_BY)
def test_a_seed_that_sees_planted_faults_is_right_without_them(seed, monkeypatch):
    monkeypatch.setattr(hash_play, "MAX_TURNS", 150_000)
    cluster = make_states(seed)
    cluster.hurries = True
    cluster.play()


def test_a_state_knows_its_tokens_in_their_order():
    model = HashModel(3, linear_layers=(1,))
    assert model.states([5, 6, 7]) != model.states([6, 5, 7])
    assert fold(fold(0, 1), 2) != fold(fold(0, 2), 1)
    assert len(model.prefill([5] * 70, 70)[0]) == 2, "a linear layer has no KV"


def test_pages_of_states_are_behind_all_pages_of_kv():
    cluster = Stateful(0)
    assert cluster.config.cluster.max_model_len < CARRY_PAGE
