"""Who has dialled, who is ready, who was lost, and who comes instead."""

from dataclasses import replace

import pytest

from control_plane.coordinator.members import replacements
from control_plane.coordinator.members.heartbeats import TICKS
from control_plane.coordinator.members.output import KillProcess, PrefillArrived, PrefillLost
from control_plane.coordinator.members.start import StartError
from harness.members.member_cluster import (
    FIRST,
    LIMITS,
    NO_RECOVERY,
    SECOND,
    Cluster,
    one_may_serve,
    running,
)
from nanocp.config.limits import LimitsConfig
from nanocp.values.commands import Join, Leave, RefusePages
from nanocp.values.members import PREFILL, Beat, Left, Member, Ready, Suspect
from nanocp.values.plan import (
    ClusterLost,
    InstanceLost,
    Regrouped,
    TermEnded,
    TransferDone,
    WindowDone,
)


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
        (join,) = cluster.sent_to(member)
        assert (join.term, join.message.newest_ticket) == (1, 17)
        assert [peer.node for peer in join.message.peers] == ["instance 0", "instance 1"]


def test_a_prefill_that_dials_later_joins_the_term_that_serves():
    cluster = Cluster()
    cluster.attach(FIRST, SECOND, PREFILL)
    assert cluster.kinds(PREFILL) == [Join] and cluster.events == [PrefillArrived(PREFILL)]


def test_with_synthetic_kv_there_is_no_prefill():
    cluster = Cluster(synthetic_kv=True)
    assert cluster.members.expected == (FIRST, SECOND)
    with pytest.raises(
        ValueError, match="this cluster has no prefill; it has instance 0, instance 1"
    ):
        cluster.attach(PREFILL)


def test_a_process_that_never_dials_leaves_time_for_another():
    limit_s = LimitsConfig().recovery_timeout_ms / 1000
    replacements = Cluster().members.replacements
    assert 30 <= replacements._dial_s <= limit_s / 2


@pytest.mark.parametrize(("member", "sentence"), [
    (Member("instance", 2),
     "this cluster has no instance 2; it has instance 0, instance 1, prefill"),
    (FIRST, "instance 0 is attached already"),
])  # fmt: skip
def test_a_member_that_has_no_place_is_refused(member, sentence):
    cluster = Cluster()
    cluster.attach(FIRST)
    with pytest.raises(ValueError, match=sentence):
        cluster.attach(member)


def test_the_cluster_has_started_when_the_last_member_is_ready():
    cluster = Cluster()
    members = cluster.members
    assert cluster.loading(FIRST) and not cluster.loading(Member("instance", 7))
    cluster.attach(FIRST, SECOND)
    for member in (SECOND, FIRST):
        cluster.say(member, 1, Ready(("kernels: torch", "graphs: 3 prepared")))
    cluster.ready(PREFILL)
    assert cluster.progress == [f"{num} of 3 processes are ready" for num in (1, 2, 3)]
    choices = ("kernels: torch", "graphs: 3 prepared")
    assert members.start.wait() == {FIRST: choices, SECOND: choices, PREFILL: ("process 9",)}
    cluster.say(FIRST, 1, WindowDone(0, 0))
    assert cluster.reports == [(FIRST, WindowDone(0, 0))]
    assert "began" not in str(cluster.events), "the first term begins with the service"


def test_a_member_that_is_lost_before_all_are_ready_ends_the_start():
    cluster = Cluster()
    cluster.failed(None, "instance 1: no such module")
    cluster.failed(FIRST, "instance 0: its stream broke")
    with pytest.raises(StartError, match="instance 1: no such module"):
        cluster.members.start.wait()


@pytest.mark.parametrize("ends", [True, False])
def test_a_start_that_fails_says_how_a_process_ended_and_not_that_its_stream_did(ends):
    cluster = Cluster()
    cluster.attach(FIRST)
    cluster.failed(FIRST, "instance 0: its stream broke", False)
    if ends:
        cluster.exited(FIRST, 0, "its process was ended by SIGKILL")
    else:
        assert not cluster.members.start.is_over
    cluster.wait(2000)
    how = "its process was ended by SIGKILL" if ends else "its stream broke"
    with pytest.raises(StartError, match=f"^instance 0: {how}$"):
        cluster.members.start.wait()
    assert not cluster.members.end.failure.done()


# --- a loss


