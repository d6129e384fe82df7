"""Silence in ticks of the controller, and the root of a chain of waits."""

from control_plane.coordinator.members.heartbeats import TICKS, Heartbeats
from nanocp.values.members import PREFILL, Member

FIRST, SECOND, THIRD = (Member("instance", number) for number in range(3))


def test_a_member_is_silent_after_so_many_ticks_and_not_before():
    heartbeats = Heartbeats(300)
    heartbeats.heard(FIRST)
    heartbeats.heard(PREFILL)
    for _ in range(TICKS):
        assert heartbeats.tick() == []
        heartbeats.heard(FIRST)
    assert heartbeats.tick() == [PREFILL]
    heartbeats.forget(PREFILL)
    assert heartbeats.tick() == []


def test_a_member_that_was_never_heard_is_not_silent():
    heartbeats = Heartbeats(300)
    assert [heartbeats.tick() for _ in range(2 * TICKS)] == [[]] * (2 * TICKS)


def test_who_is_waited_for_by_all_is_the_root():
    heartbeats = Heartbeats(300)
    heartbeats.heard(FIRST, awaited=1)
    heartbeats.heard(SECOND, awaited=2)
    heartbeats.heard(THIRD)
    assert [heartbeats.root(each) for each in (FIRST, SECOND, THIRD)] == [THIRD] * 3
    heartbeats.heard(SECOND)
    assert heartbeats.root(FIRST) == SECOND


def test_members_that_wait_for_each_other_have_a_root_too():
    heartbeats = Heartbeats(300)
    heartbeats.heard(FIRST, awaited=1)
    heartbeats.heard(SECOND, awaited=0)
    assert heartbeats.root(FIRST) == SECOND and heartbeats.root(SECOND) == FIRST
