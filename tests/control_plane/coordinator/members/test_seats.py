"""Seats that are wanted, and how many must serve."""

import pytest

from control_plane.coordinator.members.seats import MAX_FAILURES, Seats
from nanocp.config.cluster import ClusterConfig


def seats_of(num_experts, num_instances=4, redundant=2):
    cluster = ClusterConfig(num_instances=num_instances, redundant_experts=redundant)
    return Seats(cluster, num_experts)


def test_survivors_go_on_alone_if_they_have_slots_for_all_experts():
    seats = seats_of(16)
    assert seats.fewest == 3
    assert seats.to_go_on([0, 2, 3]) == [0, 2, 3]
    assert seats.to_go_on([2, 3]) == [0, 1, 2, 3], "all are waited for"
    assert seats_of(None).to_go_on([0, 1, 2]) == [0, 1, 2, 3], "the number of experts is unknown"
    assert seats_of(0, redundant=0).fewest == 1, "a dense model needs no slots"


def test_what_cannot_serve_is_refused_with_what_could():
    seats = seats_of(16)
    with pytest.raises(
        ValueError, match="2 of 4 instances cannot serve alone, 3 can: every expert must"
    ):
        seats.ask([0, 1], "a test")
    with pytest.raises(ValueError, match="they must be different, from 0 to 3"):
        seats.ask([0, 1, 4], "a test")
    with pytest.raises(ValueError, match="they must be different"):
        seats.ask([0, 1, 1], "a test")
    seats.ask([0, 1, 2], "a test")
    with pytest.raises(ValueError, match="is changing to seats"):
        seats.ask([1, 2, 3], "a test")


def test_a_change_is_done_when_its_seats_serve():
    seats = seats_of(16)
    asked = seats.ask([0, 1, 3], "a test")
    assert seats.target([0, 1, 2, 3], []) == (0, 1, 3)
    now = seats.now([0, 1, 2, 3], True)
    assert (now.leaving, now.starting, now.empty) == ((2,), (), ())
    assert now.states() == ("serving", "serving", "draining", "serving")
    seats.serve([0, 1, 2, 3])
    assert not asked.done()
    seats.serve([0, 1, 3])
    assert asked.result() is None and seats.now([0, 1, 3], True).empty == (2,)
    asked = seats.ask([0, 1, 2, 3], "a test")
    assert seats.target([0, 1, 3], []) == (0, 1, 3), "the newcomer is not ready"
    now = seats.now([0, 1, 3], False)
    assert now.starting == (2,) and not now.is_serving
    assert now.states() == ("serving", "serving", "loading", "serving")
    assert seats.target([0, 1, 3], [2]) == (0, 1, 2, 3)
    assert not seats.failed(2, [0, 1, 3], "instance 2: no memory")
    with pytest.raises(RuntimeError, match="instance 2: no memory; the cluster is as it was"):
        asked.result()
    assert seats.wanted == [0, 1, 3]


def test_a_seat_whose_processes_fail_stays_empty():
    seats = seats_of(16)
    assert [seats.failed(1, [0, 2, 3], "it ended") for _ in range(MAX_FAILURES)] == [
        True,
        True,
        False,
    ]
    assert seats.wanted == [0, 2, 3]


def test_a_seat_is_left_out_only_if_the_others_can_serve():
    seats = seats_of(16)
    assert not seats.leave_out(1, [0, 2], "it ended") and seats.wanted == [0, 1, 2, 3]
    asked = seats.ask([0, 1, 2], "a test")
    assert seats.leave_out(1, [0, 2, 3], "it ended") and seats.wanted == [0, 2, 3]
    with pytest.raises(RuntimeError, match="it ended; the cluster is as it was"):
        asked.result()


def test_a_change_to_what_is_already_so_ends_at_once():
    seats = seats_of(16)
    asked = seats.ask([3, 2, 1, 0], "a test")
    seats.serve([0, 1, 2, 3])
    assert asked.result(0) is None
    assert seats.ask([0, 1, 2], "a test") is not asked, "nobody is waited for"


def test_who_asks_meanwhile_is_told_who_asked_and_how_to_undo_it():
    seats = seats_of(16)
    asked = seats.ask([0, 1, 2], "nanocp drain 3")
    with pytest.raises(ValueError, match=r"\[0, 1, 2\], as nanocp drain 3 asked.*scale --undo"):
        seats.ask([1, 2, 3], "another")
    assert seats.now([0, 1, 2, 3], True).asked_by == "nanocp drain 3"
    seats.undo("it was undone")
    with pytest.raises(RuntimeError, match="it was undone; the cluster is as it was"):
        asked.result(0)
    now = seats.now([0, 1, 2, 3], True)
    assert (seats.wanted, now.wanted, now.asked_by) == ([0, 1, 2, 3], (0, 1, 2, 3), "")
    with pytest.raises(ValueError, match=r"no change is under way; seats \[0, 1, 2, 3\] are"):
        seats.undo("it was undone")


def test_a_change_that_nobody_waits_for_any_more_may_be_followed_or_undone():
    seats = seats_of(16)
    seats.ask([0, 1, 2], "a test").cancel()
    seats.serve([0, 1, 2, 3])
    assert seats.wanted == [0, 1, 2], "it goes on"
    seats.ask([1, 2, 3], "a test").cancel()
    seats.undo("it was undone")
    assert seats.wanted == [0, 1, 2]


def test_seats_that_others_cannot_do_without_stay_until_these_have_come():
    seats = seats_of(16)
    seats.wanted = [0, 1, 2]
    seats.ask([1, 2, 3], "a test")
    assert seats.target([0, 1, 2], []) == (0, 1, 2), "two cannot hold all experts"
    assert seats.target([0, 1, 2], [3]) == (1, 2, 3)
    dense = seats_of(0)
    dense.wanted = [3]
    assert dense.target([0], [3]) == (0, 3), "rows that leave need an instance that stays"
    assert dense.target([0, 3], []) == (3,)


def test_a_change_that_swaps_seats_and_fails_leaves_the_seats_as_they_were():
    seats = seats_of(16)
    seats.wanted = [0, 1, 2]
    asked = seats.ask([0, 2, 3], "a test")
    assert not seats.failed(3, [0, 1, 2], "instance 3: no memory")
    assert seats.wanted == [0, 1, 2] and isinstance(asked.exception(0), RuntimeError)


def test_a_loss_beside_a_change_is_no_failure_of_the_change():
    seats = seats_of(16)
    asked = seats.ask([0, 1, 2], "a test")
    assert seats.failed(1, [0, 2, 3], "it ended"), "another process comes"
    assert not asked.done() and seats.wanted == [0, 1, 2]