def replace_second(cluster, number, term, reason="its process ended"):
    """The second instance's process of this number ends; the next one takes part in `term`."""
    cluster.exited(SECOND, number, reason)
    cluster.until_replaced(SECOND, number + 1, term)
    cluster.say(FIRST, term - 1, Left())
    cluster.attach(SECOND)
    cluster.ready(FIRST, SECOND, term=term)


def test_a_lost_instance_is_killed_and_replaced_and_all_begin_the_next_term():
    cluster = running(synthetic_kv=True)
    cluster.exited(SECOND, 0, "its process ended")
    assert cluster.events == [TermEnded(), InstanceLost(1)]
    assert cluster.kinds(FIRST) == [Leave]
    cluster.until_replaced(SECOND, 1, 2)
    assert cluster.commands[0] == KillProcess(SECOND, 0)
    cluster.say(FIRST, 1, Left())
    cluster.attach(SECOND)
    assert [cluster.kinds(member) for member in (FIRST, SECOND)] == [[Join]] * 2
    cluster.ready(FIRST, SECOND, term=2)
    assert cluster.events[2:] == [Regrouped(2, (0, 1))] and not cluster.members.end.failure.done()


@pytest.mark.parametrize("is_lost_too", [False, True])
def test_states_that_instances_say_they_have_are_told_unless_they_are_lost(is_lost_too):
    cluster = running(synthetic_kv=True)
    cluster.exited(SECOND, 0, "its process ended")
    cluster.until_replaced(SECOND, 1, 2)
    cluster.say(FIRST, 1, Left(((7, 40, 41),)))
    if is_lost_too:
        cluster.exited(FIRST, 0, "its process ended")
        cluster.until_replaced(FIRST, 1, 2)
        cluster.attach(FIRST)
    cluster.attach(SECOND)
    cluster.ready(FIRST, SECOND, term=2)
    told = () if is_lost_too else ((7, 40, 41),)
    assert cluster.events[-1] == Regrouped(2, (0, 1), restarts=told)


def test_a_loss_is_noticed_once_and_the_old_process_does_not_end_the_new_one():
    cluster = running(synthetic_kv=True)
    members = cluster.members
    cluster.failed(SECOND, "instance 1: its stream broke")
    cluster.exited(SECOND, 0, "its process was ended by SIGKILL")
    cluster.until_replaced(SECOND, 1, 2)
    assert cluster.events == [TermEnded(), InstanceLost(1)]
    cluster.attach(SECOND)
    cluster.exited(SECOND, 0, "late")
    assert SECOND in members.attached
    cluster.exited(SECOND, 1, "it ended as well")
    assert SECOND not in members.attached
    cluster.until_replaced(SECOND, 2, 2)


def test_reports_of_an_earlier_term_are_dropped():
    cluster = running(synthetic_kv=True)
    cluster.regroup()
    cluster.say(FIRST, 1, WindowDone(0, 0))
    for member in (FIRST, SECOND):
        cluster.say(member, 1, Left())
    cluster.ready(FIRST, SECOND, term=2)
    cluster.say(FIRST, 1, TransferDone(3, 0))
    assert cluster.reports == []
    cluster.say(FIRST, 2, TransferDone(4, 0))
    assert cluster.reports == [(FIRST, TransferDone(4, 0))]


def test_what_belongs_to_a_term_is_sent_to_members_that_are_in_it():
    cluster = running(synthetic_kv=True)
    cluster.send(FIRST, RefusePages(1))
    cluster.regroup()
    cluster.send(FIRST, RefusePages(2))
    assert cluster.kinds(FIRST) == [RefusePages, Leave]


def test_a_lost_prefill_is_replaced_without_a_new_term():
    cluster = running()
    cluster.exited(PREFILL, 0, "its process was ended by SIGKILL")
    cluster.until_replaced(PREFILL, 1, 2)
    assert PREFILL not in cluster.members.attached
    cluster.attach(PREFILL)
    assert cluster.kinds(PREFILL) == [Join] and cluster.kinds(FIRST) == []
    assert cluster.events == [PrefillArrived(PREFILL)]


def test_a_prefill_that_is_not_seen_dead_ends_the_term_whose_rings_it_may_write():
    cluster = running()
    cluster.failed(PREFILL, "prefill: its stream broke")
    cluster.until_replaced(PREFILL, 1, 2)
    assert cluster.events == [TermEnded()] and cluster.kinds(FIRST) == [Leave]


