"""A service whose nodes have one stream each: every token is right, and each loss is mended."""

import asyncio
import os
import signal
import time
from types import SimpleNamespace

import pytest

from control_plane.ports.member_streams import MemberServicer, MemberStream, _NodeStream
from control_plane.ports.members_port import MemberSecrets
from data_plane.member.node_streams import NodeStreams
from harness.exact.settings import configured
from harness.services.hash_service import CONFIG, hash_service, shared_memory_of, with_policy
from harness.services.service_recovery import SLOW, generating, pid_of, until, until_serving
from nanocp.serve.node_processes import carrier_address
from nanocp.values.commands import Leave
from nanocp.values.members import Hello, Loading, Member, Peer
from nanocp.values.plan import Finished, WindowDone
from nanocp.wire.members import FROM_INSTANCE, TO_INSTANCE, FromNode, FromStream, Opened, ToStream

NODES = [Member("node", 0), Member("node", 1)]
INSTANCES = [Member("instance", number) for number in range(4)]


def two_nodes(config=CONFIG):
    """Instances 0 and 1 share a node, and 2 and 3."""
    return configured(config, instances_per_node=2, node_streams=True)


def sockets_of(service):
    paths = [carrier_address(service.cluster_id, node).removeprefix("unix:") for node in (0, 1)]
    return [os.path.exists(path) for path in paths]


def test_every_token_is_right_and_an_instance_dies_alone():
    with hash_service(two_nodes(with_policy("chaos")), SLOW) as service:
        assert sockets_of(service) == [True, True]
        pids = {member: pid_of(service, member) for member in (*NODES, *INSTANCES)}
        with generating(service, 200):
            os.kill(pids[INSTANCES[1]], signal.SIGKILL)
            until_serving(service, 2)
        changed = [member for member, pid in pids.items() if pid_of(service, member) != pid]
        assert changed == [INSTANCES[1]], "nobody else is replaced"
    assert shared_memory_of(service) == [] and sockets_of(service) == [False, False]


@pytest.mark.system
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda each: each.name)
def test_the_process_of_a_node_is_lost_and_its_instances_with_it(number):
    with hash_service(two_nodes(), SLOW) as service:
        pids = {member: pid_of(service, member) for member in (*NODES, *INSTANCES)}
        with generating(service, 200):
            os.kill(pids[NODES[1]], number)
            until_serving(service, 2)
            until(lambda: pid_of(service, NODES[1]) != pids[NODES[1]])
        changed = [member for member, pid in pids.items() if pid_of(service, member) != pid]
        assert changed == [NODES[1], INSTANCES[2], INSTANCES[3]]
        assert not service.failure.done()
    assert shared_memory_of(service) == [] and sockets_of(service) == [False, False]


class Listener:
    """Takes what a node's streams say."""

    leaving = None

    def __init__(self):
        self.said = []
        self.streams = {}

    def loading(self, member, percent):
        self.said.append((str(member), percent))

    def attach(self, member, hello):
        self.streams[member] = MemberStream(member)
        return self.streams[member]

    def received(self, member, said, term):
        self.said.append((str(member), said))

    def failed(self, member, message, says_why=True):
        self.said.append((str(member), message))


OPENED = Opened("instance 1", "0" * 32)


def attached(*messages, silent_s=60.0, number=0, secret=""):
    """What a listener hears of these messages of a node, and what goes down.

    secret: of instance 1, if it is to be known.
    """
    listener, secrets, lost = Listener(), MemberSecrets(), []
    opened = Opened("instance 1", secret or secrets.issue("instance 1"))
    secrets.take("instance 1", opened.secret)
    hello = FROM_INSTANCE.encode(Hello(1, Peer()))
    known = {"opened": FromStream(1, opened), "hello": FromStream(1, message=hello)}
    metadata = (("nanocp-member", f"node {number}"),)

    async def requests():
        for message in messages:
            yield FromNode(
                tuple(known[item] if isinstance(item, str) else item for item in message)
            )
        if silent_s < 1:
            await asyncio.sleep(60)

    async def attach():
        context = SimpleNamespace(invocation_metadata=lambda: metadata)
        servicer = MemberServicer(listener, secrets, lost.append, silent_s)
        down = []
        async for message in servicer._attach_node(requests(), context):
            down += message.items
        return down

    return listener, asyncio.run(asyncio.wait_for(attach(), 60)), lost


REPORT = FROM_INSTANCE.encode(WindowDone(1, 3))
LOADING = FROM_INSTANCE.encode(Loading(7))


