"""Pages by NIXL between processes, over memory of the CPU: contents, order, a peer that dies."""

import os
import re
import subprocess
import sys
import time
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch

from data_plane.kv.frame_pool import FramePool
from data_plane.kv.page_ring import PageRing, PageRingWriter
from data_plane.native.receiver import receive_puts
from data_plane.transport.exchange import ExchangeTimeout, PeerLost
from data_plane.transport.nixl import pages as nixl
from data_plane.transport.segments import Segments
from data_plane.transport.shared_memory import unlink_cluster
from data_plane.transport.tcp.server import TcpSegmentServer
from harness.transports.page_writers import (
    hold_nixl_ring,
    kv_page,
    rest_with_a_nixl_ring,
    write_kv_pages,
    write_nixl_pages,
    written_page,
)
from harness.transports.transport_processes import LIMITS, NOTICED_S, processes, receive
from nanocp.config.data_plane import DataPlaneConfig
from nanocp.values.members import Peer

NUM_LAYERS, WIDTH, NUM_PAGES = 3, 40, 50


def test_pages_of_real_frames_reach_another_process_whole_and_in_order(cluster_id):
    """The ring has three places, so each is written many times; both pools have separate layers."""
    frames = FramePool(NUM_LAYERS, NUM_PAGES, WIDTH, torch.bfloat16)
    segments = Segments(
        cluster_id,
        TcpSegmentServer("127.0.0.1", receive_puts),
        nixl=nixl.NixlAgent(f"{cluster_id} receiver"),
    )
    with closing(segments), closing(PageRing.create(segments, 0, 3, frames.page_bytes)) as ring:
        assert ring._segment.bulk.nbytes >= 3 * frames.page_bytes, "pages do not lie in the segment"
        shape = NUM_LAYERS, WIDTH, NUM_PAGES
        with processes((write_kv_pages, (cluster_id, segments.address, shape))) as [(_, pipe)]:
            num_pages, deadline = 0, time.monotonic() + 60
            while num_pages < NUM_PAGES and time.monotonic() < deadline:
                ring.wait(100)
                for arrived in ring.arrived():
                    header = arrived._asdict()
                    payload = header.pop("payload")
                    assert (header.pop("offset"), header.pop("page_bytes")) == (0, 0)
                    assert header == written_page(num_pages)
                    frames.write_payload(arrived.page, arrived.num_tokens, payload)
                    num_pages += 1
            assert receive(pipe) == "ok"
    for page in range(NUM_PAGES):
        expected = kv_page(NUM_LAYERS, WIDTH, page)
        expected[:, page % 64 + 1 :] = 0
        assert frames.layers[:, page].equal(expected), page


def test_a_receiver_that_dies_is_noticed_by_a_writer_in_time(cluster_id):
    num_bytes = 1 << 20
    with (
        processes((hold_nixl_ring, (cluster_id, 2, num_bytes))) as [(receiver, pipe)],
        processes((write_nixl_pages, (cluster_id, receive(pipe), 4, num_bytes))) as [(_, writer)],
    ):
        assert [receive(writer) for _ in range(2)] == [0, 1]
        time.sleep(0.1)
        receiver.kill()
        killed_at = time.monotonic()
        assert "waits for a place in its ring of 2: the process of the instance is gone" in receive(
            writer
        )
        assert time.monotonic() - killed_at < NOTICED_S
        assert re.match(f"{num_bytes} bytes for .* receiver by NIXL: ", receive(writer))
    unlink_cluster(cluster_id)


LOST = ("nixlRemoteDisconnectError", "nixlBackendError", "nixlNotFoundError")


class StuckAgent:
    """NIXL's, whose transfers go on for ever, or end in another state."""

    def __init__(self, state):
        self.state = state

    def get_xfer_descs(self, places, kind):
        return places

    def initialize_xfer(self, *arguments):
        return arguments

    def transfer(self, handle):
        return self.state

    def check_xfer_state(self, handle):
        return self.state


