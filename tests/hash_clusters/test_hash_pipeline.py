"""Whole pipelines of stages with a HashModel: every token is right, and every frame comes back.

`make seeds KIND=pipeline-chaos` plays more.
"""

from collections import Counter

import pytest

from data_plane.instance.stage_edge import StageEdge
from harness.hash_clusters.pipeline.hash_pipeline import HashPipeline, play
from harness.hash_clusters.pipeline.hash_stage import HashStageModel


def test_every_token_is_right_and_every_frame_comes_back():
    pipelines = [play(seed) for seed in (0, 1, 2, 3, 4, 7, 8, 11)]
    # A harness that no longer reaches what it is for would be green for ever.
    assert sum(pipeline.counts["tokens"] for pipeline in pipelines) > 1000
    assert sum(pipeline.counts["chunks"] for pipeline in pipelines) > 300
    assert sum(p.scheduler.prefix_sharing.num_hit_tokens for p in pipelines) > 200


@pytest.mark.parametrize("first", [0, pytest.param(25, marks=pytest.mark.system)])
def test_every_token_is_right_while_layers_move(first):
    pipelines = [play(seed, is_chaos=True) for seed in range(first, first + 25)]
    counts = sum((pipeline.counts for pipeline in pipelines), Counter())
    assert counts["changes"] > 100 and counts["moved layers"] > 200
    assert counts["sent ahead"] > 5 and counts["sent at the mark"] > 200
    assert counts["good copies"] > 0
    # Preempted requests resume, and no token of theirs is lost or doubled.
    assert counts["preemptions"] > 2 and counts["marks under chunks"] > 20


@pytest.mark.system
@pytest.mark.parametrize("first", range(0, 1000, 250))
def test_every_token_is_right_while_layers_move_in_1000_pipelines(first):
    for seed in range(first, first + 250):
        play(seed, is_chaos=True)


def test_a_seed_replays_alone():
    first, second = HashPipeline(3, 5), HashPipeline(3, 5)
    first.play()
    second.play()
    assert (first.counts, first.now_us) == (second.counts, second.now_us)


def test_it_sees_kv_at_the_wrong_position(monkeypatch):
    run_layer = HashStageModel.run_layer

    def wrong(self, layer, place, spans, rows):
        after = run_layer(self, layer, place, spans, rows)
        if layer == 1:
            (span, frames), *_ = spans
            self.kv[place, frames[-1], (span.first + span.num_tokens - 1) % 64] += 1
        return after

    monkeypatch.setattr(HashStageModel, "run_layer", wrong)
    with pytest.raises(AssertionError, match=r"is [0-9]+, not"):
        play(1)


def test_a_layer_that_two_stages_run_is_an_error_by_name(monkeypatch):
    apply = StageEdge._apply

    def one_more(self, plan):
        apply(self, plan)
        if self.number == 0 and plan.number == 3:
            self.layers.own = range(self.layers.own.start, self.layers.own.stop - 1)

    monkeypatch.setattr(StageEdge, "_apply", one_more)
    with pytest.raises(RuntimeError, match=r"got \(pass, layout, next layer\)"):
        play(1)
