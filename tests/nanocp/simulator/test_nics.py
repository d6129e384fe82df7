"""Transfers that share a NIC arrive as if they took turns of small chunks."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanocp.simulator.costs.cluster_file import load_cluster_file
from nanocp.simulator.nics import Nics

FILE = load_cluster_file("h200x32-deepseek-v3")
GB_PER_S = 1e3
"""Bytes per us of a rate in GB/s."""


def played(file, starts):
    """(ticket, instance) -> us at which it has arrived; starts are (us, instance, bytes, kind)."""
    nics, found, ticket = Nics(file), {}, 0
    upcoming = sorted(starts, key=lambda start: start[0])
    while ticket < len(upcoming) or nics.next_us is not None:
        at_us = upcoming[ticket][0] if ticket < len(upcoming) else None
        if at_us is not None and (nics.next_us is None or at_us < nics.next_us):
            nics.start(ticket, *upcoming[ticket][1:], at_us)
            ticket += 1
        else:
            now_us = nics.next_us
            found |= dict.fromkeys(nics.arrived(now_us), now_us)
    return found


def by_turns(file, starts):
    """The slow reference: each microsecond every transfer under way gets its turn."""
    upcoming = list(enumerate(sorted(starts, key=lambda start: start[0])))
    left, found, now_us = {}, {}, 0
    while upcoming or left:
        while upcoming and upcoming[0][1][0] <= now_us:
            ticket, (_, instance, num_bytes, is_from_prefill) = upcoming.pop(0)
            left[ticket, instance] = [num_bytes, is_from_prefill]
        num_from_prefill = sum(is_from_prefill for _, is_from_prefill in left.values())
        sharing = [instance for _, instance in left]
        for (_, instance), transfer in left.items():
            turn = file.ingest_gb_per_s * GB_PER_S / sharing.count(instance)
            if transfer[1] and file.prefill_gb_per_s:
                turn = min(turn, file.prefill_gb_per_s * GB_PER_S / num_from_prefill)
            transfer[0] -= turn
        now_us += 1
        for key in [key for key, (num_bytes, _) in left.items() if num_bytes <= 0]:
            found[key] = now_us
            del left[key]
    return found


@given(
    st.lists(
        st.tuples(st.integers(0, 60), st.integers(0, 3), st.integers(1, 2_000_000), st.booleans()),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from([None, 40.0, 120.0]),
)
def test_transfers_arrive_as_by_turns(starts, prefill_gb_per_s):
    file = replace(FILE, prefill_gb_per_s=prefill_gb_per_s)
    found, expected = played(file, starts), by_turns(file, starts)
    assert found.keys() == expected.keys()
    # The reference lets a transfer keep its whole last microsecond, and so do those behind it.
    for key, at_us in expected.items():
        assert found[key] == pytest.approx(at_us, abs=len(starts) + 1)


def test_a_short_prompt_does_not_wait_behind_a_long_one():
    found = played(FILE, [(0, 2, 70e9, True), (10, 2, 50e6, True)])
    assert found[1, 2] == pytest.approx(10 + 2 * 1000, abs=2)
    assert found[0, 2] == pytest.approx(1_400_000 + 1000, abs=2)


def test_prefill_sends_no_more_than_it_can():
    file = replace(FILE, prefill_gb_per_s=10.0)
    assert played(file, [(0, 1, 50e6, True)]) == {(0, 1): 5000}
    assert played(file, [(0, 1, 50e6, False)]) == {(0, 1): 1000}, "another instance sends"
    both = played(file, [(0, 1, 50e6, True), (0, 2, 50e6, True)])
    assert both == {(0, 1): 10_000, (1, 2): 10_000}
