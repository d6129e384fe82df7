"""EPLB written from its description gives the tables of its own example."""

import pytest

from benchmarks.simulated.expert_balance import eplb


@pytest.mark.parametrize(("loads", "table"), [
    ([90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
     [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1]),
    ([20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
     [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1]),
])  # fmt: skip
def test_eplbs_own_example(loads, table):
    """12 experts in 4 groups, on 8 instances of 2 nodes with 2 slots each."""
    held = eplb(loads, 8, 2, groups=4, nodes=2)
    theirs = [table[at : at + 2] for at in range(0, 16, 2)]
    assert sorted(map(sorted, held)) == sorted(map(sorted, theirs))
