"""A pool of frames under random histories, against a plain set."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.page_table import FramePool

histories = st.lists(
    st.one_of(st.tuples(st.just("take"), st.integers(1, 12)), st.tuples(st.just("give"), st.integers(0, 99))),
    max_size=60,
)


@given(st.integers(1, 40), histories)
@settings(deadline=None)
def test_every_frame_is_free_or_taken_exactly_once(num_frames, history):
    pool, taken = FramePool(num_frames), []
    for action, number in history:
        if action == "take":
            count = min(number, pool.num_free)
            taken.append(pool.take(count))
            assert len(taken[-1]) == count
        elif taken:
            pool.give_back(taken.pop(number % len(taken)))
        frames = [*pool.free_frames(), *(frame for group in taken for frame in group)]
        assert sorted(frames) == list(range(num_frames))
        assert pool.num_free == num_frames - sum(map(len, taken))
    for group in taken:
        pool.give_back(group)
    assert pool.take(num_frames) == list(range(num_frames)), "neighbours were not joined again"


def test_frames_come_in_one_run_where_one_is_long_enough():
    pool = FramePool(32)
    first, middle, last = pool.take(10), pool.take(4), pool.take(18)
    pool.give_back(first)
    pool.give_back(last)
    assert pool.take(12) == list(range(14, 26)), "the run of 18 holds it, that of 10 does not"
    assert pool.take(6) in (list(range(6)), list(range(26, 32)))
    pool.give_back(middle)


def test_a_page_is_put_behind_the_one_before():
    pool = FramePool(16)
    mine, others, last = pool.take(3), pool.take(2), pool.take(1)
    pool.give_back(others)
    assert pool.take(1, after=last[-1]) == [6]
    assert pool.take(1, after=mine[-1]) == [3]
    assert pool.take(1, after=6) == [7]
    assert pool.take(1, after=mine[-1]) != [3], "taken: any other will do"


def test_runs_are_gathered_when_none_is_long_enough():
    pool = FramePool(9)
    groups = [pool.take(1) for _ in range(9)]
    for group in groups[::2]:
        pool.give_back(group)
    assert sorted(pool.take(5)) == [0, 2, 4, 6, 8]
    with pytest.raises(AssertionError, match="1 frames wanted, 0 free"):
        pool.take(1)
