"""Who has dialled, who is ready, who was lost, and who comes instead."""

import asyncio
from dataclasses import replace

import pytest

from control_plane.coordinator.members import replacements
from control_plane.coordinator.members.heartbeats import TICKS
from control_plane.coordinator.members.start import StartError
from control_plane.ports.member_streams import MemberStream
from harness.member_cluster import (
    FIRST,
    LIMITS,
    NO_RECOVERY,
    SECOND,
    Cluster,
    in_a_loop,
    running,
    sent_to,
)
from nanocp.config.limits import LimitsConfig
from nanocp.values.members import PREFILL, Beat, Left, Loading, Member, Ready, Suspect
from nanocp.values.plan import TransferDone, WindowDone
from nanocp.wire.v1 import cluster_pb2 as pb


def test_a_member_is_called_what_it_is():
    assert (str(SECOND), str(PREFILL), f"{FIRST}: lost") == (
        "instance 1",
        "prefill",
        "instance 0: lost",
    )


def test_members_join_when_the_last_instance_has_dialled():
    cluster = Cluster()
    cluster.attach(PREFILL, SECOND)
    assert cluster.kinds(SECOND) == []
    cluster.attach(FIRST)
    for member in (FIRST, SECOND, PREFILL):
        (join,) = sent_to(cluster.streams[member])
        assert (join.term, join.join.newest_ticket) == (1, 17)
        assert [peer.node for peer in join.join.peers] == ["instance 0", "instance 1"]


def test_a_prefill_that_dials_later_joins_the_term_that_serves():
    cluster = Cluster()
    cluster.attach(FIRST, SECOND, PREFILL)
    assert cluster.kinds(PREFILL) == ["join"] and cluster.events.calls == ["prefill arrived"]


def test_with_synthetic_kv_there_is_no_prefill():
    cluster = Cluster(synthetic_kv=True)
    assert cluster.members.expected == (FIRST, SECOND)
    with pytest.raises(
        ValueError, match="this cluster has no prefill; it has instance 0, instance 1"
    ):
        cluster.attach(PREFILL)


def test_a_process_that_never_dials_leaves_time_for_another():
    limit_s = LimitsConfig().recovery_timeout_ms / 1000
    replacements = Cluster().members._replacements
    assert 30 <= replacements._dial_s <= limit_s / 2


@pytest.mark.parametrize(
    ("member", "sentence"),
    [
        (
            Member("instance", 2),
            "this cluster has no instance 2; it has instance 0, instance 1, prefill",
        ),
        (FIRST, "instance 0 is attached already"),
    ],
)
def test_a_member_that_has_no_place_is_refused(member, sentence):
    cluster = Cluster()
    cluster.attach(FIRST)
    with pytest.raises(ValueError, match=sentence):
        cluster.attach(member)


def test_the_cluster_has_started_when_the_last_member_is_ready():
    cluster = Cluster()
    members = cluster.members
    members.loading(FIRST, 50)
    members.loading(Member("instance", 7), 50)
    cluster.say(PREFILL, 1, Loading(100))
    cluster.attach(FIRST, SECOND)
    for member in (SECOND, FIRST):
        cluster.say(member, 1, Ready(("kernels: torch", "graphs: 3 prepared")))
    cluster.ready(PREFILL)
    assert cluster.loaded == [(FIRST, 50), (PREFILL, 100)]
    assert cluster.progress == [f"{num} of 3 processes are ready" for num in (1, 2, 3)]
    choices = ("kernels: torch", "graphs: 3 prepared")
    assert members.start.wait() == {FIRST: choices, SECOND: choices, PREFILL: ("process 9",)}
    cluster.say(FIRST, 1, WindowDone(0, 0))
    assert cluster.events.reports == [(FIRST, WindowDone(0, 0))]
    assert "began" not in str(cluster.events.calls), "the first term begins with the service"


@in_a_loop
async def test_a_member_that_is_lost_before_all_are_ready_ends_the_start():
    cluster = Cluster()
    cluster.members.failed(None, "instance 1: no such module")
    cluster.members.failed(FIRST, "instance 0: its stream broke")
    with pytest.raises(StartError, match="instance 1: no such module"):
        cluster.members.start.wait()


# --- a loss


@in_a_loop
async def test_a_lost_instance_is_killed_and_replaced_and_all_begin_the_next_term():
    cluster = running(synthetic_kv=True)
    cluster.members.exited(SECOND, 0, "its process ended")
    assert cluster.events.calls == ["ended", ("lost", 1)]
    assert [each.WhichOneof("message") for each in sent_to(cluster.streams[FIRST])] == ["leave"]
    await cluster.until_replaced(SECOND, 1, 2)
    assert cluster.processes.calls[0] == ("kill", "instance 1")
    cluster.say(FIRST, 1, Left())
    cluster.attach(SECOND)
    assert [cluster.kinds(member) for member in (FIRST, SECOND)] == [["join"]] * 2
    cluster.ready(FIRST, SECOND, term=2)
    assert cluster.events.calls[2:] == [("began", 2)] and not cluster.members.failure.done()


