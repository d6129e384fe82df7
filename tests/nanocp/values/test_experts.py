"""The expert table: every expert has one slot, on a seat that serves, whatever was there before."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanocp.values.experts import fewest_seats, home_experts, home_table, num_slots, place_experts


@given(st.integers(1, 80), st.integers(1, 9), st.integers(0, 12), st.data())
def test_every_expert_has_a_slot_of_its_own_on_a_seat_that_serves(experts, seats, redundant, data):
    total = num_slots(experts, seats, redundant)
    fewest = fewest_seats(experts, seats, redundant)
    table = home_table(experts, seats)
    for _ in range(3):
        serving = data.draw(st.sets(st.integers(0, seats - 1), min_size=1).map(sorted))
        if len(serving) < fewest:
            with pytest.raises(ValueError, match=f"at least {fewest} instances must serve"):
                place_experts(experts, seats, redundant, serving, table)
            continue
        before, table = table, place_experts(experts, seats, redundant, serving, table)
        places = list(zip(table.seats, table.slots, strict=True))
        assert len(set(places)) == experts
        assert all(seat in serving and 0 <= slot < total for seat, slot in places)
        held = [table.at(seat) for seat in range(seats)]
        assert sorted(e for each in held for e in each.values()) == list(range(experts))
        for seat in serving:
            own = home_experts(experts, seat, seats)
            assert [held[seat][slot] for slot in range(len(own))] == list(own)
        # An expert without its own seat stays where it was, so that nothing is loaded anew.
        for expert, seat in enumerate(before.seats):
            home = next(s for s in range(seats) if expert in home_experts(experts, s, seats))
            if home not in serving and seat in serving:
                assert places[expert] == (seat, before.slots[expert])


def test_the_shares_are_even_and_in_order():
    assert [list(home_experts(7, seat, 3)) for seat in range(3)] == [[0, 1, 2], [3, 4], [5, 6]]
    assert home_table(4, 2).seats == (0, 0, 1, 1) and home_table(4, 2).slots == (0, 1, 0, 1)
    assert not home_table(0, 3).seats, "a dense model"
    assert (num_slots(64, 4, 6), fewest_seats(64, 4, 6), fewest_seats(64, 4, 0)) == (22, 3, 4)
    assert num_slots(256, 32, 1) == 9 and fewest_seats(256, 32, 1) == 29
