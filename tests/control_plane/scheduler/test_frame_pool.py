"""A pool of frames under random histories, against a plain set."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.scheduler.frame_pool import FramePool

histories = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(1, 12)),
        st.tuples(st.just("give"), st.integers(0, 99)),
    ),
    max_size=60,
)


def frames_of(runs):
    return [start + index for start, length in runs for index in range(length)]


def give_back(pool, runs):
    pool.quarantine(runs)
    pool.free(runs)


@given(st.integers(1, 40), histories)
def test_every_frame_is_free_or_committed_exactly_once(num_frames, history):
    pool, taken = FramePool(num_frames), []
    for action, number in history:
        count = min(number, pool.num_free)
        if action == "take" and count:
            taken.append(pool.take(count))
            assert len(frames_of(taken[-1])) == count
        elif action == "give" and taken:
            give_back(pool, taken.pop(number % len(taken)))
        frames = [*pool.free_frames(), *(frame for runs in taken for frame in frames_of(runs))]
        assert sorted(frames) == list(range(num_frames))
        assert (
            pool.num_committed
            == num_frames - pool.num_free
            == sum(len(frames_of(runs)) for runs in taken)
        )
    for runs in taken:
        give_back(pool, runs)
    assert pool.take(num_frames) == [(0, num_frames)], "neighbours were not joined again"


def test_frames_come_in_one_run_where_one_is_long_enough():
    pool = FramePool(32)
    first, middle, last = pool.take(10), pool.take(4), pool.take(18)
    give_back(pool, first)
    give_back(pool, last)
    assert pool.take(12) == [(14, 12)], "the run of 18 holds it, that of 10 does not"
    assert pool.take(6) in ([(0, 6)], [(26, 6)])
    give_back(pool, middle)


def test_a_page_is_put_behind_the_one_before():
    pool = FramePool(16)
    mine, others, last = pool.take(3), pool.take(2), pool.take(1)
    give_back(pool, others)
    assert pool.take(1, after=last[-1][0]) == [(6, 1)]
    assert pool.take(1, after=frames_of(mine)[-1]) == [(3, 1)]
    assert pool.take(1, after=6) == [(7, 1)]
    assert pool.take(1, after=frames_of(mine)[-1]) != [(3, 1)], "taken: any other will do"


def test_runs_are_gathered_when_none_is_long_enough():
    pool = FramePool(9)
    groups = [pool.take(1) for _ in range(9)]
    for runs in groups[::2]:
        give_back(pool, runs)
    assert sorted(frames_of(pool.take(5))) == [0, 2, 4, 6, 8]
    with pytest.raises(AssertionError, match="1 frames wanted, 0 free"):
        pool.take(1)


def test_what_is_quarantined_is_neither_free_nor_committed():
    pool = FramePool(8)
    runs = pool.take(5)
    pool.quarantine(runs)
    assert (pool.num_free, pool.num_committed, pool.num_quarantined) == (3, 0, 5)
    pool.free(runs)
    assert (pool.num_free, pool.num_committed, pool.num_quarantined) == (8, 0, 0)


def cached(pool, count, first_hash=0):
    """So many pages of a prompt in one run, written."""
    [(start, _)] = runs = pool.take(count)
    for index in range(count):
        pool.cache(start + index, bytes([first_hash + index]))
    return runs


def test_a_page_stays_until_its_frame_is_taken_and_the_last_of_the_longest_free_prompt_goes_first():
    pool = FramePool(8)
    old, new = cached(pool, 3), cached(pool, 3, 10)
    give_back(pool, old)
    give_back(pool, new)
    assert pool.num_free == 8 and sorted(pool.free_frames()) == list(range(8))
    pool.take(3)
    assert [pool.find(bytes([page])) for page in (0, 1, 2, 10, 11, 12)] == [0, 1, None, 3, 4, 5]
    pool.share(0)
    give_back(pool, [(0, 1)])
    pool.take(3)
    assert [pool.find(bytes([page])) for page in (0, 1, 10, 11, 12)] == [0, None, 3, None, None], (
        "0 was used again"
    )


def test_a_shared_frame_is_free_when_the_last_owner_and_the_last_hold_are_gone():
    pool = FramePool(4)
    runs = cached(pool, 2)
    pool.share(0)
    pool.quarantine(runs)
    assert (pool.num_committed, pool.num_quarantined, pool.num_free) == (1, 1, 2), (
        "the first has another owner"
    )
    pool.share(1)
    assert (pool.num_committed, pool.num_quarantined, pool.num_free) == (2, 0, 2), (
        "the second has one again"
    )
    pool.free(runs)
    assert (pool.num_committed, pool.num_quarantined, pool.num_free) == (2, 0, 2)
    pool.quarantine(runs)
    pool.share(0)
    pool.quarantine([(0, 1)])
    pool.free(runs)
    assert (pool.num_committed, pool.num_quarantined, pool.num_free) == (0, 1, 3), (
        "the first is held twice"
    )
    pool.free([(0, 1)])
    assert (pool.num_committed, pool.num_quarantined, pool.num_free) == (0, 0, 4)


def test_a_page_that_is_there_already_is_not_found_twice():
    pool = FramePool(4)
    first, second = cached(pool, 1), cached(pool, 1)
    assert pool.find(bytes([0])) == 0
    give_back(pool, second)
    give_back(pool, first)
    assert len(frames_of(pool.take(4))) == 4 and pool.find(bytes([0])) is None
