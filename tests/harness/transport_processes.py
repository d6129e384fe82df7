"""Bodies of the processes that the transport tests start: light to import, since every process pays
for it."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import numpy as np

from data_plane.kv.page_ring import PageRing, PageRingWriter
from data_plane.transport.exchange import Channel, Field, PeerLost
from data_plane.transport.nixl import NixlAgent
from data_plane.transport.segments import Peer, Segments
from data_plane.transport.shm import ShmExchange
from data_plane.transport.tcp import TcpSegmentServer
from nanocp.config import LimitsConfig

LIMITS = LimitsConfig(tick_ms=50, exchange_timeout_ms=30_000, plan_timeout_ms=29_000, retry_ms=100)
IMPATIENT = LimitsConfig(tick_ms=10, exchange_timeout_ms=300, plan_timeout_ms=200, retry_ms=100)
START_MS = 30_000
NOTICED_S = LIMITS.exchange_timeout_ms / 3000
"""What a wait hears at its next tick it has heard after so long on any machine; by its timeout it
would be too late."""
MAX_LINKS, WIDTH = 6, 257
LAYOUT = {
    Channel.Q: (
        Field("position", "int64", (MAX_LINKS,)),
        Field("q", "float32", (MAX_LINKS, WIDTH)),
    ),
    Channel.RES: (
        Field("partial", "float32", (MAX_LINKS, WIDTH)),
        Field("lse", "float32", (MAX_LINKS,)),
    ),
    Channel.DISPATCH: (
        Field("count", "int32", (1,)),
        Field("hidden", "uint16", (MAX_LINKS, WIDTH)),
    ),
    Channel.COMBINE: (Field("hidden", "uint16", (MAX_LINKS, WIDTH)),),
    Channel.MAILBOX: (Field("payload", "uint8", (100,)),),
}


@contextmanager
def processes(
    *bodies: tuple[Callable[..., None], tuple],
) -> Iterator[list[tuple[BaseProcess, Connection]]]:
    """Start each body with its arguments and a pipe's end; whatever still runs at the end is
    killed."""
    context = multiprocessing.get_context("spawn")
    started = []
    try:
        for body, arguments in bodies:
            ours, theirs = context.Pipe()
            process = context.Process(target=body, args=(*arguments, theirs), daemon=True)
            process.start()
            theirs.close()
            started.append((process, ours))
        yield started
    finally:
        for process, pipe in started:
            process.kill()
            process.join()
            pipe.close()


def receive(pipe: Connection, timeout_s: float = 60):
    """The next message of a process; fails if none comes."""
    assert pipe.poll(timeout_s), "the process said nothing"
    return pipe.recv()


# --- the whole protocol of the steps
# ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Protocol:
    """Random steps: links and hand-offs change with each, drawn alike by all instances from the
    seed."""

    num_instances: int
    num_steps: int
    num_dense_layers: int
    num_moe_layers: int
    seed: int
    idle_instance: int
    """Has no row: it sends no Q and dispatches no token, but holds KV and experts."""
    is_one_deep: bool = False
    """The control: both parities share one buffer."""


class ProtocolMember:
    """One instance: runs the steps as a decode step would, and checks every number that arrives."""

    def __init__(self, protocol: Protocol, exchange: ShmExchange) -> None:
        self.protocol = protocol
        self.exchange = exchange
        self.me = exchange.instance
        self.others = [other for other in range(protocol.num_instances) if other != self.me]
        self.own_random = random.Random(f"{protocol.seed} {self.me}")
        if protocol.is_one_deep:
            for blocks in (exchange._incoming, exchange._outgoing):
                for block in blocks.values():
                    block[:] = [(regions[0], regions[0]) for regions in block]

    def run(self) -> None:
        protocol = self.protocol
        num_layers = protocol.num_dense_layers + protocol.num_moe_layers
        for step in range(protocol.num_steps):
            links = self.draw_links(step)
            self.hand_over(step)
            for layer in range(num_layers):
                self.attend(links, step * num_layers + layer)
                if layer >= protocol.num_dense_layers:
                    self.mix(step * protocol.num_moe_layers + layer - protocol.num_dense_layers)

    def draw_links(self, step: int) -> dict[tuple[int, int], int]:
        """(source, target) -> links, the same on every instance."""
        draw = random.Random(f"{self.protocol.seed} links {step}")
        pairs = [
            (source, target)
            for source in range(self.protocol.num_instances)
            for target in range(self.protocol.num_instances)
            if source not in (target, self.protocol.idle_instance) and draw.random() < 0.4
        ]
        return {pair: draw.randint(1, MAX_LINKS) for pair in pairs}

    def hand_over(self, step: int) -> None:
        draw = random.Random(f"{self.protocol.seed} hand-offs {step}")
        pairs = [pair for pair in self.draw_links(step + 1) if draw.random() < 0.2]
        for source, target in pairs:
            if source == self.me:
                self.exchange.outgoing(Channel.MAILBOX, target, step)["payload"][:] = (
                    7 * step + source
                ) % 256
                self.exchange.put(Channel.MAILBOX, target, step)
        self.dawdle()
        for source, target in pairs:
            if target == self.me:
                payload = self.exchange.wait(Channel.MAILBOX, source, step)["payload"]
                assert (payload == (7 * step + source) % 256).all(), (
                    f"mailbox of {source}, step {step}"
                )

    def attend(self, links: dict[tuple[int, int], int], epoch: int) -> None:
        """Q by the links, then the reply to each, then the replies to mine."""
        for target in self.others:
            if count := links.get((self.me, target)):
                region = self.exchange.outgoing(Channel.Q, target, epoch)
                region["position"][:count] = epoch
                region["q"][:count] = mark(epoch, self.me, target)
                self.exchange.put(Channel.Q, target, epoch)
        self.dawdle()
        for source in self.others:
            if count := links.get((source, self.me)):
                region = self.exchange.wait(Channel.Q, source, epoch)
                self.dawdle()
                assert (region["position"][:count] == epoch).all(), (
                    f"position of {source}, epoch {epoch}"
                )
                assert (region["q"][:count] == mark(epoch, source, self.me)).all(), (
                    f"q of {source}, epoch {epoch}"
                )
                reply = self.exchange.outgoing(Channel.RES, source, epoch)
                reply["partial"][:count] = region["q"][:count] + 1
                reply["lse"][:count] = -1
                self.exchange.put(Channel.RES, source, epoch)
        self.dawdle()
        for target in self.others:
            if count := links.get((self.me, target)):
                region = self.exchange.wait(Channel.RES, target, epoch)
                expected = mark(epoch, self.me, target) + 1
                assert (region["partial"][:count] == expected).all(), (
                    f"partial of {target}, epoch {epoch}"
                )

    def mix(self, epoch: int) -> None:
        """Dispatch to and from everybody, also of zero tokens; combine only answers tokens."""
        is_idle = self.me == self.protocol.idle_instance
        counts = {
            other: 0 if is_idle else max(0, self.own_random.randint(-4, MAX_LINKS))
            for other in self.others
        }
        for target, count in counts.items():
            region = self.exchange.outgoing(Channel.DISPATCH, target, epoch)
            region["count"][0] = count
            region["hidden"][:count] = mark(epoch, self.me, target)
            self.exchange.put(Channel.DISPATCH, target, epoch)
        self.dawdle()
        for source in self.others:
            region = self.exchange.wait(Channel.DISPATCH, source, epoch)
            self.dawdle()
            count = int(region["count"][0])
            assert (region["hidden"][:count] == mark(epoch, source, self.me)).all(), (
                f"hidden of {source}, {epoch}"
            )
            if count:
                self.exchange.outgoing(Channel.COMBINE, source, epoch)["hidden"][:count] = (
                    region["hidden"][:count] + 1
                )
                self.exchange.put(Channel.COMBINE, source, epoch)
        self.dawdle()
        for target, count in counts.items():
            if count:
                region = self.exchange.wait(Channel.COMBINE, target, epoch)
                expected = mark(epoch, self.me, target) + 1
                assert (region["hidden"][:count] == expected).all(), (
                    f"combined of {target}, epoch {epoch}"
                )

    def dawdle(self) -> None:
        if self.own_random.random() < 0.004:
            time.sleep(self.own_random.random() * 0.003)


def mark(epoch: int, source: int, target: int) -> int:
    """What is written: different for neighbours in time and space, exact in every dtype here."""
    return (epoch * 16 + source * 4 + target) % 60_000


def run_protocol(
    cluster_id: str, instance: int, node: str, protocol: Protocol, pipe: Connection
) -> None:
    """Says where it is, is told where all are; answers "ok", or the error that ended the run."""
    segments = Segments(cluster_id, TcpSegmentServer("127.0.0.1"), node=node)
    exchange = ShmExchange.create(segments, instance, protocol.num_instances, LAYOUT, LIMITS)
    try:
        pipe.send(Peer(node, segments.address))
        segments.meet(pipe.recv())
        exchange.connect(START_MS)
        ProtocolMember(protocol, exchange).run()
        pipe.send("ok")
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
    finally:
        exchange.close()


# --- processes that die
# -----------------------------------------------------------------------------------------------


def hold_instance(
    cluster_id: str,
    instance: int,
    num_instances: int,
    with_forked_child: bool,
    *rest: str | Connection,
) -> None:
    """Make and connect an instance, then wait to be killed; a forked child lives on until the pipe
    is closed.

    With the address of instance 0, it is on another node than that one, and says its own address first.
    """
    *address, pipe = rest
    segments = (
        Segments(cluster_id, TcpSegmentServer("127.0.0.1"), node="b")
        if address
        else Segments(cluster_id)
    )
    exchange = ShmExchange.create(segments, instance, num_instances, LAYOUT, LIMITS)
    ring = PageRing.create(segments, instance, 2, 64)
    if address:
        segments.meet([Peer("a", address[0]), Peer("b", segments.address)])
        pipe.send(segments.address)
    child = 0
    if with_forked_child and (child := os.fork()) == 0:
        # It keeps the exchange mapped, and a close of its own must not remove the ring of its
        # parent.
        ring.close()
        time.sleep(60)
        os._exit(0)
    exchange.connect(START_MS)
    pipe.send(child)
    time.sleep(600)


# --- writers of a page ring
# -------------------------------------------------------------------------------------------


def page_payload(page: int, page_bytes: int) -> np.ndarray:
    """Different for every page up to 251, and along the page."""
    return ((np.arange(page_bytes) + page) % 251).astype(np.uint8)


def write_pages(cluster_id: str, pages: range, *rest: str | Connection) -> None:
    """Write the pages under ticket page + 100, pausing at random; answers what happened.

    With the address of the receiver, from another node."""
    *address, pipe = rest
    pause = random.Random(0)
    try:
        segments = Segments(cluster_id, node="b")
        segments.meet([Peer("a", host_and_port) for host_and_port in address])
        writer = PageRingWriter(segments, 0, LIMITS)
        for page in pages:
            assert writer.write(
                page + 100, page, page % 64 + 1, page_payload(page, writer.page_bytes), 30_000
            )
            if pause.random() < 0.02:
                time.sleep(pause.random() * 0.005)
        pipe.send("ok")
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
    time.sleep(600)


def write_half_a_page(cluster_id: str, pipe: Connection) -> None:
    """Write one whole page and one that never ends: the second is copied, but not published."""
    writer = PageRingWriter(Segments(cluster_id), 0, LIMITS)
    writer.write(1, 0, 64, page_payload(0, writer.page_bytes), 5_000)
    places = writer._places
    places.headers[1][:] = (2, 1, 64)
    places.payloads[1][: writer.page_bytes // 2] = 255
    pipe.send("half way")
    time.sleep(600)


# --- pages by NIXL
# ----------------------------------------------------------------------------------------------------


def kv_page(num_layers: int, width: int, page: int):
    """[L, 64, D] bf16, different for every page."""
    import torch

    return torch.randn(
        num_layers, 64, width, generator=torch.Generator().manual_seed(page)
    ).bfloat16()


def write_kv_pages(
    cluster_id: str, address: str, shape: tuple[int, int, int], pipe: Connection
) -> None:
    """From frames of a pool of this process, in which pages lie in no order; answers what happened."""
    import torch

    from data_plane.kv.frame_pool import FramePool

    num_layers, width, num_pages = shape
    try:
        frames = FramePool(num_layers, num_pages, width, torch.bfloat16)
        frame_of = random.Random(0).sample(range(num_pages), num_pages)
        for page, frame in enumerate(frame_of):
            frames.layers[:, frame] = kv_page(num_layers, width, page)
        segments = Segments(cluster_id, nixl=NixlAgent(f"{cluster_id} writer"))
        segments.meet([Peer("elsewhere", address)])
        writer = PageRingWriter(segments, 0, LIMITS)
        for page, frame in enumerate(frame_of):
            assert writer.write(page + 100, page, page % 64 + 1, frames.read_payload(frame), 30_000)
        writer.close()
        pipe.send("ok")
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
    time.sleep(600)


def hold_nixl_ring(cluster_id: str, ring_pages: int, page_bytes: int, pipe: Connection) -> None:
    """Make a ring, send its address, and take nothing from it."""
    segments = Segments(
        cluster_id, TcpSegmentServer("127.0.0.1"), nixl=NixlAgent(f"{cluster_id} receiver")
    )
    ring = PageRing.create(segments, 0, ring_pages, page_bytes)
    pipe.send(segments.address)
    time.sleep(600)
    ring.close()


def write_nixl_pages(
    cluster_id: str, address: str, num_pages: int, page_bytes: int, pipe: Connection
) -> None:
    """Write pages to a ring that nobody empties, telling of each, until its receiver is lost; then
    once more."""
    segments = Segments(cluster_id, nixl=NixlAgent(f"{cluster_id} writer"))
    segments.meet([Peer("elsewhere", address)])
    writer = PageRingWriter(segments, 0, LIMITS)
    segment = writer._segment
    try:
        for page in range(num_pages):
            writer.write(1, page, 64, np.zeros(page_bytes, np.uint8), 30_000)
            pipe.send(page)
    except PeerLost as lost:
        pipe.send(str(lost))
    try:
        segment._agent.write(
            segment._local, segment._peer, segment._remote, 0, page_bytes, lambda: True, 5
        )
    except PeerLost as lost:
        pipe.send(str(lost))
    # Killed: UCX has been seen to abort when an agent goes that lost a peer.
    time.sleep(600)


def rest_with_a_nixl_ring(cluster_id: str, pipe: Connection) -> None:
    """Processor seconds that a ring took in each of three times 0.3 s in which nothing came."""
    segments = Segments(
        cluster_id, TcpSegmentServer("127.0.0.1"), nixl=NixlAgent(f"{cluster_id} receiver")
    )
    ring = PageRing.create(segments, 0, 2, 64)
    used_s = []
    for _ in range(3):
        before = time.process_time()
        time.sleep(0.3)
        used_s.append(time.process_time() - before)
    ring.close()
    segments.close()
    pipe.send(used_s)