@in_a_loop
async def test_a_loss_is_noticed_once_and_the_old_process_does_not_end_the_new_one():
    cluster = running(synthetic_kv=True)
    members = cluster.members
    members.failed(SECOND, "instance 1: its stream broke")
    members.exited(SECOND, 0, "its process was ended by SIGKILL")
    await cluster.until_replaced(SECOND, 1, 2)
    assert cluster.events.calls == ["ended", ("lost", 1)]
    cluster.attach(SECOND)
    members.exited(SECOND, 0, "late")
    assert SECOND in members._streams
    members.exited(SECOND, 1, "it ended as well")
    assert SECOND not in members._streams
    await cluster.until_replaced(SECOND, 2, 2)


@in_a_loop
async def test_reports_of_an_earlier_term_are_dropped():
    cluster = running(synthetic_kv=True)
    cluster.members.terms.end()
    cluster.say(FIRST, 1, WindowDone(0, 0))
    for member in (FIRST, SECOND):
        cluster.say(member, 1, Left())
    cluster.ready(FIRST, SECOND, term=2)
    cluster.say(FIRST, 1, TransferDone(3, 0))
    assert cluster.events.reports == []
    cluster.say(FIRST, 2, TransferDone(4, 0))
    assert cluster.events.reports == [(FIRST, TransferDone(4, 0))]


@in_a_loop
async def test_what_belongs_to_a_term_is_sent_to_members_that_are_in_it():
    cluster = running(synthetic_kv=True)
    cluster.members.send(FIRST, pb.ToInstance(fence=1))
    cluster.members.terms.end()
    cluster.members.send(FIRST, pb.ToInstance(fence=2))
    assert cluster.kinds(FIRST) == ["fence", "leave"]


@in_a_loop
async def test_a_lost_prefill_is_replaced_without_a_new_term():
    cluster = running()
    cluster.members.exited(PREFILL, 0, "its process was ended by SIGKILL")
    await cluster.until_replaced(PREFILL, 1, 2)
    assert not cluster.members.has_prefill
    cluster.attach(PREFILL)
    assert cluster.kinds(PREFILL) == ["join"] and cluster.kinds(FIRST) == []
    assert cluster.events.calls == ["prefill arrived"]


@in_a_loop
async def test_a_prefill_that_is_not_seen_dead_ends_the_term_whose_rings_it_may_write():
    cluster = running()
    cluster.members.failed(PREFILL, "prefill: its stream broke")
    await cluster.until_replaced(PREFILL, 1, 2)
    assert cluster.events.calls == ["ended"] and cluster.kinds(FIRST) == ["leave"]


@in_a_loop
async def test_a_cluster_that_does_not_recover_in_time_ends():
    cluster = running(LimitsConfig(recovery_timeout_ms=50), synthetic_kv=True)
    cluster.members.exited(SECOND, 0, "its process ended")
    await cluster.until(cluster.members.failure.done)
    sentence = (
        "the service did not go on within recovery_timeout_ms (50 ms) after a loss: "
        "instance 1: its process ended"
    )
    assert cluster.members.failure.result(0) == sentence
    assert cluster.events.calls[-1] == ("cluster lost", sentence)


@in_a_loop
async def test_a_prefill_that_does_not_come_back_in_time_ends_the_cluster_but_no_running_request():
    cluster = running(LimitsConfig(recovery_timeout_ms=50))
    cluster.members.exited(PREFILL, 0, "its process ended")
    await cluster.until(cluster.members.failure.done)
    assert cluster.events.calls == ["prefill lost"]


@in_a_loop
async def test_a_process_that_cannot_be_started_ends_the_cluster():
    cluster = running(synthetic_kv=True)
    cluster.processes.error = OSError("no more processes")
    cluster.members.exited(SECOND, 0, "its process ended")
    await cluster.until(cluster.members.failure.done)
    assert cluster.members.failure.result(0) == (
        "instance 1: its process ended; no process could take its place: no more processes"
    )