def test_a_cluster_that_does_not_recover_in_time_ends():
    cluster = running(LimitsConfig(recovery_timeout_ms=50), synthetic_kv=True)
    cluster.exited(SECOND, 0, "its process ended")
    cluster.wait(60)
    sentence = (
        "the service did not go on within recovery_timeout_ms (50 ms) after a loss: "
        "instance 1: its process ended"
    )
    assert cluster.members.end.failure.result(0) == sentence
    assert cluster.events[-1] == ClusterLost(sentence)


def test_a_prefill_that_does_not_come_back_in_time_ends_the_cluster_but_no_running_request():
    cluster = running(LimitsConfig(recovery_timeout_ms=50))
    cluster.exited(PREFILL, 0, "its process ended")
    cluster.wait(60)
    assert cluster.events == [PrefillLost(PREFILL)]


def test_a_process_that_cannot_be_started_ends_the_cluster():
    cluster = running(synthetic_kv=True)
    cluster.error = "no more processes"
    cluster.exited(SECOND, 0, "its process ended")
    cluster.wait(2000)
    assert cluster.members.end.failure.result(0) == (
        "instance 1: its process ended; no process could take its place: no more processes"
    )


@pytest.mark.parametrize("num_windows", [0, 1, 9])
def test_terms_that_end_as_soon_as_they_begin_end_the_cluster(num_windows):
    cluster = running(synthetic_kv=True)
    # What fails in its first window reports none.
    cluster.facts.has_windows = num_windows == 0
    for term in (1, 2, 3, 4):
        assert not cluster.members.end.failure.done()
        for member in (FIRST, SECOND):
            for _ in range(num_windows):
                cluster.say(member, term, WindowDone(0, 0))
        if term < 4:
            replace_second(cluster, term - 1, term + 1)
    cluster.exited(SECOND, 3, "its process ended")
    assert cluster.members.end.failure.result(0) == (
        "instance 1: its process ended; the 3 terms before ended as soon"
    )


