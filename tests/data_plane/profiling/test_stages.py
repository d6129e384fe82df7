"""Processor time of a pipeline's stages: how long passes take if each stage has a core."""

import weakref

import pytest

from data_plane.profiling.stages import PassTime, makespan_us
from nanocp.config.passes import PassesConfig
from nanocp.simulator.fit.pipeline import (
    LoadPhase,
    PipelinePlay,
    apart,
    errors,
    measure,
    medians,
    mixes,
)
from nanocp.simulator.pipeline.fit import MeasuredPass
from nanocp.values.passes import Span


def passes(*stage_us, after=-1):
    return [
        PassTime(number, after if after < 0 else number - after, (), list(times))
        for number, times in enumerate(stage_us)
    ]


def test_a_stage_runs_one_pass_at_a_time_and_not_before_the_stage_before_it():
    assert makespan_us(passes((2, 3), (2, 3), (2, 3))) == 2 + 3 * 3
    assert makespan_us(passes((4, 3), (4, 3))) == 4 + 4 + 3


def test_a_pass_waits_for_the_tokens_that_it_begins_with():
    assert makespan_us(passes((2, 3), (2, 3), (2, 3), after=1)) == 3 * 5


@pytest.mark.system
def test_a_pipeline_is_timed_while_its_layers_move(tiny_checkpoint):
    config = PassesConfig(max_pass_tokens=100, layer_policy="chaos_layers", layout_window=1)
    play = PipelinePlay(tiny_checkpoint, [LoadPhase(4, 60, 30, 60)], config)
    stage = weakref.ref(play._stages._timed[0].stage)
    played = play.run()
    del play
    assert stage() is None, "the memory of a pipeline goes with it, for the next one"
    assert len(played.passes) >= 60 and played.num_changes > 1
    for each in played.passes:
        assert len(each.layers_us) == 3, "all layers but the last"
        assert sum(each.stage_us) > sum(each.layers_us) + each.sample_us
        assert (each.sample_us > 0) == any(span.samples for span in each.spans)
    assert any(move.num_frames and move.us for move in played.moves)


@pytest.mark.system
def test_requests_of_a_warm_up_are_in_no_pass_that_counts(tiny_checkpoint):
    warm_up, one_row = LoadPhase(8, 2, 9, 3), LoadPhase(1, 20, 30, 5)
    played = PipelinePlay(tiny_checkpoint, [one_row], PassesConfig(), 1, warm_up=warm_up).run()
    assert [len(each.spans) for each in played.passes] == [1] * len(played.passes)
    assert len(played.passes) >= 5 and len(played.works) > 8


@pytest.mark.system
def test_both_forms_are_judged_on_passes_they_have_not_seen(tiny_checkpoint):
    passes = {kind: mixes(tiny_checkpoint, kind, is_quick=True) for kind in ("greedy", "mixed")}
    assert {work for one in passes["mixed"] for work in one.works} == {0, 1, 3, 4, 8, 15}
    for found in errors(passes, 16, 4).values():
        assert list(found) == ["greedy", "mixed"]
        assert all(0 < error.layer < 5 and 0 < error.sampling < 5 for error in found.values())


def test_a_pass_counts_with_the_median_of_its_plays():
    spans = (Span(1, 9, 1, True),)
    plays = [[MeasuredPass(spans, layer, 10 * layer, (0,), 5.0)] for layer in (90.0, 500.0, 110.0)]
    assert medians(plays) == [MeasuredPass(spans, 110.0, 1100.0, (0,), 5.0)]
    assert apart(plays[::2]) == pytest.approx((0.2, 0.2, 0.0))
    besides_us = (3.0, None, 5.0)
    plays = [[play[0]._replace(stage_us=us)] for play, us in zip(plays, besides_us, strict=True)]
    assert medians(plays)[0].stage_us == 4.0
    other = [MeasuredPass((Span(1, 8, 1, True),), 1.0, 1.0)]
    with pytest.raises(AssertionError, match="plays differ"):
        medians([plays[0], other])


@pytest.mark.system
def test_each_play_of_the_mixes_has_the_same_passes(tiny_checkpoint):
    measured = measure(tiny_checkpoint, ("greedy", "mixed"), is_quick=True)
    assert set(measured.passes) == set(measured.apart) == {"greedy", "mixed"}
    assert all(error.layer > 0 and error.sampling > 0 for error in measured.apart.values())
