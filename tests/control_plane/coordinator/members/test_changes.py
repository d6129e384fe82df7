"""Changes of seats by operators: each has an owner, a deadline and a way to undo it."""

import asyncio

import pytest

from harness.member_cluster import FIRST, SECOND, in_a_loop, running
from nanocp.config.limits import LimitsConfig
from nanocp.values.members import Left


async def asked_of(cluster, seats):
    """A change that somebody waits for, once it has begun."""
    change = asyncio.create_task(cluster.members.want(seats, "a test"))
    await asyncio.sleep(0)
    return change


@in_a_loop
async def test_a_change_to_the_seats_that_serve_ends_at_once():
    cluster = running(synthetic_kv=True)
    for _ in range(2):
        now = await asyncio.wait_for(cluster.members.want([0, 1], "a test"), 10)
        assert (now.serving, now.asked_by) == ((0, 1), "")
    assert cluster.events.calls == [], "the scheduler has nothing to prepare"


@in_a_loop
async def test_a_change_that_takes_too_long_is_waited_for_no_more_and_can_be_undone():
    limits = LimitsConfig(start_timeout_ms=20, drain_timeout_ms=20)
    cluster = running(limits, synthetic_kv=True)
    cluster.members._seats.fewest = 1
    with pytest.raises(TimeoutError, match=r'not done after 0 s; the cluster goes on .*--undo"'):
        await cluster.members.want([0], "a test")
    now = await cluster.members.want(None)
    assert (now.leaving, now.asked_by) == ((1,), "a test"), "it goes on"
    now = await cluster.members.undo()
    assert (now.serving, now.wanted, now.asked_by) == ((0, 1), (0, 1), "")
    assert cluster.events.calls == [("seats wanted", (0,)), ("seats wanted", (0, 1))]


@in_a_loop
async def test_whoever_waits_for_a_change_hears_of_the_clusters_end():
    for end in ("fail", "leave"):
        cluster = running(synthetic_kv=True)
        cluster.members._seats.fewest = 1
        change = await asked_of(cluster, [0])
        getattr(cluster.members, end)("no term serves")
        with pytest.raises(RuntimeError, match="no term serves"):
            await asyncio.wait_for(change, 10)


@in_a_loop
async def test_a_seat_that_leaves_and_is_lost_gets_no_other_process():
    cluster = running(synthetic_kv=True)
    cluster.members._seats.fewest = 1
    change = await asked_of(cluster, [0])
    cluster.members.exited(SECOND, 0, "its process ended")
    cluster.say(FIRST, 1, Left())
    cluster.ready(FIRST, term=2)
    assert (await asyncio.wait_for(change, 10)).serving == (0,)
    await cluster.until(lambda: cluster.processes.calls == [("kill", "instance 1")])
    assert not cluster.members._replacements.is_coming(SECOND)


@in_a_loop
async def test_a_process_that_comes_for_an_undone_change_is_let_go():
    cluster = running(synthetic_kv=True)
    cluster.members._seats.fewest = 1
    change = await asked_of(cluster, [0])
    cluster.members.changes.settled()
    for instance in (FIRST, SECOND):
        cluster.say(instance, 1, Left())
    cluster.ready(FIRST, term=2)
    await change
    change = await asked_of(cluster, [0, 1])
    await cluster.until_replaced(SECOND, 2, 3)
    await cluster.members.undo()
    with pytest.raises(RuntimeError, match="the change was undone; the cluster is as it was"):
        await change
    cluster.attach(SECOND)
    assert cluster.kinds(SECOND) == ["shutdown", None]
    assert (await cluster.members.want(None)).empty == (1,)


@in_a_loop
async def test_a_seat_that_is_asked_for_while_its_process_comes_gets_no_second_one():
    cluster = running(synthetic_kv=True)
    cluster.members._seats.fewest = 1
    cluster.members.exited(SECOND, 0, "its process ended")
    cluster.say(FIRST, 1, Left())
    cluster.ready(FIRST, term=2)
    change = await asked_of(cluster, [0, 1])
    await cluster.until_replaced(SECOND, 1, 3)
    cluster.attach(SECOND)
    cluster.members.changes.settled()
    cluster.say(FIRST, 2, Left())
    cluster.ready(FIRST, SECOND, term=3)
    assert (await asyncio.wait_for(change, 10)).serving == (0, 1)
    assert [call[0] for call in cluster.processes.calls].count("start") == 1


@in_a_loop
async def test_more_seats_than_there_is_room_for_are_refused_by_name_and_nothing_changes():
    cluster = running(synthetic_kv=True)
    cluster.members._seats.fewest = 1
    change = await asked_of(cluster, [0])
    cluster.members.changes.settled()
    for member in (FIRST, SECOND):
        cluster.say(member, 1, Left())
    cluster.ready(FIRST, term=2)
    await asyncio.wait_for(change, 10)
    cluster.processes.obstacle = "needed are 9.0 MiB of /dev/shm, which has 1.0 MiB free"
    with pytest.raises(RuntimeError, match=r"9\.0 MiB of /dev/shm.*; the cluster is as it was"):
        await asyncio.wait_for(cluster.members.want([0, 1], "a test"), 10)
    now = await cluster.members.want(None)
    assert (now.serving, now.wanted, now.asked_by) == ((0,), (0,), "")
    assert not cluster.members._replacements.is_coming(SECOND)
    assert (await cluster.members.want([0], "a test")).serving == (0,), "no process is to come"
    cluster.processes.obstacle = ""
    change = await asked_of(cluster, [0, 1])
    assert cluster.members._replacements.is_coming(SECOND)
    change.cancel()
