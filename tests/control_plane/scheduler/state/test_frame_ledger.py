"""The ledger of one instance's frames under random histories, against a plain set."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.scheduler.state.frame_ledger import FrameLedger, FrameRun
from nanocp.config.cluster import ClusterConfig

histories = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(1, 12)),
        st.tuples(st.just("give"), st.integers(0, 99)),
    ),
    max_size=60,
)


def frames_of(runs):
    return [start + index for start, length in runs for index in range(length)]


def give_back(ledger, runs):
    ledger.quarantine(runs)
    ledger.free(runs)


@given(st.integers(1, 40), histories)
def test_every_frame_is_free_or_committed_exactly_once(num_frames, history):
    ledger, taken = FrameLedger(ClusterConfig(num_frames=num_frames)), []
    for action, number in history:
        count = min(number, ledger.num_free)
        if action == "take" and count:
            taken.append(ledger.take(count))
            assert len(frames_of(taken[-1])) == count
        elif action == "give" and taken:
            give_back(ledger, taken.pop(number % len(taken)))
        frames = [*ledger.free_frames(), *(frame for runs in taken for frame in frames_of(runs))]
        assert sorted(frames) == list(range(num_frames))
        assert (
            ledger.num_committed
            == num_frames - ledger.num_free
            == sum(len(frames_of(runs)) for runs in taken)
        )
    for runs in taken:
        give_back(ledger, runs)
    assert ledger.take(num_frames) == [(0, num_frames)], "neighbours were not joined again"


def test_frames_come_in_one_run_where_one_is_long_enough():
    ledger = FrameLedger(ClusterConfig(num_frames=32))
    first, middle, last = ledger.take(10), ledger.take(4), ledger.take(18)
    give_back(ledger, first)
    give_back(ledger, last)
    assert ledger.take(12) == [(14, 12)], "the run of 18 holds it, that of 10 does not"
    assert ledger.take(6) in ([(0, 6)], [(26, 6)])
    give_back(ledger, middle)


def test_a_page_is_put_behind_the_one_before():
    ledger = FrameLedger(ClusterConfig(num_frames=16))
    mine, others, last = ledger.take(3), ledger.take(2), ledger.take(1)
    give_back(ledger, others)
    assert ledger.take(1, after=last[-1][0]) == [(6, 1)]
    assert ledger.take(1, after=frames_of(mine)[-1]) == [(3, 1)]
    assert ledger.take(1, after=6) == [(7, 1)]
    assert ledger.take(1, after=frames_of(mine)[-1]) != [(3, 1)], "taken: any other will do"


def test_runs_are_gathered_when_none_is_long_enough():
    ledger = FrameLedger(ClusterConfig(num_frames=9))
    groups = [ledger.take(1) for _ in range(9)]
    for runs in groups[::2]:
        give_back(ledger, runs)
    assert sorted(frames_of(ledger.take(5))) == [0, 2, 4, 6, 8]
    with pytest.raises(AssertionError, match="1 frames wanted, 0 free"):
        ledger.take(1)


def test_what_is_quarantined_is_neither_free_nor_committed():
    ledger = FrameLedger(ClusterConfig(num_frames=8))
    runs = ledger.take(5)
    ledger.quarantine(runs)
    assert (ledger.num_free, ledger.num_committed, ledger.num_quarantined) == (3, 0, 5)
    ledger.free(runs)
    assert (ledger.num_free, ledger.num_committed, ledger.num_quarantined) == (8, 0, 0)


def cached(ledger, count, first_hash=0):
    """So many pages of a prompt in one run, written."""
    [(start, _)] = runs = ledger.take(count)
    for index in range(count):
        ledger.cache(start + index, bytes([first_hash + index]))
    return runs


def test_a_page_stays_until_its_frame_is_taken_and_the_last_of_the_longest_free_prompt_goes_first():
    ledger = FrameLedger(ClusterConfig(num_frames=8))
    old, new = cached(ledger, 3), cached(ledger, 3, 10)
    give_back(ledger, old)
    give_back(ledger, new)
    assert ledger.num_free == 8 and sorted(ledger.free_frames()) == list(range(8))
    ledger.take(3)
    assert [ledger.find(bytes([page])) for page in (0, 1, 2, 10, 11, 12)] == [0, 1, None, 3, 4, 5]
    ledger.share(0)
    give_back(ledger, [FrameRun(0, 1)])
    ledger.take(3)
    assert [ledger.find(bytes([page])) for page in (0, 1, 10, 11, 12)] == [
        0,
        None,
        3,
        None,
        None,
    ], "0 was used again"


def test_a_shared_frame_is_free_when_the_last_owner_and_the_last_hold_are_gone():
    ledger = FrameLedger(ClusterConfig(num_frames=4))
    runs = cached(ledger, 2)
    ledger.share(0)
    ledger.quarantine(runs)
    assert (ledger.num_committed, ledger.num_quarantined, ledger.num_free) == (1, 1, 2), (
        "the first has another owner"
    )
    ledger.share(1)
    assert (ledger.num_committed, ledger.num_quarantined, ledger.num_free) == (2, 0, 2), (
        "the second has one again"
    )
    ledger.free(runs)
    assert (ledger.num_committed, ledger.num_quarantined, ledger.num_free) == (2, 0, 2)
    ledger.quarantine(runs)
    ledger.share(0)
    ledger.quarantine([FrameRun(0, 1)])
    ledger.free(runs)
    assert (ledger.num_committed, ledger.num_quarantined, ledger.num_free) == (0, 1, 3), (
        "the first is held twice"
    )
    ledger.free([FrameRun(0, 1)])
    assert (ledger.num_committed, ledger.num_quarantined, ledger.num_free) == (0, 0, 4)


def test_frames_of_a_closed_ledger_can_be_shared_and_reserved():
    ledger = FrameLedger(ClusterConfig(num_frames=4))
    give_back(ledger, cached(ledger, 1))
    ledger.close()
    ledger.share(0)
    ledger.reserve(3)
    assert (ledger.num_free, ledger.num_withheld) == (0, 2)
    ledger.reopen()
    assert (ledger.num_free, ledger.num_committed, ledger.num_quarantined) == (2, 1, 1)


def test_a_page_that_is_there_already_is_not_found_twice():
    ledger = FrameLedger(ClusterConfig(num_frames=4))
    first, second = cached(ledger, 1), cached(ledger, 1)
    assert ledger.find(bytes([0])) == 0
    give_back(ledger, second)
    give_back(ledger, first)
    assert len(frames_of(ledger.take(4))) == 4 and ledger.find(bytes([0])) is None
