"""Who has dialled, who is ready, who was lost."""

import pytest

from control_plane.member_streams import PREFILL, Member, MemberStream
from control_plane.members import Members, StartError
from nanocp.config import ClusterConfig, Config, PrefillConfig
from nanocp.wire.v1 import cluster_pb2 as pb

FIRST, SECOND = Member("instance", 0), Member("instance", 1)


class Events:
    """Remembers what it is called for."""

    def __init__(self):
        self.reports, self.losses = [], []

    def reported(self, member, message):
        self.reports.append((member, message.WhichOneof("message")))

    def lost(self, member):
        self.losses.append(member)


def two_instances(**prefill):
    config = Config(cluster=ClusterConfig(num_instances=2), prefill=PrefillConfig(**prefill))
    events, progress, loaded = Events(), [], []
    members = Members(config, "c0ffee", events)
    members.watch(progress.append, lambda member, percent: loaded.append((member, percent)))
    return members, events, progress, loaded


def sent_to(stream):
    """The messages down that wait in the stream."""
    queue = stream._messages
    return [queue.get_nowait() for _ in range(queue.qsize())]


def kinds(stream):
    return [message and message.WhichOneof("message") for message in sent_to(stream)]


def test_a_member_is_called_what_it_is():
    assert (str(SECOND), str(PREFILL), f"{FIRST}: lost") == (
        "instance 1",
        "prefill",
        "instance 0: lost",
    )


def test_members_connect_when_the_last_has_dialled():
    members, _, _, _ = two_instances()
    streams = [members.attach(member, pb.Peer(node=str(member))) for member in (SECOND, FIRST)]
    assert [kinds(stream) for stream in streams] == [["welcome"], ["welcome"]]
    prefill = members.attach(PREFILL)
    assert [kinds(stream) for stream in streams] == [["connect"], ["connect"]]
    welcome, connect = sent_to(prefill)
    assert (welcome.welcome.num_instances, welcome.welcome.cluster_id) == (2, "c0ffee")
    assert [peer.node for peer in connect.connect.peers] == ["instance 0", "instance 1"]


def test_with_synthetic_kv_there_is_no_prefill():
    members, _, _, _ = two_instances(synthetic_kv=True)
    assert members.expected == (FIRST, SECOND)
    with pytest.raises(
        ValueError, match="this cluster has no prefill; it has instance 0, instance 1"
    ):
        members.attach(PREFILL)


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
    members, _, _, _ = two_instances()
    members.attach(FIRST)
    with pytest.raises(ValueError, match=sentence):
        members.attach(member)


def test_the_cluster_has_started_when_the_last_member_is_ready():
    members, events, progress, loaded = two_instances()
    members.loading(FIRST, 50)
    members.loading(Member("instance", 7), 50)
    members.received(PREFILL, pb.FromPrefill(loading_percent=100))
    for member in (SECOND, FIRST):
        ready = pb.InstanceReady(selected=["kernels: torch"], num_graphs=3)
        members.received(member, pb.FromInstance(ready=ready))
    members.received(PREFILL, pb.FromPrefill(ready=pb.PrefillReady(pid=9)))
    assert loaded == [(FIRST, 50), (PREFILL, 100)]
    assert progress == [f"{num} of 3 processes are ready" for num in (1, 2, 3)]
    choices = ("kernels: torch", "graphs: 3 prepared")
    assert members.wait_ready() == {FIRST: choices, SECOND: choices, PREFILL: ("process 9",)}
    members.received(FIRST, pb.FromInstance(window_done=pb.WindowDone()))
    assert events.reports == [(FIRST, "window_done")]


def test_a_member_that_is_lost_before_all_are_ready_ends_the_start():
    members, events, _, _ = two_instances()
    members.failed(None, "instance 1: no such module")
    members.failed(FIRST, "instance 0: its stream broke")
    with pytest.raises(StartError, match="instance 1: no such module"):
        members.wait_ready()
    assert events.losses == [FIRST]


def running():
    members, events, _, _ = two_instances(synthetic_kv=True)
    streams = [members.attach(member) for member in members.expected]
    for member in members.expected:
        members.received(member, pb.FromInstance(ready=pb.InstanceReady()))
    members.wait_ready()
    for stream in streams:
        sent_to(stream)
    return members, events, streams


def test_a_running_cluster_fails_with_the_first_member_that_is_lost():
    members, events, _ = running()
    members.lose(SECOND, "instance 1: its process ended")
    members.lose(SECOND, "instance 1: its stream broke")
    members.lose(FIRST, "instance 0: its peer is gone")
    assert members.failure.result(0) == "instance 1: its process ended"
    assert events.losses == [SECOND, FIRST] and members.all_lost == {FIRST, SECOND}


def test_a_member_that_reads_nothing_is_lost():
    members, events, (stream, _) = running()
    assert isinstance(stream, MemberStream)
    stream.max_messages = 2
    for _ in range(4):
        members.send(FIRST, pb.ToInstance(fence=1))
    assert members.failure.result(0) == "instance 0 left 2 messages unread"
    assert events.losses == [FIRST] and kinds(stream) == ["fence", "fence", None]


def test_who_was_asked_to_leave_is_not_lost():
    members, events, streams = running()
    members.leave("the service is stopping")
    members.leave("again")
    members.lose(FIRST, "instance 0: its actor left")
    members.fail("late")
    assert [kinds(stream) for stream in streams] == [["shutdown", None]] * 2
    assert not members.failure.done() and events.losses == []


def test_who_attaches_late_is_asked_to_leave_too():
    members, _, _, _ = two_instances()
    members.leave("the service is stopping")
    stream = members.attach(FIRST)
    welcome, shutdown, end = sent_to(stream)
    assert (welcome.WhichOneof("message"), end) == ("welcome", None)
    assert shutdown.shutdown.reason == "the service is stopping"
