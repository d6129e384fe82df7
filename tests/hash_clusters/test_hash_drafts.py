"""Whole clusters whose rows have drafts: every token is right, whatever was guessed.

Few or most drafts are right, by seed. `DRAFT_SEEDS=1000` plays more; a seed that fails says how to
replay it.
"""

import os
from collections.abc import Iterable
from itertools import chain

import numpy as np
import pytest

from harness.hash_clusters import hash_play
from harness.hash_clusters.hash_cluster import HashCluster
from harness.hash_clusters.hash_instance import HashInstance
from harness.hash_clusters.hash_model import HashModel
from harness.hash_clusters.kinds.hash_drafts import (
    Drafting,
    DraftingFailovers,
    DraftingLosses,
    DraftingOffload,
    DraftingOffloadLosses,
    make_drafts,
    play,
)

NUM_SEEDS = int(os.environ.get("DRAFT_SEEDS", "200"))
SEEN_BY = (81005, 81007, 81015, 81205, 81363)
"""Each sees some of the mutants (tests/mutants/of_drafts.py), and they are few."""
QUICK = (
    81011, 81024, 81025, 81045, 81048, 81055, 81062, 81064, 81067, 81069, 81083, 81110,
    81124, 81132, 81056, 81159,
)  # fmt: skip
KINDS = {Drafting, DraftingOffload, DraftingLosses, DraftingOffloadLosses, DraftingFailovers}


@pytest.mark.parametrize("seed", SEEN_BY)
def test_a_seed_that_sees_planted_faults_is_right_without_them(seed, monkeypatch):
    monkeypatch.setattr(hash_play, "MAX_TURNS", 150_000)
    make_drafts(seed).play()


@pytest.mark.parametrize(
    "seeds", [QUICK, pytest.param(range(NUM_SEEDS), marks=pytest.mark.system)], ids=["quick", "all"]
)
def test_every_token_is_right_with_drafts(seeds):
    assert_reached([play(seed) for seed in seeds])


def assert_reached(clusters: Iterable[HashCluster]) -> None:
    """A harness that no longer reaches what it is for would be green for ever."""
    clusters = list(clusters)
    assert {type(cluster) for cluster in clusters} == KINDS
    assert {cluster.config.scheduler.num_drafts for cluster in clusters} == {1, 2, 3}
    assert {cluster.config.scheduler.steps_per_window for cluster in clusters} == {1, 4}
    for name, least in (
        ("num_drafted", 1500),
        ("num_accepted", 1000),
        ("num_judged", 300),
        ("num_moves", 30),
        ("num_hand_offs", 50),
        ("num_resyncs", 30),
        ("num_calls_with_parked_rows", 100),
        ("num_preemptions", 1),
        ("num_losses", 3),
        ("num_terms", 5),
        ("num_changes", 2),
        ("num_failovers", 3),
    ):
        counted = sum(getattr(cluster, name, 0) for cluster in clusters)
        assert counted >= least, (name, counted)
    offloads = [cluster.scheduler.offload for cluster in clusters]
    assert sum(sum(each.num_fetched) for each in offloads if each) > 0
    widths = [cluster.widths for cluster in clusters]
    assert any(0 in each and max(each) > 1 for each in widths), "paused, or no room"
    assert any(each == {1} for each in widths)


def test_without_right_drafts_no_row_comes_further_than_its_steps():
    cluster = make_drafts(81136)
    for process in cluster.processes:
        process.instance.draft_percent = 0
    cluster.play()
    assert cluster.num_drafted > 20 and cluster.num_accepted == 0


def test_the_judge_sees_a_position_that_the_mtp_layer_skips(monkeypatch):
    """Only drafts would suffer, so that no token shows it."""
    run_layers = HashInstance._run_layers

    def only_the_last(self, window, inputs, layers):
        if layers.start == self._model.num_layers:
            live = [each for each in chain(*inputs) if each.live]
            last = {each.row.request_id: each for each in live}
            for each in live:
                each.live = each is last[each.row.request_id]
        return run_layers(self, window, inputs, layers)

    monkeypatch.setattr(HashInstance, "_run_layers", only_the_last)
    with pytest.raises(AssertionError, match="lacks KV"):
        make_drafts(81132).play()


def test_the_judge_sees_kv_of_a_prompt_that_is_one_position_off(monkeypatch):
    prefill = HashModel.prefill

    def shifted(self, token_ids, num_tokens, has_mtp=False):
        pages = prefill(self, token_ids, num_tokens, has_mtp)
        for page in pages:
            page[-1] = np.roll(page[-1], 1)
        return pages

    monkeypatch.setattr(HashModel, "prefill", shifted)
    with pytest.raises(AssertionError, match="lacks KV"):
        make_drafts(81132).play()
