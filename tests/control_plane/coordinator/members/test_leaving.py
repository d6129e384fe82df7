"""Members are asked to leave, at the end of a service."""

from control_plane.coordinator.members import replacements
from control_plane.coordinator.members.output import KillProcess
from harness.members.member_cluster import FIRST, SECOND, Cluster, running
from nanocp.values.commands import Shutdown
from nanocp.values.members import PREFILL


def killed(cluster):
    return [each.member for each in cluster.commands if isinstance(each, KillProcess)]


def test_who_was_asked_to_leave_is_not_lost():
    cluster = running(synthetic_kv=True)
    members = cluster.members
    cluster.leave("the service is stopping")
    cluster.leave("again")
    cluster.lose(FIRST, "instance 0: its actor left", "stuck")
    cluster.members.end.fail("late")
    assert [cluster.kinds(member) for member in (FIRST, SECOND)] == [[Shutdown, None]] * 2
    assert not members.end.failure.done() and cluster.events == []


def test_who_attaches_late_is_asked_to_leave_too():
    cluster = Cluster()
    cluster.leave("the service is stopping")
    cluster.attach(FIRST)
    shutdown, end = cluster.sent_to(FIRST)
    assert (shutdown.message.reason, end) == ("the service is stopping", None)


def test_who_has_joined_no_term_is_ended_at_a_stop():
    """It imports or loads, and cannot read that it should leave."""
    cluster = running()
    for member in (SECOND, PREFILL):
        cluster.lose(member, f"{member}: its process ended", "exit")
        cluster.until_replaced(member, 1, 2)
    cluster.attach(PREFILL)
    cluster.commands.clear()
    cluster.leave("the service is stopping")
    assert set(killed(cluster)) == {SECOND, PREFILL}
    assert Shutdown in cluster.kinds(FIRST)


def test_no_process_follows_a_lost_one_once_all_are_to_leave(monkeypatch):
    monkeypatch.setattr(replacements, "_PAUSES_S", (60.0,))
    cluster = running(synthetic_kv=True)
    cluster.exited(SECOND, 0, "it was killed")
    cluster.leave("the service is stopping")
    cluster.wait(600_000)
    assert cluster.starts() == [], "the pause before it was not over"