def test_a_node_carries_what_an_instance_says_and_its_end():
    loading, report = FromStream(1, message=LOADING), FromStream(1, message=REPORT)
    listener, _, lost = attached(["opened", loading, "hello", report], [FromStream(1), report])
    assert listener.said == [
        ("instance 1", 7),
        ("instance 1", WindowDone(1, 3)),
        ("instance 1", "instance 1: its stream broke"),
    ]
    assert lost == [Member("node", 0)]


@pytest.mark.parametrize(
    ("message", "sentence"),
    [(b"\xff\xff", "Expected `array`, got `int`"),
     (TO_INSTANCE.encode(Leave()), "'Leave'"),
     (FROM_INSTANCE.encode(WindowDone(1, 3, (Finished(1, 2, "tired"),))),
      "Invalid enum value 'tired'"),
     (FROM_INSTANCE.encode(WindowDone(2, 3)), "it speaks as instance 2")],
    ids=["bytes", "kind", "reason", "speaker"],
)  # fmt: skip
def test_a_message_that_means_nothing_ends_the_stream_of_its_instance_alone(message, sentence):
    """The node's stream, and with it those of its other instances, goes on."""
    listener, _, _ = attached(
        ["opened", "hello", FromStream(1, message=message)],
        [FromStream(2, OPENED), FromStream(2, message=LOADING)],
        secret=OPENED.secret,
    )
    (speaker, said), *rest = listener.said
    assert speaker == "instance 1" and said.startswith("instance 1: ") and sentence in said
    assert rest == [("instance 1", 7)]


@pytest.mark.parametrize("message", [b"\xff\xff", b""], ids=["bytes", "kind"])
def test_a_message_that_means_nothing_before_hello_ends_the_stream_too(message):
    listener, down, _ = attached(["opened", FromStream(1, message=message)], silent_s=0.5)
    assert (listener.said, down) == ([], [ToStream(1)])


def test_a_node_that_ends_or_is_silent_takes_its_instances_with_it():
    for silent_s in (60.0, 0.2):
        listener, _, lost = attached(["opened", "hello"], silent_s=silent_s)
        assert [member for member, _ in listener.said] == ["instance 1"]
        assert "the process that carries the streams of node 0 is lost" in listener.said[0][1]
        assert lost == [Member("node", 0)]


def test_a_controller_that_stood_still_blames_no_node():
    heard = []

    async def play():
        servicer = MemberServicer(Listener(), MemberSecrets(), lambda node: None, 0.6)
        node = _NodeStream(servicer, servicer._listener, servicer._secrets)
        up = asyncio.Queue()

        async def requests():
            while (message := await up.get()) is not None:
                heard.append(message)
                yield message

        reading = asyncio.create_task(node.read(requests(), 0.6))
        for _ in range(3):
            await asyncio.sleep(0.05)
            time.sleep(1.0)  # longer than the limit, on the controller's own thread
            up.put_nowait(FromNode())
        await asyncio.sleep(0.05)
        assert not reading.done()
        up.put_nowait(None)
        await asyncio.wait_for(reading, 60)

    asyncio.run(play())
    assert len(heard) == 3


def test_a_stream_without_the_secret_of_its_instance_is_refused():
    stolen = FromStream(1, OPENED)
    listener, _, _ = attached([stolen, "hello"])
    assert (listener.said, listener.streams) == ([], {})


def test_an_instance_cannot_attach_as_another():
    hello = FROM_INSTANCE.encode(Hello(2, Peer()))
    listener, _, _ = attached(["opened", FromStream(1, message=hello)])
    assert (listener.said, listener.streams) == ([], {})


def event(item):
    return "opened" if item.opened else "closed" if item.message is None else "message"


def test_reports_of_a_window_go_up_together_and_wait_for_nobody_for_long():
    async def play():
        node = NodeStreams()

        async def instance(reports, ends):
            async def requests():
                for _ in range(reports):
                    yield REPORT
                await ends.wait()

            metadata = (("nanocp-member", "instance 0"), ("nanocp-secret", "x"))
            context = SimpleNamespace(invocation_metadata=lambda: metadata)
            async for _ in node.attach(requests(), context):
                raise AssertionError("nothing was sent down")

        ends = asyncio.Event()
        tasks = [asyncio.create_task(instance(reports, ends)) for reports in (1, 1, 0)]
        up = node.messages(60.0)
        batches = []
        while sum(map(len, batches)) < 5:
            message = await asyncio.wait_for(anext(up), 60)
            batches.append(list(map(event, message.items)))
        ends.set()
        await asyncio.gather(*tasks)
        last = await asyncio.wait_for(anext(up), 60)
        return batches, list(map(event, last.items))

    batches, last = asyncio.run(play())
    assert [event for batch in batches for event in batch] == ["opened"] * 3 + ["message"] * 2
    assert batches[-1][-2:] == ["message", "message"], "together, though the third says nothing"
    assert last == ["closed"] * 3
