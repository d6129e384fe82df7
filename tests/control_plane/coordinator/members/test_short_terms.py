"""Losses that follow each other soon: one seat, or something else, is to blame."""

from control_plane.coordinator.members.short_terms import ShortTerms


def lose(terms, seats, num_windows=0):
    for seat in seats:
        terms.began()
        for _ in range(4 * num_windows):
            terms.reported()
        terms.lost(seat, 4, has_windows=num_windows == 0)


def test_the_third_short_term_of_one_seat_blames_it():
    terms = ShortTerms()
    lose(terms, [2, 2])
    assert not terms.is_to_blame(2)
    lose(terms, [2], num_windows=9)
    assert terms.is_to_blame(2) and not terms.is_to_blame(1) and not terms.are_too_many


def test_the_fourth_short_term_of_any_seats_is_too_much():
    terms = ShortTerms()
    lose(terms, [2, 1, 3])
    assert not (terms.are_too_many or terms.is_to_blame(3))
    lose(terms, [2])
    assert terms.are_too_many


def test_a_long_term_or_an_idle_one_begins_the_count_anew():
    terms = ShortTerms()
    lose(terms, [2, 2])
    lose(terms, [2], num_windows=10)
    assert not terms.is_to_blame(2)
    lose(terms, [2, 2])
    terms.began()
    terms.lost(2, 4, has_windows=False)
    lose(terms, [2])
    assert not terms.is_to_blame(2)
