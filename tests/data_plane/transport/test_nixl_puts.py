"""Puts by NIXL: what is not whole, or of another term, is not taken; peers die, stop and return."""

import itertools
import os
import random
import shutil
import signal
import subprocess
import time
import uuid
from contextlib import ExitStack, closing
from types import SimpleNamespace

import numpy as np
import pytest

from data_plane.native.receiver import receive_puts
from data_plane.transport.exchange import (
    Channel,
    ExchangeTimeout,
    Field,
    PeerLost,
    Term,
    TermOver,
)
from data_plane.transport.futex import Word
from data_plane.transport.nixl import pages as nixl
from data_plane.transport.nixl import puts as nixl_puts
from data_plane.transport.nixl.puts import Inbox
from data_plane.transport.segments import Segments
from data_plane.transport.shared_memory import OwnedSegment, sweep_stale
from data_plane.transport.shm import ShmExchange
from data_plane.transport.tcp.server import TcpSegmentServer
from harness.transports.step_protocol import Protocol, run_protocol
from harness.transports.transport_processes import (
    IMPATIENT,
    LAYOUT,
    LIMITS,
    NOTICED_S,
    START_MS,
    hold_instance_by_nixl,
    processes,
    receive,
)
from nanocp.values.members import Peer

pytestmark = pytest.mark.skipif(nixl.nixl_package() is None, reason="NIXL is not installed")
TERM = 7
COUNT_BYTES, ROW_BYTES, MOST_ROWS = 30, 100, 4
"""What a region holds behind the line of its flag."""