def test_a_seat_that_ends_three_short_terms_stays_empty_if_the_others_can_serve():
    cluster = one_may_serve()
    cluster.facts.has_windows = True
    for term in (1, 3, 5):
        cluster.exited(SECOND, term // 2, "its process ended")
        cluster.say(FIRST, term, Left())
        cluster.ready(FIRST, term=term + 1)  # It goes on alone.
        if term < 5:
            cluster.until_replaced(SECOND, 1 + term // 2, term + 1)
            cluster.attach(SECOND)
            cluster.settled()
            cluster.say(FIRST, term + 1, Left())
            cluster.ready(FIRST, SECOND, term=term + 2)
    assert cluster.commands[-1] == KillProcess(SECOND, 2)
    assert len(cluster.starts()) == 2
    now = cluster.members.seats_now
    assert (now.serving, now.empty, now.starting) == ((0,), (1,), ())
    assert not cluster.members.end.failure.done()


@pytest.mark.parametrize("is_first", [True, False], ids=["before", "after"])
def test_the_next_term_begins_though_a_process_that_leaves_is_lost(is_first):
    """It is lost before the others have left, or after."""
    cluster = one_may_serve()
    cluster.want([1], "a test")
    cluster.settled()
    if not is_first:
        cluster.say(SECOND, 1, Left())
    cluster.exited(FIRST, 0, "its process ended")
    if is_first:
        cluster.say(SECOND, 1, Left())
    assert cluster.kinds(SECOND) == [Leave, Join]
    cluster.ready(SECOND, term=2)
    assert cluster.members.seats == [1] and cluster.members.terms.is_serving


def test_pages_of_a_seat_that_leaves_are_lost_with_its_process():
    cluster = one_may_serve()
    cluster.want([1], "a test")
    cluster.settled()
    cluster.say(FIRST, 1, Left())
    cluster.exited(FIRST, 0, "its process ended")
    assert cluster.events[-2:] == [TermEnded(), InstanceLost(0)]
    cluster.say(SECOND, 1, Left())
    cluster.ready(SECOND, term=2)
    assert cluster.members.seats == [1]


@pytest.mark.parametrize("num_windows", [0, 10])
def test_losses_of_an_idle_cluster_or_after_a_while_go_on(num_windows):
    cluster = running(synthetic_kv=True)
    for term in (1, 2, 3, 4):
        for member in (FIRST, SECOND):
            for _ in range(num_windows):
                cluster.say(member, term, WindowDone(0, 0))
        replace_second(cluster, term - 1, term + 1)
    assert not cluster.members.end.failure.done()


def test_without_recovery_a_cluster_fails_with_the_first_member_that_is_lost():
    cluster = running(NO_RECOVERY, synthetic_kv=True)
    cluster.lose(SECOND, "instance 1: its process ended", "stuck")
    cluster.lose(SECOND, "instance 1: its stream broke", "stuck")
    cluster.lose(FIRST, "instance 0: its peer is gone", "stuck")
    assert cluster.members.end.failure.result(0) == "instance 1: its process ended"
    assert cluster.events == [ClusterLost("instance 1 was lost")]
    assert cluster.commands == [KillProcess(SECOND, 0)]


# --- suspicion


def test_a_silent_member_is_lost():
    cluster = running(LimitsConfig(suspect_ms=300), synthetic_kv=True)
    for member in (FIRST, SECOND):
        cluster.say(member, 0, Beat())
    cluster.begin()
    cluster.settle()
    for _ in range(2 * TICKS):
        cluster.say(FIRST, 0, Beat())
        cluster.wait(300 / TICKS)
    assert cluster.events == [TermEnded(), InstanceLost(1)]
    assert "it has sent nothing for suspect_ms (300 ms)" in cluster.members.end.last_loss


@pytest.mark.parametrize(
    ("limits", "events"),
    [(LIMITS, [TermEnded(), InstanceLost(1)]),
     (NO_RECOVERY, [ClusterLost("instance 1 was lost")])],
    ids=["with recovery", "without"],
)  # fmt: skip
def test_the_culprit_of_a_silence_is_at_the_root_of_the_waits(limits, events):
    cluster = running(limits, synthetic_kv=True)
    cluster.say(FIRST, 0, Beat(1))
    cluster.say(SECOND, 0, Beat())
    cluster.say(SECOND, 1, Suspect(0, False, "ExchangeTimeout"))
    assert cluster.events == events


def test_instances_that_report_no_window_are_blamed_by_their_waits():
    cluster = running(synthetic_kv=True)
    cluster.say(FIRST, 0, Beat(1))
    cluster.blame([0, 1], "did not report window 3 in 50 s")
    assert cluster.events == [TermEnded(), InstanceLost(1)]
    assert cluster.members.end.last_loss == "instance 1 did not report window 3 in 50 s"


def test_a_peer_that_is_called_gone_is_lost_if_no_better_reason_comes():
    cluster = running(synthetic_kv=True)
    suspect = Suspect(1, True, "PeerLost")
    cluster.say(FIRST, 1, suspect)
    assert cluster.events == []
    cluster.wait(999)
    assert cluster.events == []
    cluster.wait(1)
    assert cluster.events == [TermEnded(), InstanceLost(1)]
    cluster.say(FIRST, 1, suspect)
    cluster.wait(2000)
    assert cluster.events == [TermEnded(), InstanceLost(1)], "the term is over"


def test_an_instance_that_does_not_leave_its_term_is_lost():
    limits = replace(LIMITS, plan_timeout_ms=30, retry_ms=20)
    cluster = running(limits, synthetic_kv=True)
    cluster.regroup()
    cluster.say(FIRST, 1, Left())
    cluster.wait(30)
    assert InstanceLost(1) in cluster.events
    assert "it did not leave its term in 30 ms" in cluster.members.end.last_loss


def test_each_further_process_comes_later_until_a_term_begins(monkeypatch):
    assert list(replacements._PAUSES_S) == sorted(replacements._PAUSES_S)
    monkeypatch.setattr(replacements, "_PAUSES_S", (0.0, 0.0, 600.0))
    cluster = running(LimitsConfig(recovery_timeout_ms=3_600_000), synthetic_kv=True)
    for number in range(2):
        cluster.exited(SECOND, number, "it has no room")
        cluster.until_replaced(SECOND, number + 1, term=2)
    cluster.say(FIRST, 1, Left())
    cluster.exited(SECOND, 2, "it has no room")
    cluster.wait(599_000)
    assert cluster.commands[-1] == KillProcess(SECOND, 2), "the next one waits"


def test_losses_with_terms_between_them_are_replaced_at_once(monkeypatch):
    monkeypatch.setattr(replacements, "_PAUSES_S", (0.0, 600.0))
    cluster = running(synthetic_kv=True)
    for term in range(2, 5):
        replace_second(cluster, term - 2, term, "it was killed")
        assert cluster.members.terms.is_serving