@pytest.mark.parametrize("num_windows", [0, 1, 9])
@in_a_loop
async def test_terms_that_end_as_soon_as_they_begin_end_the_cluster(num_windows):
    cluster = running(synthetic_kv=True)
    # What fails in its first window reports none.
    cluster.events.has_windows = num_windows == 0
    for term in (1, 2, 3, 4):
        assert not cluster.members.failure.done()
        for member in (FIRST, SECOND):
            for _ in range(num_windows):
                cluster.say(member, term, WindowDone(0, 0))
        cluster.members.exited(SECOND, term - 1, "its process ended")
        if term < 4:
            await cluster.until_replaced(SECOND, term, term + 1)
            cluster.say(FIRST, term, Left())
            cluster.attach(SECOND)
            cluster.ready(FIRST, SECOND, term=term + 1)
    assert cluster.members.failure.result(0) == (
        "instance 1: its process ended; the 3 terms before ended as soon"
    )


@in_a_loop
async def test_a_seat_that_ends_three_short_terms_stays_empty_if_the_others_can_serve():
    cluster = running(synthetic_kv=True)
    cluster.events.has_windows = True
    cluster.members._seats.fewest = 1
    for term in (1, 3, 5):
        cluster.members.exited(SECOND, term // 2, "its process ended")
        cluster.say(FIRST, term, Left())
        cluster.ready(FIRST, term=term + 1)  # It goes on alone.
        if term < 5:
            await cluster.until_replaced(SECOND, 1 + term // 2, term + 2)
            cluster.attach(SECOND)
            cluster.members.changes.settled()
            cluster.say(FIRST, term + 1, Left())
            cluster.ready(FIRST, SECOND, term=term + 2)
    await cluster.until(lambda: cluster.processes.calls[-1] == ("kill", "instance 1"))
    assert [call[0] for call in cluster.processes.calls].count("start") == 2
    now = await cluster.members.want(None)
    assert (now.serving, now.empty, now.starting) == ((0,), (1,), ())
    assert not cluster.members.failure.done()


@pytest.mark.parametrize("is_first", [True, False], ids=["before", "after"])
@in_a_loop
async def test_the_next_term_begins_though_a_process_that_leaves_is_lost(is_first):
    """It is lost before the others have left, or after."""
    cluster = running(synthetic_kv=True)
    cluster.members._seats.fewest = 1
    cluster.members.changes.want([1], "a test")
    cluster.members.changes.settled()
    if not is_first:
        cluster.say(SECOND, 1, Left())
    cluster.members.exited(FIRST, 0, "its process ended")
    if is_first:
        cluster.say(SECOND, 1, Left())
    assert cluster.kinds(SECOND) == ["leave", "join"]
    cluster.ready(SECOND, term=2)
    assert cluster.members.seats == [1] and cluster.members.terms.is_serving


@in_a_loop
async def test_pages_of_a_seat_that_leaves_are_lost_with_its_process():
    cluster = running(synthetic_kv=True)
    cluster.members._seats.fewest = 1
    cluster.members.changes.want([1], "a test")
    cluster.members.changes.settled()
    cluster.say(FIRST, 1, Left())
    cluster.members.exited(FIRST, 0, "its process ended")
    assert cluster.events.calls[-2:] == ["ended", ("lost", 0)]
    cluster.say(SECOND, 1, Left())
    cluster.ready(SECOND, term=2)
    assert cluster.members.seats == [1]


@pytest.mark.parametrize("num_windows", [0, 10])
@in_a_loop
async def test_losses_of_an_idle_cluster_or_after_a_while_go_on(num_windows):
    cluster = running(synthetic_kv=True)
    for term in (1, 2, 3, 4):
        for member in (FIRST, SECOND):
            for _ in range(num_windows):
                cluster.say(member, term, WindowDone(0, 0))
        cluster.members.exited(SECOND, term - 1, "its process ended")
        await cluster.until_replaced(SECOND, term, term + 1)
        cluster.say(FIRST, term, Left())
        cluster.attach(SECOND)
        cluster.ready(FIRST, SECOND, term=term + 1)
    assert not cluster.members.failure.done()


@in_a_loop
async def test_without_recovery_a_cluster_fails_with_the_first_member_that_is_lost():
    cluster = running(NO_RECOVERY, synthetic_kv=True)
    cluster.members.lose(SECOND, "instance 1: its process ended", "stuck")
    cluster.members.lose(SECOND, "instance 1: its stream broke", "stuck")
    cluster.members.lose(FIRST, "instance 0: its peer is gone", "stuck")
    assert cluster.members.failure.result(0) == "instance 1: its process ended"
    assert cluster.events.calls == [("cluster lost", "instance 1 was lost")]
    await cluster.until(lambda: cluster.processes.calls == [("kill", "instance 1")])


@in_a_loop
async def test_a_member_that_reads_nothing_is_lost():
    cluster = running(NO_RECOVERY, synthetic_kv=True)
    stream = cluster.streams[FIRST]
    assert isinstance(stream, MemberStream)
    stream.max_messages = 2
    for _ in range(4):
        cluster.members.send(FIRST, pb.ToInstance(fence=1))
    await cluster.until(cluster.members.failure.done)
    assert cluster.members.failure.result(0) == "instance 0 left 2 messages unread"
    assert cluster.kinds(FIRST) == ["fence", "fence", None]


# --- suspicion


@in_a_loop
async def test_a_silent_member_is_lost():
    cluster = running(LimitsConfig(suspect_ms=300), synthetic_kv=True)
    for member in (FIRST, SECOND):
        cluster.say(member, 0, Beat())
    watch = asyncio.create_task(cluster.members.watch_heartbeats())
    for _ in range(2 * TICKS):
        cluster.say(FIRST, 0, Beat())
        await asyncio.sleep(0.3 / TICKS)
    watch.cancel()
    assert cluster.events.calls == ["ended", ("lost", 1)]
    assert "it has sent nothing for suspect_ms (300 ms)" in cluster.members._last_loss


@in_a_loop
async def test_the_culprit_of_a_silence_is_at_the_root_of_the_waits():
    cluster = running(synthetic_kv=True)
    cluster.say(FIRST, 0, Beat(1))
    cluster.say(SECOND, 0, Beat())
    cluster.say(SECOND, 1, Suspect(0, False, "ExchangeTimeout"))
    assert cluster.events.calls == ["ended", ("lost", 1)]


@in_a_loop
async def test_without_recovery_the_culprit_is_named_too():
    cluster = running(NO_RECOVERY, synthetic_kv=True)
    cluster.say(FIRST, 0, Beat(1))
    cluster.say(SECOND, 1, Suspect(0, False, "ExchangeTimeout"))
    assert cluster.events.calls == [("cluster lost", "instance 1 was lost")]


@in_a_loop
async def test_instances_that_report_no_window_are_blamed_by_their_waits():
    cluster = running(synthetic_kv=True)
    cluster.say(FIRST, 0, Beat(1))
    cluster.members.suspicion.blame([0, 1], "did not report window 3 in 50 s")
    assert cluster.events.calls == ["ended", ("lost", 1)]
    assert cluster.members._last_loss == "instance 1 did not report window 3 in 50 s"


@in_a_loop
async def test_a_peer_that_is_called_gone_is_lost_if_no_better_reason_comes(monkeypatch):
    monkeypatch.setattr("control_plane.coordinator.members.suspicion._GONE_MS", 20)
    cluster = running(synthetic_kv=True)
    suspect = Suspect(1, True, "PeerLost")
    cluster.say(FIRST, 1, suspect)
    assert cluster.events.calls == []
    await cluster.until(lambda: cluster.events.calls == ["ended", ("lost", 1)])
    cluster.say(FIRST, 1, suspect)
    await asyncio.sleep(0.1)
    assert cluster.events.calls == ["ended", ("lost", 1)], "the term is over"


@in_a_loop
async def test_an_instance_that_does_not_leave_its_term_is_lost():
    limits = replace(LIMITS, plan_timeout_ms=30, retry_ms=20)
    cluster = running(limits, synthetic_kv=True)
    cluster.members.terms.end()
    cluster.say(FIRST, 1, Left())
    await cluster.until(lambda: ("lost", 1) in cluster.events.calls)
    assert "it did not leave its term in plan_timeout_ms (30 ms)" in cluster.members._last_loss


# --- the end


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
async def test_each_further_process_comes_later_until_a_term_begins(monkeypatch):
    assert list(replacements._PAUSES_S) == sorted(replacements._PAUSES_S)
    monkeypatch.setattr(replacements, "_PAUSES_S", (0.0, 0.0, 600.0))
    cluster = running(synthetic_kv=True)
    for number in range(2):
        cluster.members.exited(SECOND, number, "it has no room")
        await cluster.until_replaced(SECOND, number + 1, term=2)
    cluster.members.exited(SECOND, 2, "it has no room")
    await cluster.until(lambda: cluster.processes.calls.count(("kill", "instance 1")) == 3)
    await asyncio.sleep(0.1)
    assert cluster.processes.calls[-1] == ("kill", "instance 1"), "the next one waits"


@in_a_loop
async def test_losses_with_terms_between_them_are_replaced_at_once(monkeypatch):
    monkeypatch.setattr(replacements, "_PAUSES_S", (0.0, 600.0))
    cluster = running(synthetic_kv=True)
    for term in range(2, 5):
        cluster.members.exited(SECOND, term - 2, "it was killed")
        cluster.say(FIRST, term - 1, Left())
        await cluster.until_replaced(SECOND, term - 1, term=term)
        cluster.attach(SECOND)
        cluster.ready(FIRST, SECOND, term=term)
        assert cluster.members.terms.is_serving