@pytest.fixture(autouse=True)
def over_tcp(monkeypatch):
    """Let bytes move only when an agent is called, as they do between machines."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")


class Region:
    """A region of a segment whose messages a test writes by hand, without NIXL."""

    def __init__(self, cluster_id):
        self.segment = OwnedSegment(f"nanocp-{cluster_id}-t7-exchange-0", "", 1024)
        self.segment.bulk = np.zeros(1024, np.uint8)
        agent = SimpleNamespace(progress=lambda: None, go_on=lambda limit_s: None)
        self.inbox = Inbox(self.segment, TERM, agent)
        offset = self.segment.data_offset
        self.word = Word(self.segment.memory, offset)
        self.run = offset + 64, COUNT_BYTES + MOST_ROWS * ROW_BYTES

    def message(self, value, rows, term=TERM):
        """The bytes of a put of what stands for a count, and rows."""
        data = bytes([value % 256] * COUNT_BYTES) + b"".join(rows)
        message = np.zeros(40 + -(-len(data) // 8) * 8, np.uint8)
        message[40 : 40 + len(data)] = np.frombuffer(data, np.uint8)
        words = message.view(np.uint64)
        words[2:5] = value, term, len(data)
        words[:2] = nixl_puts._sums(words)
        return message

    def look(self, message):
        self.segment.bulk[: len(message)] = message
        self.inbox.look(self.word, *self.run)
        return self.word.load()

    def contents(self):
        at, size = self.run
        return bytes(self.segment.memory[at : at + size])


@pytest.fixture
def region(cluster_id):
    region = Region(cluster_id)
    yield region
    region.inbox = None
    region.segment.close()


def rows_of(rng):
    return [rng.randbytes(100) for _ in range(rng.randint(1, 4))]


def test_a_message_is_taken_whole_and_once(region):
    rows = [b"a" * 100, b"b" * 100]
    assert region.look(region.message(3, rows)) == 3
    assert region.contents() == bytes([3] * 30) + b"a" * 100 + b"b" * 100 + bytes(200)
    region.segment.memory[region.run[0]] = 0
    assert region.look(region.message(3, rows)) == 3
    assert region.contents()[0] == 0, "it may be read, or even overwritten, meanwhile"


@pytest.mark.parametrize("unit", [1, 8, 64])
def test_a_message_of_which_bytes_are_missing_is_not_taken(region, unit):
    """UCX promises no order: whatever is missing is still of the put before."""
    rng = random.Random(unit)
    old = region.message(1, rows_of(rng))
    region.look(old)
    for value in range(2, 200):
        new = region.message(value, rows_of(rng))
        size = max(len(old), len(new))
        torn, whole = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
        torn[: len(old)], whole[: len(old)] = old, old
        whole[: len(new)] = new
        before = region.contents()
        pieces = list(range(0, len(new), unit))
        for begin in rng.sample(pieces, rng.randint(1, len(pieces) - 1)):
            torn[begin : begin + unit] = whole[begin : begin + unit]
            if not (torn[: len(new)] == new).all():
                assert region.look(torn) == value - 1
        assert region.contents() == before
        assert region.look(new) == value
        old = new


def test_a_message_that_differs_in_high_bits_alone_is_not_taken(region):
    """Flags and signs may be: they are the highest bytes of their words."""
    new = region.message(1, [bytes(100)])
    highest = range(40 + 7, 40 + 128, 8)
    for first, second in itertools.combinations(highest, 2):
        torn = new.copy()
        torn[[first, second]] ^= 128
        assert region.look(torn) == 0
    assert region.look(new) == 1


def test_a_message_of_another_term_is_not_taken(region):
    rows = [b"x" * 100]
    assert region.look(region.message(9, rows, term=TERM - 1)) == 0
    assert region.contents() == bytes(430)
    assert region.look(region.message(1, rows)) == 1


def test_a_size_that_does_not_fit_is_not_taken(region):
    message = region.message(1, [b"x" * 100])
    message[32:40].view(np.uint64)[0] = 431
    message.view(np.uint64)[:2] = nixl_puts._sums(message.view(np.uint64))
    assert region.look(message) == 0


def nixl_segments(cluster_id, number, term=None):
    agent = nixl.NixlAgent(f"{cluster_id} {number} {uuid.uuid4().hex}")
    server = TcpSegmentServer("127.0.0.1", receive_puts)
    return Segments(cluster_id, server, puts=agent, term=term)


@pytest.fixture
def pair(cluster_id):
    """Make two instances of this process: (layout, limits) -> exchanges, and their terms."""
    with ExitStack() as held:

        def make(layout, limits=LIMITS):
            terms = [Term(), Term()]
            both = [nixl_segments(cluster_id, i, term) for i, term in enumerate(terms)]
            ends = [ShmExchange.create(each, i, 2, layout, limits) for i, each in enumerate(both)]
            for segments, end in zip(both, ends, strict=True):
                held.callback(segments.close)
                held.callback(end.close)
                segments.meet([Peer("", each.address) for each in both])
            for end in ends:
                end.connect(START_MS)
            return ends, terms

        yield make


def test_a_large_put_arrives_though_its_writer_does_not_call_again(pair):
    """More than any socket takes at once."""
    ends, _ = pair({Channel.Q: (Field("q", "uint8", (1 << 26,)),)})
    ends[0].outgoing(Channel.Q, 1, 0)["q"][:] = 5
    ends[0].put(Channel.Q, 1, 0)
    assert (ends[1].wait(Channel.Q, 0, 0)["q"] == 5).all()


def stop_progress(exchange, monkeypatch):
    """What a process does that is stopped: nothing."""
    monkeypatch.setattr(type(exchange._segments.puts), "go_on", lambda *_: None)


LARGE = {Channel.Q: (Field("q", "uint8", (1 << 24,)),)}


def test_a_put_that_is_not_taken_has_a_limit(pair, monkeypatch):
    ends, _ = pair(LARGE, IMPATIENT)
    stop_progress(ends[1], monkeypatch)
    with pytest.raises(ExchangeTimeout, match=r"alive but took more than 0\.3 s") as late:
        for epoch in range(4):
            ends[0].put(Channel.Q, 1, epoch)
    assert late.value.peer == 1
    ends[0].close()  # with writes under way


def test_a_put_that_is_not_taken_ends_with_its_term(pair, monkeypatch):
    ends, terms = pair(LARGE)
    stop_progress(ends[1], monkeypatch)
    terms[0].end(1)
    with pytest.raises(TermOver):
        for epoch in range(4):
            ends[0].put(Channel.Q, 1, epoch)


def test_a_region_is_not_written_again_while_its_last_write_is_under_way(pair):
    """The network reads the memory that a put packs its rows into."""
    ends, _ = pair(LARGE)
    for epoch in range(0, 8, 2):
        ends[0].outgoing(Channel.Q, 1, epoch)["q"][:] = epoch
        ends[0].put(Channel.Q, 1, epoch)
        segment = ends[0]._peers[1]
        (write,) = segment._under_way.values()
        assert segment._writes and write is next(iter(segment._writes.values()))
        assert (ends[1].wait(Channel.Q, 0, epoch)["q"] == epoch).all()


def run_cluster(cluster_id, **changes):
    protocol = Protocol(
        num_instances=4,
        num_dense_layers=1,
        num_moe_layers=1,
        seed=4,
        idle_instance=2,
        by_nixl=True,
        **changes,
    )
    bodies = [(run_protocol, (cluster_id, instance, "", protocol)) for instance in range(4)]
    with processes(*bodies) as members:
        peers = [receive(pipe) for _, pipe in members]
        for _, pipe in members:
            pipe.send(peers)
        answers = [receive(pipe, 400) for _, pipe in members]
        for process, _ in members:
            process.wait(60)
        return answers


@pytest.mark.parametrize("num_steps", [100, pytest.param(1000, marks=pytest.mark.system)])
def test_the_step_protocol_is_safe_by_nixl(cluster_id, num_steps):
    assert run_cluster(cluster_id, num_steps=num_steps) == ["ok"] * 4


NETWORK = "198.18.78"
"""A network that no real machine has: it is in the range for benchmarks (RFC 2544)."""


def ip(*words):
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    return done.stderr if done.returncode else ""


@pytest.fixture
def namespaces():
    """Four network namespaces of this machine, joined by a bridge, with addresses .1 to .4."""
    names = [f"nanocp-x{number}" for number in range(1, 5)]
    if shutil.which("ip") is None or os.geteuid() != 0 or ip("netns", "add", names[0]):
        pytest.skip("needs root, and ip to make network namespaces")
    try:
        must = [["link", "add", "nanocpx", "type", "bridge"], ["link", "set", "nanocpx", "up"]]
        for number, name in enumerate(names, start=1):
            link, inside = f"nanocpx{number}", ["-n", name]
            if number > 1:
                must.append(["netns", "add", name])
            veth = ["type", "veth", "peer", "name", "eth0", "netns", name]
            must += [
                ["link", "add", link, *veth],
                ["link", "set", link, "master", "nanocpx", "up"],
                [*inside, "address", "add", f"{NETWORK}.{number}/24", "dev", "eth0"],
                [*inside, "link", "set", "eth0", "up"],
                [*inside, "link", "set", "lo", "up"],
            ]
        assert not [error for error in (ip(*words) for words in must) if error]
        yield names
    finally:
        for name in names:
            ip("netns", "delete", name)
        ip("link", "delete", "nanocpx")


@pytest.mark.system
def test_the_step_protocol_is_safe_between_network_namespaces(cluster_id, namespaces, monkeypatch):
    monkeypatch.setenv("UCX_NET_DEVICES", "eth0")
    addresses = tuple(f"{NETWORK}.{number}" for number in range(1, 5))
    answers = run_cluster(
        cluster_id, num_steps=300, addresses=addresses, namespaces=tuple(namespaces)
    )
    assert answers == ["ok"] * 4


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda each: each.name)
def test_a_peer_that_dies_or_stops_is_noticed_and_named(cluster_id, number):
    """A process that is stopped lives: the wait has a limit."""
    segments = nixl_segments(cluster_id, 0)
    limits = LIMITS if number == signal.SIGKILL else IMPATIENT
    with closing(segments), closing(ShmExchange.create(segments, 0, 2, LAYOUT, limits)) as exchange:
        with processes((hold_instance_by_nixl, (cluster_id, segments.address))) as [(peer, pipe)]:
            segments.meet([Peer("a", segments.address), Peer("b", receive(pipe))])
            exchange.connect(START_MS)
            for epoch in range(4):
                assert (exchange.wait(Channel.Q, 1, epoch)["q"] == epoch).all()
                exchange.put(Channel.RES, 1, epoch)
            assert receive(pipe) == "ok"
            os.kill(peer.pid, number)
            began = time.monotonic()
            lost = PeerLost if number == signal.SIGKILL else ExchangeTimeout
            with pytest.raises(lost, match=r"wait for Q of epoch 4.*instance 1 is") as late:
                exchange.wait(Channel.Q, 1, 4)
            assert late.value.peer == 1 and time.monotonic() - began < NOTICED_S
        sweep_stale(cluster_id)


def test_a_put_to_a_peer_that_nixl_has_forgotten_names_it(pair):
    """NIXL forgets a peer whose connection broke, and knows no other that is called so."""
    ends, _ = pair(LAYOUT)
    ends[0]._segments.puts._agent.remove_remote_agent(ends[0]._peers[1]._peer)
    with pytest.raises(PeerLost, match=r"a put to .* by NIXL") as lost:
        ends[0].put(Channel.Q, 1, 0)
    assert lost.value.peer == 1


def test_an_owner_that_takes_no_puts_by_nixl_is_refused(cluster_id):
    server = TcpSegmentServer("127.0.0.1", receive_puts)
    plain = Segments(cluster_id, server)
    with closing(plain), closing(ShmExchange.create(plain, 0, 2, LAYOUT, LIMITS)):
        segments = nixl_segments(cluster_id, 1)
        segments.meet([Peer("", plain.address), Peer("", segments.address)])
        exchange = ShmExchange.create(segments, 1, 2, LAYOUT, LIMITS)
        with (
            closing(segments),
            closing(exchange),
            pytest.raises(ValueError, match="exchange-0 takes no puts by NIXL: exchange_backend"),
        ):
            exchange.connect(START_MS)
