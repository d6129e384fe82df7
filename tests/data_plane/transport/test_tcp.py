"""Segments across TCP: page rings, deaths, and writers that are wrong."""

import socket
import struct
import threading
import time
from contextlib import closing
from dataclasses import replace

import pytest

from data_plane.kv.page_ring import PageRing, PageRingWriter
from data_plane.native.receiver import receive_puts
from data_plane.transport.exchange import Channel, ExchangeTimeout, Field, PeerLost
from data_plane.transport.segments import Segments, node_identity
from data_plane.transport.shared_memory import sweep_stale
from data_plane.transport.shm import ShmExchange
from data_plane.transport.tcp import messages as tcp_messages
from data_plane.transport.tcp.server import TcpSegmentServer
from harness.transports.page_writers import assert_written, page_payload, write_pages, written_page
from harness.transports.tcp_nodes import tcp_nodes
from harness.transports.transport_processes import (
    IMPATIENT,
    LAYOUT,
    LIMITS,
    NOTICED_S,
    START_MS,
    hold_instance,
    processes,
    receive,
)
from harness.waits import until
from nanocp.values.members import Peer

PAGE_BYTES = 1000


@pytest.fixture
def nodes(cluster_id):
    """Two members, each on a node of its own."""
    with tcp_nodes(cluster_id) as both:
        yield both


@pytest.fixture
def ring(nodes):
    with closing(PageRing.create(nodes[0], 0, 3, PAGE_BYTES)) as ring:
        yield ring


def taken(ring, num_pages):
    """So many pages, each checked against what was written."""
    pages = []
    deadline = time.monotonic() + 60
    while len(pages) < num_pages and time.monotonic() < deadline:
        ring.wait(100)
        for arrived in ring.arrived():
            assert_written(arrived, PAGE_BYTES)
            pages.append(arrived.page)
    return pages


def write(writer, page, timeout_ms=100):
    payload = page_payload(page, PAGE_BYTES)
    return writer.write(**written_page(page), payload=payload, timeout_ms=timeout_ms)


def test_a_thousand_pages_from_another_process_through_three_places(ring, nodes, cluster_id):
    with processes((write_pages, (cluster_id, range(1000), nodes[0].address))) as [(_, pipe)]:
        assert taken(ring, 1000) == list(range(1000))
        assert receive(pipe) == "ok"


def test_a_full_ring_holds_its_writer(ring, nodes):
    with closing(PageRingWriter(nodes[1], 0, IMPATIENT)) as writer:
        for page in range(3):
            assert writer.has_place and write(writer, page)
        assert not writer.has_place
        with pytest.raises(ExchangeTimeout, match="consumed none in 100 ms"):
            write(writer, 3)
        assert taken(ring, 3) == [0, 1, 2]
        assert write(writer, 3, timeout_ms=30_000)


def test_a_writer_goes_on_where_the_one_before_it_ended(ring, nodes):
    first = PageRingWriter(nodes[1], 0, IMPATIENT)
    write(first, 0)
    with pytest.raises(
        ValueError, match="prefill0-0 has its writer as a writer already; it can have only one"
    ):
        PageRingWriter(nodes[1], 0, IMPATIENT)
    assert taken(ring, 1) == [0]
    first.close()
    deadline = time.monotonic() + 30
    while True:
        try:
            second = PageRingWriter(nodes[1], 0, IMPATIENT)
            break
        except ValueError:
            assert time.monotonic() < deadline
    for page in range(1, 4):
        assert write(second, page)
    assert taken(ring, 3) == [1, 2, 3]
    second.close()


def test_a_killed_peer_is_noticed_by_a_tick(nodes, cluster_id):
    with closing(ShmExchange.create(nodes[0], 0, 2, LAYOUT, LIMITS)) as exchange:
        body = (hold_instance, (cluster_id, 1, 2, False, nodes[0].address))
        with processes(body) as [(process, pipe)]:
            nodes[0].meet([Peer("a", nodes[0].address), Peer("b", receive(pipe))])
            exchange.connect(START_MS)
            receive(pipe)
            writer = PageRingWriter(nodes[0], 1, LIMITS)
            killed_at = []
            killer = threading.Timer(
                0.2, lambda: (killed_at.append(time.monotonic()), process.kill())
            )
            killer.start()
            with pytest.raises(PeerLost, match=r"wait for Q of epoch 3.*instance 1 is gone"):
                exchange.wait(Channel.Q, 1, 3)
            assert time.monotonic() - killed_at[0] < NOTICED_S
            with pytest.raises(
                PeerLost, match=r"instance 1 waits for a place in its ring of 2: .* is gone"
            ):
                for page in range(3):
                    writer.write(**written_page(page), payload=bytes(64), timeout_ms=30_000)
            writer.close()
        exchange.put(Channel.Q, 1, 0)
    sweep_stale(cluster_id)


def test_rows_that_nobody_needs_do_not_travel(nodes):
    layout = {Channel.Q: (Field("q", "int64", (4, 8)), Field("count", "int64", (1,)))}
    ends = [ShmExchange.create(segments, i, 2, layout, LIMITS) for i, segments in enumerate(nodes)]
    for end in ends:
        end.connect(START_MS)
    for view in ends[0].outgoing(Channel.Q, 1, 0).values():
        view[...] = 7
    ends[0].put(Channel.Q, 1, 0, num_rows=2)
    arrived = ends[1].wait(Channel.Q, 0, 0)
    assert arrived["q"][:, 0].tolist() == [7, 7, 0, 0]
    assert arrived["count"] == 7
    for end in ends:
        end.close()


