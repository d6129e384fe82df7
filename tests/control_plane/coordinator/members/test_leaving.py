"""Members are asked to leave, at the end of a service."""

import asyncio
import threading

from control_plane.ports.member_streams import PREFILL
from harness.member_cluster import FIRST, SECOND, Cluster, in_a_loop, running, sent_to


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


@in_a_loop
async def test_who_has_yet_to_dial_is_killed_when_all_are_to_leave():
    cluster = running(synthetic_kv=True)
    cluster.members.exited(SECOND, 0, "it was killed")
    await cluster.until_replaced(SECOND, 1, term=2)
    cluster.members.leave("the service is stopping")
    cluster.members.leave("again")
    await cluster.until(lambda: cluster.processes.calls[-1] == ("kill", "instance 1"))
    await asyncio.sleep(0.1)
    assert [call[0] for call in cluster.processes.calls] == ["kill", "start", "kill"]
    assert cluster.kinds(FIRST)[-2:] == ["shutdown", None], "who has dialled can read that"


@in_a_loop
async def test_a_process_that_starts_while_all_are_to_leave_is_killed_once_it_has_started():
    cluster = running(synthetic_kv=True)
    calls, starts, may_start = cluster.processes.calls, threading.Event(), threading.Event()
    start = cluster.processes.start

    def slow(*arguments):
        starts.set()
        assert may_start.wait(60)
        start(*arguments)

    cluster.processes.start = slow
    cluster.members.exited(SECOND, 0, "it was killed")
    await cluster.until(starts.is_set)
    cluster.members.leave("the service is stopping")
    await cluster.until(lambda: len(calls) >= 2)
    may_start.set()
    await cluster.until(lambda: len(calls) >= 4)
    assert [call[0] for call in calls] == ["kill", "kill", "start", "kill"]


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
