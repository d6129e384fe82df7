"""WaterFill against brute force, and CP degrees by length."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.scheduler.policies.cp_degree import cp_degree
from control_plane.scheduler.policies.waterfill import waterfill

levels = st.lists(st.integers(0, 9), min_size=1, max_size=4)


def peak(levels, shares):
    return max(level + share for level, share in zip(levels, shares, strict=True))


@given(levels, st.integers(0, 8))
def test_waterfill_conserves_and_minimises_the_peak(levels, amount):
    shares = waterfill(levels, amount)
    assert sum(shares) == amount and min(shares) >= 0
    every_split = (
        split for split in product(range(amount + 1), repeat=len(levels)) if sum(split) == amount
    )
    assert peak(levels, shares) == min(peak(levels, split) for split in every_split)


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=32), st.integers(0, 10**9))
def test_waterfill_fills_the_lowest_level(levels, amount):
    shares = waterfill(levels, amount)
    filled = [level + share for level, share in zip(levels, shares, strict=True) if share]
    dry = [level for level, share in zip(levels, shares, strict=True) if not share]
    assert sum(shares) == amount
    assert not filled or max(filled) - min(filled) <= 1
    assert not filled or not dry or max(filled) - 1 <= min(dry)


@pytest.mark.parametrize(("levels", "amount"), [([], 1), ([1], -1)])
def test_waterfill_says_what_it_cannot_spread(levels, amount):
    with pytest.raises(ValueError, match="cannot spread"):
        waterfill(levels, amount)


def test_cp_degree_takes_the_first_bucket_that_is_longer():
    buckets = ((1024, 1), (2048, 2))
    lengths = [1, 1023, 1024, 2047, 2048, 10**6]
    assert [cp_degree(length, buckets, 4) for length in lengths] == [1, 1, 2, 2, 4, 4]
    assert cp_degree(5, (), 4) == 4
