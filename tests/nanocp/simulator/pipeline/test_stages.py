"""Stages of a simulated pipeline: the recurrence, idle time by cause, and waits for moved KV."""

import pytest

from nanocp.simulator.pipeline.stages import EventHeap, Stages, TimedPass
from nanocp.values.passes import LayerMove, LayerMoves

HOP_US = 2.0
FRAME_US = 10.0


class Played:
    """Stages, and when passes and layer moves were done."""

    def __init__(self, split, **options):
        self.heap = EventHeap()
        self.done = {}
        self.moved = []
        self.worked = []
        self.stages = Stages(
            self.heap,
            split,
            lambda num_frames: FRAME_US * num_frames,
            lambda number: self.done.setdefault(number, self.heap.now_us),
            lambda stage, number: self.moved.append((stage, number)),
            lambda *worked: self.worked.append(worked),
            **options,
        )

    def play(self, *items):
        for item in items:
            self.stages.send(item)
        for _ in range(10_000):
            if (call := self.heap.next()) is None:
                return
            self.stages.count_idle(True)
            call()
        raise AssertionError("the stages never come to an end")


def a_pass(number, layer_us, tail_us=0.0, after=-1, shares_us=()):
    return TimedPass(number, after, layer_us, tail_us, shares_us, HOP_US)


def recurrence(split, passes):
    """start(s, p) = max(end(s-1, p) + hop, end(s, p-1)), and p after the tokens that it needs."""
    ends, done = [0.0] * len(split), []
    for one in passes:
        here = done[one.after] if one.after >= 0 else 0.0
        for stage, count in enumerate(split):
            begin = max(here, ends[stage])
            ends[stage] = begin + count * one.layer_us
            if stage == len(split) - 1:
                ends[stage] += one.tail_us
            here = ends[stage] + HOP_US
        done.append(here)
    return done


def test_stages_are_as_fast_as_the_recurrence_says():
    passes = [a_pass(n, 5.0 + n % 3, tail_us=n % 4 * 7.0, after=max(n - 3, -1)) for n in range(12)]
    for split in [(4, 4, 4), (1, 6, 5), (12,)]:
        played = Played(split)
        played.play(*passes)
        assert list(played.done.values()) == pytest.approx(recurrence(split, passes))


def test_idle_time_has_its_cause():
    played = Played((2, 2))
    played.play(a_pass(0, 10.0, tail_us=30.0), a_pass(1, 10.0, tail_us=30.0, after=0))
    first, last = played.stages.stages
    # 0-20 first, 22-72 last, 74-94 first, 96-146 last, and a hop until the tokens are known.
    assert first.idle_us == {"fill": 0.0, "tail": 108.0, "kv": 0.0}
    assert last.idle_us == {"fill": 40.0, "tail": 8.0, "kv": 0.0}
    assert (first.busy_us, last.busy_us) == (40.0, 100.0)


def test_a_stage_runs_its_layers_before_the_first_new_one_and_waits_there():
    moves = LayerMoves(1, (3, 1), (LayerMove(2, 1, 0, 2, ((0, 50),)),))
    played = Played((2, 2))
    played.play(a_pass(0, 10.0), moves, a_pass(1, 10.0))
    # The last stage ends pass 0 at 42 and sends for 500 us. Until then the first one has run two
    # layers of pass 1; the third goes from 542 to 552, and the last stage's from 554 to 564.
    assert played.done == {0: 44.0, 1: 566.0}
    assert played.stages.stall_us == 542.0 - 40.0
    assert sorted(played.moved) == [(0, 1), (1, 1)]


def test_kv_that_comes_before_its_stage_knows_of_it_is_not_waited_for():
    moves = LayerMoves(1, (1, 3), (LayerMove(1, 0, 1, 2, ((0, 1),)),))
    played = Played((2, 2))
    played.play(a_pass(0, 100.0), moves, a_pass(1, 100.0))
    assert played.stages.stall_us == 0.0
    assert played.done == {0: 404.0, 1: 704.0}
    assert not played.stages.stages[1].expected


def test_spread_sampling_is_done_when_the_last_share_is():
    played = Played((1, 1))
    played.play(a_pass(0, 10.0, shares_us=(5.0, 40.0)))
    assert played.done == {0: 62.0}
    played = Played((1, 1))
    played.play(a_pass(0, 10.0, shares_us=(40.0, 5.0)))
    assert played.done == {0: 64.0}


def test_each_stage_of_the_bound_has_an_equal_share():
    played = Played((2, 2), is_fluid=True)
    played.play(a_pass(0, 10.0, tail_us=20.0))
    assert played.done == {0: 30.0 + HOP_US + 30.0 + HOP_US}


def test_a_slow_stage_takes_longer_and_says_so():
    played = Played((2, 2), slowness={1: 3.0})
    played.play(a_pass(0, 5.0, tail_us=4.0))
    assert played.worked == [(0, 0, 10.0), (1, 0, 42.0)]
    assert played.done == {0: 10 + HOP_US + 42 + HOP_US}