@pytest.mark.parametrize(
    ("state", "is_alive", "kind"),
    [("PROC", False, PeerLost), ("PROC", True, ExchangeTimeout), ("ERR", True, PeerLost)],
)
def test_a_write_that_fails_has_the_number_of_the_peer(state, is_alive, kind):
    agent, segment = object.__new__(nixl.NixlAgent), object.__new__(nixl.NixlSegment)
    agent._agent = StuckAgent(state)
    agent._bindings = SimpleNamespace(**dict.fromkeys(LOST, OSError))
    place = nixl.Place(0, 100, device=0, is_gpu=False)
    segment._agent, segment._local, segment._remote, segment._peer = agent, place, place, "a peer"
    segment._instance, segment._limits = 5, SimpleNamespace(exchange_timeout_ms=50)
    answers = iter([True])  # it lives as the write begins
    segment.owner_is_alive = lambda: next(answers, is_alive)
    segment.announce = lambda: None
    with pytest.raises(kind, match="10 bytes for a peer by NIXL") as raised:
        segment.publish(None, 1, bulk=(0, 10))
    assert raised.value.peer == 5


@pytest.mark.parametrize("lost", LOST)
def test_a_peer_that_nixl_lost_or_has_forgotten_is_a_lost_peer(lost):
    agent = object.__new__(nixl.NixlAgent)
    errors = {name: type(name, (Exception,), {}) for name in LOST}
    agent._bindings = SimpleNamespace(**errors)

    def write():
        raise errors[lost]("gone")

    with pytest.raises(PeerLost, match="a write: gone") as raised:
        agent._call(write, "a write", 5)
    assert raised.value.peer == 5


def test_an_idle_receiver_does_not_work(cluster_id):
    """NIXL's own progress thread would take a core."""
    with processes((rest_with_a_nixl_ring, (cluster_id,))) as [(_, pipe)]:
        assert min(receive(pipe)) < 0.03


def test_ucx_without_a_way_is_a_sentence(cluster_id, monkeypatch):
    # UCX reads its variables once in a process.
    code = "from data_plane.transport.nixl.pages import NixlAgent; NixlAgent('alone')"
    environment = os.environ | {"UCX_TLS": "self"}
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert "ValueError: NIXL does not start (NIXL_ERR_BACKEND): UCX_TLS and" in ended.stderr

    agent = nixl.NixlAgent(f"{cluster_id} writer")
    _, place = agent.allocate(64)
    grant = agent.grant(place)

    def without_a_way(_metadata):
        raise agent._bindings.nixlBackendError("NIXL_ERR_BACKEND")

    # As in two namespaces whose only common transport UCX_NET_DEVICES leaves out.
    monkeypatch.setattr(agent._agent, "add_remote_agent", without_a_way)
    with pytest.raises(
        ValueError, match=r"no way to the memory of another process .*: UCX_TLS and"
    ):
        agent.meet(grant)


def test_what_cannot_be_is_refused_by_name(cluster_id, monkeypatch):
    with pytest.raises(
        ValueError, match=r"page_backend is nixl and exchange_backend shm; .*: take auto"
    ):
        DataPlaneConfig(page_backend="nixl", exchange_backend="shm")
    plain = Segments(cluster_id, TcpSegmentServer("127.0.0.1", receive_puts))
    with closing(plain), closing(PageRing.create(plain, 0, 2, 64)):
        segments = Segments(cluster_id, nixl=nixl.NixlAgent(f"{cluster_id} writer"))
        segments.meet([Peer("elsewhere", plain.address)])
        with pytest.raises(
            ValueError, match="prefill0-0 takes no pages by NIXL: page_backend must be the same"
        ):
            PageRingWriter(segments, 0, LIMITS)
    monkeypatch.setattr(nixl, "nixl_package", lambda: None)
    with pytest.raises(ValueError, match=r"NIXL is not installed \(pip install '.\[nixl\]'\)"):
        nixl.NixlAgent("nobody")
