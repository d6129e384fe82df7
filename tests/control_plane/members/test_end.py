"""The end of a cluster: who is asked to leave, who is ended, and that nobody is lost any more."""

from control_plane.member_streams import PREFILL
from harness.member_cluster import FIRST, SECOND, Cluster, in_a_loop, running, sent_to


@in_a_loop
async def test_who_has_joined_no_term_is_ended_at_a_stop():
    """It imports or loads, and cannot read that it should leave."""
    cluster = running()
    for member in (SECOND, PREFILL):
        cluster.members.lose(member, f"{member}: its process ended", "exit")
        await cluster.until_replaced(member, 1, 2)
    cluster.attach(PREFILL)
    calls = cluster.processes.calls
    calls.clear()
    cluster.members.leave("the service is stopping")
    await cluster.until(lambda: len(calls) == 2)
    assert set(calls) == {("kill", str(SECOND)), ("kill", str(PREFILL))}
    assert "shutdown" in cluster.kinds(FIRST)


@in_a_loop
async def test_who_was_asked_to_leave_is_not_lost():
    cluster = running(synthetic_kv=True)
    members = cluster.members
    members.leave("the service is stopping")
    members.leave("again")
    members.lose(FIRST, "instance 0: its actor left", "stuck")
    members.fail("late")
    assert [cluster.kinds(member) for member in (FIRST, SECOND)] == [["shutdown", None]] * 2
    assert not members.failure.done() and cluster.events.calls == []


def test_who_attaches_late_is_asked_to_leave_too():
    cluster = Cluster()
    cluster.members.leave("the service is stopping")
    cluster.attach(FIRST)
    shutdown, end = sent_to(cluster.streams[FIRST])
    assert (shutdown.shutdown.reason, end) == ("the service is stopping", None)
