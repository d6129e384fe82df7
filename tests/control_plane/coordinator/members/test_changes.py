"""Changes of seats by operators: each has an owner, a deadline and a way to undo it."""

import pytest

from control_plane.coordinator.members.output import KillProcess, StartProcess
from harness.members.member_cluster import FIRST, SECOND, one_may_serve, running
from nanocp.values.commands import Shutdown
from nanocp.values.members import Left
from nanocp.values.plan import SeatsWanted


def drained():
    """A cluster whose second instance has left in order, and whose first serves alone."""
    cluster = one_may_serve()
    change = cluster.want([0], "a test")
    cluster.settled()
    for instance in (FIRST, SECOND):
        cluster.say(instance, 1, Left())
    cluster.ready(FIRST, term=2)
    change.result(0)
    return cluster


def test_a_change_to_the_seats_that_serve_ends_at_once():
    cluster = running(synthetic_kv=True)
    for _ in range(2):
        assert cluster.want([0, 1], "a test").done()
        now = cluster.members.seats_now
        assert (now.serving, now.asked_by) == ((0, 1), "")
    assert cluster.events == [], "the scheduler has nothing to prepare"


def test_a_change_that_takes_too_long_is_waited_for_no_more_and_can_be_undone():
    cluster = one_may_serve()
    assert cluster.want([0], "a test").cancel(), "which is how a wait ends"
    now = cluster.members.seats_now
    assert (now.leaving, now.asked_by) == ((1,), "a test"), "it goes on"
    cluster.undo()
    now = cluster.members.seats_now
    assert (now.serving, now.wanted, now.asked_by) == ((0, 1), (0, 1), "")
    assert cluster.events == [SeatsWanted((0,)), SeatsWanted((0, 1))]


def test_whoever_waits_for_a_change_hears_of_the_clusters_end():
    for end in (lambda members: members.end.fail, lambda members: members.leave):
        cluster = one_may_serve()
        change = cluster.want([0], "a test")
        end(cluster.members)("no term serves")
        with pytest.raises(RuntimeError, match="no term serves"):
            change.result(0)


def test_a_seat_that_leaves_and_is_lost_gets_no_other_process():
    cluster = one_may_serve()
    change = cluster.want([0], "a test")
    cluster.exited(SECOND, 0, "its process ended")
    cluster.say(FIRST, 1, Left())
    cluster.ready(FIRST, term=2)
    change.result(0)
    assert cluster.members.seats_now.serving == (0,)
    assert cluster.commands == [KillProcess(SECOND, 0)]
    assert not cluster.members.replacements.is_coming(SECOND)


def test_a_process_that_comes_for_an_undone_change_is_let_go():
    cluster = drained()
    change = cluster.want([0, 1], "a test")
    cluster.until_replaced(SECOND, 2, 3)
    cluster.undo()
    with pytest.raises(RuntimeError, match="the change was undone; the cluster is as it was"):
        change.result(0)
    cluster.attach(SECOND)
    assert cluster.kinds(SECOND) == [Shutdown, None]
    assert cluster.members.seats_now.empty == (1,)


def test_a_seat_that_is_asked_for_while_its_process_comes_gets_no_second_one():
    cluster = one_may_serve()
    cluster.exited(SECOND, 0, "its process ended")
    cluster.say(FIRST, 1, Left())
    cluster.ready(FIRST, term=2)
    change = cluster.want([0, 1], "a test")
    cluster.until_replaced(SECOND, 1, 2)
    cluster.wait(5_000)
    cluster.attach(SECOND)
    cluster.settled()
    cluster.say(FIRST, 2, Left())
    cluster.ready(FIRST, SECOND, term=3)
    change.result(0)
    assert cluster.members.seats_now.serving == (0, 1)
    assert cluster.commands == [KillProcess(SECOND, 0), StartProcess(SECOND, 1, 2)]


def test_more_seats_than_there_is_room_for_are_refused_by_name_and_nothing_changes():
    cluster = drained()
    cluster.facts.obstacle = "needed are 9.0 MiB of /dev/shm, which has 1.0 MiB free"
    with pytest.raises(RuntimeError, match=r"9\.0 MiB of /dev/shm.*; the cluster is as it was"):
        cluster.want([0, 1], "a test").result(0)
    now = cluster.members.seats_now
    assert (now.serving, now.wanted, now.asked_by) == ((0,), (0,), "")
    assert not cluster.members.replacements.is_coming(SECOND)
    assert cluster.want([0], "a test").done(), "no process is to come"
    cluster.facts.obstacle = ""
    cluster.want([0, 1], "a test")
    assert cluster.members.replacements.is_coming(SECOND)
