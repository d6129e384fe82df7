"""The expert table: every expert has a slot on a seat that serves, whatever was there before."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.transports.random_tables import random_table
from nanocp.values.experts import (
    ExpertTable,
    fewest_seats,
    home_experts,
    home_table,
    num_slots,
    place_experts,
)


@given(st.integers(1, 80), st.integers(1, 9), st.integers(0, 12), st.booleans(), st.data())
def test_every_expert_has_a_slot_on_a_seat_that_serves(experts, seats, redundant, moved, data):
    """Capacity depends on slots alone: replicas give way, and nothing moves that need not."""
    total, fewest = num_slots(experts, seats, redundant), fewest_seats(experts, seats, redundant)
    table = home_table(experts, seats, redundant)
    if moved:
        table = random_table(experts, seats, data.draw(st.integers(0, 99)), total, num_layers=2)
    for _ in range(3):
        serving = data.draw(st.sets(st.integers(0, seats - 1), min_size=1).map(sorted))
        if len(serving) < fewest:
            with pytest.raises(ValueError, match=f"at least {fewest} instances must serve"):
                place_experts(experts, seats, redundant, serving, table)
            continue
        before, table = table, place_experts(experts, seats, redundant, serving, table)
        assert len(table.layers) == len(before.layers) and table.num_slots == total
        for layer in range(len(table.layers)):
            held, old = table.experts(layer), before.experts(layer)
            places = Counter(expert for expert in held if expert >= 0)
            assert sorted(places) == list(range(experts))
            assert all(held[at] < 0 for at in range(len(held)) if at // total not in serving)
            if all(before.at(seat, layer) for seat in serving):
                survived = {*[e for seat in serving for e in before.at(seat, layer).values()]}
                changes = sum(held[at] != e for at, e in enumerate(old) if at // total in serving)
                assert changes == experts - len(survived), "nothing is loaded needlessly"
        if not moved:
            for seat in serving:
                own = home_experts(experts, seat, seats)
                assert [table.at(seat)[slot] for slot in range(len(own))] == list(own)
            assert max(places.values()) == 1, "no replica where none was made"


def test_a_seat_that_returns_takes_its_experts_home_and_leaves_other_replicas():
    """Four experts, two seats, four slots: seat 0 is lost, then comes back."""
    table = ExpertTable.of(4, [0, 1, 3, 3, 2, 3, 3, 3])
    table = place_experts(4, 2, 2, [1], table)
    assert list(table.experts()) == [-1] * 4 + [2, 0, 1, 3]
    assert list(place_experts(4, 2, 2, [0, 1], table).experts()) == [0, 1, -1, -1, 2, -1, -1, 3]


def test_the_shares_are_even_and_in_order():
    assert [list(home_experts(7, seat, 3)) for seat in range(3)] == [[0, 1, 2], [3, 4], [5, 6]]
    assert list(home_table(4, 2, 1).experts(5)) == [0, 1, -1, 2, 3, -1]
    assert home_table(4, 2).at(1) == {0: 2, 1: 3} and not home_table(0, 3).at(0), "a dense model"
    assert (num_slots(64, 4, 6), fewest_seats(64, 4, 6), fewest_seats(64, 4, 0)) == (22, 3, 4)
    assert num_slots(256, 32, 1) == 9 and fewest_seats(256, 32, 1) == 29