def test_another_layout_is_refused_by_the_field_that_differs(nodes):
    wider = {**LAYOUT, Channel.COMBINE: (Field("hidden", "uint16", (6, 999)),)}
    ends = [
        ShmExchange.create(nodes[i], i, 2, layout, IMPATIENT)
        for i, layout in enumerate((LAYOUT, wider))
    ]
    with pytest.raises(
        ValueError, match=r"exchange-1 has 'COMBINE.hidden uint16 \(6, 999\)' where this process"
    ):
        ends[0].connect(START_MS)
    for end in ends:
        end.close()


def test_a_peer_that_does_not_answer_is_named(nodes):
    with closing(ShmExchange.create(nodes[0], 0, 2, LAYOUT, IMPATIENT)) as exchange:
        with pytest.raises(
            ExchangeTimeout,
            match=r"exchange-1 could not be attached at 127.0.0.1:\d+ in 60 ms: the",
        ) as late:
            exchange.connect(60)
        assert late.value.peer == 1
        nodes[1].close()
        advice = r"Connection refused; nodes must reach each other on all ports"
        with pytest.raises(ExchangeTimeout, match=advice):
            exchange.connect(60)


def test_a_network_that_hides_a_peer_is_named_before_the_start_is_over(nodes):
    """Peers know an address once its owner listens, so a longer wait would not help."""
    limits = replace(LIMITS, retry_ms=1, plan_timeout_ms=20, exchange_timeout_ms=40)
    nodes[1].close()
    with (
        closing(ShmExchange.create(nodes[0], 0, 2, LAYOUT, limits)) as exchange,
        pytest.raises(ExchangeTimeout, match=r"exchange-1 .* in 40 ms: .*refused; nodes must"),
    ):
        exchange.connect(5000)


def test_a_node_without_a_door_cannot_be_reached(cluster_id):
    segments = Segments(cluster_id, node="a")
    segments.meet([Peer("a", ""), Peer("b", "")])
    exchange = ShmExchange.create(segments, 0, 2, LAYOUT, IMPATIENT)
    with (
        closing(exchange),
        pytest.raises(ValueError, match=r"instance 1 is on another node .*exchange_backend is shm"),
    ):
        exchange.connect(60)


@pytest.mark.parametrize(("word", "chunks"), [
    (8, ()),
    (4097, ()),
    (1 << 40, ()),
    (4096, [(0, 8)]),
    (4096, [(4096, 1 << 40)]),
    (4096, [(4096, 8)] * 9),
])  # fmt: skip
def test_a_put_outside_the_segment_ends_the_connection(nodes, ring, word, chunks):
    before = bytes(ring._segment.memory)
    writer = PageRingWriter(nodes[1], 0, IMPATIENT)
    table = [number for chunk in chunks for number in chunk][:16]
    header = tcp_messages.HEADER.pack(word, 1, len(chunks), *table, *[0] * (16 - len(table)))
    writer._segment._connection.sendall(header + bytes(100))
    until(lambda: not writer._segment.owner_is_alive())
    assert bytes(ring._segment.memory) == before
    writer.close()


def test_whoever_is_not_a_member_is_not_answered(nodes):
    host, port = nodes[0].address.split(":")
    for greeting in (b"GET / HTTP/1.1\r\n", struct.pack("<8sQ", b"nanocp\x00t", 1 << 40)):
        with socket.create_connection((host, int(port)), 30) as stranger:
            stranger.settimeout(30)
            stranger.sendall(greeting)
            assert stranger.recv(100) == b""


def test_a_put_that_is_not_taken_has_a_limit(cluster_id):
    """A process that is stopped: its kernel takes what fits its buffers."""
    stopped = Segments(cluster_id, TcpSegmentServer("127.0.0.1", receive_puts), node="b")
    segments = Segments(cluster_id, node="a")
    segments.meet([Peer("a", ""), Peer("b", stopped.address)])
    with closing(PageRing.create(stopped, 1, 4, 1 << 24)):
        go_on = threading.Event()
        stopped._server._receive = lambda *_: go_on.wait(60)
        with closing(PageRingWriter(segments, 1, IMPATIENT)) as writer:
            began = time.monotonic()
            with pytest.raises(
                ExchangeTimeout, match="its process is alive but took nothing in 300 ms"
            ) as late:
                for page in range(4):
                    writer.write(**written_page(page), payload=bytes(1 << 24), timeout_ms=100)
            assert late.value.peer == 1
            assert time.monotonic() - began < 10
        go_on.set()
    stopped.close()


def test_rows_that_are_not_taken_have_a_limit(nodes):
    layout = {Channel.DISPATCH: (Field("hidden", "uint8", (1 << 24,)),)}
    ends = [ShmExchange.create(nodes[i], i, 2, layout, IMPATIENT) for i in range(2)]
    go_on = threading.Event()
    nodes[1]._server._receive = lambda *_: go_on.wait(60)
    with closing(ends[0]), closing(ends[1]):
        ends[0].connect(START_MS)
        with pytest.raises(ExchangeTimeout, match="took nothing in 300 ms") as late:
            for epoch in range(4):
                ends[0].put(Channel.DISPATCH, 1, epoch)
        assert late.value.peer == 1
        go_on.set()


def test_this_node_is_itself():
    assert node_identity() == node_identity() != ""
