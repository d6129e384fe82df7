"""The whole protocol of decode steps over a real exchange, without any model.

Every instance puts and awaits what a decode step would, in the same order, on every channel. The
numbers say who put them and when, so that a region that is read twice or overwritten too early is
seen.
"""

import ctypes
import os
import random
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np

from data_plane.native.receiver import receive_puts
from data_plane.transport.exchange import Channel
from data_plane.transport.segments import Segments
from data_plane.transport.shm import ShmExchange
from data_plane.transport.tcp.server import TcpSegmentServer
from harness.transports.transport_processes import LAYOUT, LIMITS, MAX_LINKS, START_MS
from nanocp.values.members import Peer


@dataclass(frozen=True)
class Protocol:
    """Random steps; every instance draws the same links and hand-offs of a step from the seed."""

    num_instances: int
    num_steps: int
    num_dense_layers: int
    num_moe_layers: int
    seed: int
    idle_instance: int
    """An instance without rows: it sends no Q and dispatches no token, but holds KV and experts."""
    progress: str = ""
    """A file of the steps that each instance has finished; it bounds who runs ahead."""
    max_in_flight: int = 2
    """Most steps that an instance may be ahead of another, counted as windows are."""
    slow_instance: int | None = None
    """An instance that often sleeps, in any layer."""
    link_share: float = 0.4
    """Share of the pairs that are linked in a step."""
    hand_off_share: float = 0.08
    """Share of the pairs that hand a row over before a step."""
    is_one_deep: bool = False
    """A fault that must be seen: both parities share one buffer."""
    addresses: tuple[str, ...] = ("127.0.0.1",) * 4
    """Where each instance listens."""
    namespaces: tuple[str, ...] = ()
    """Names of network namespaces, which `ip netns` made, one for each instance; needs root."""


class ProtocolMember:
    """One instance, which runs the steps as decode does and checks every number that arrives."""

    def __init__(self, protocol: Protocol, exchange: ShmExchange) -> None:
        self.protocol = protocol
        self.exchange = exchange
        self.me = exchange.instance
        self.others = [other for other in range(protocol.num_instances) if other != self.me]
        self.own_random = random.Random(f"{protocol.seed} {self.me}")
        if protocol.is_one_deep:
            for blocks in (exchange._incoming, exchange._outgoing):
                for block in blocks.values():
                    block[:] = [regions[:1] * 2 for regions in block]

    def run(self) -> None:
        protocol = self.protocol
        num_layers = protocol.num_dense_layers + protocol.num_moe_layers
        for step in range(protocol.num_steps):
            self.await_windows(step)
            links = self.draw_links(step)
            self.hand_over(step)
            for layer in range(num_layers):
                self.attend(links, step * num_layers + layer)
                if layer >= protocol.num_dense_layers:
                    self.mix(step * protocol.num_moe_layers + layer - protocol.num_dense_layers)

    def await_windows(self, step: int) -> None:
        """Begin a window only when fewer than `max_in_flight` are under way, as plans do."""
        if not self.protocol.progress:
            return
        done = np.memmap(self.protocol.progress, np.int64, "r+")
        done[self.me] = step
        deadline = time.monotonic() + 10
        while int(done.min()) <= step - self.protocol.max_in_flight:
            assert time.monotonic() < deadline, f"step {step} may not begin: {done}"
            time.sleep(0.0001)

    def draw_links(self, step: int) -> dict[tuple[int, int], int]:
        """(source, target) -> links, the same on every instance."""
        draw = random.Random(f"{self.protocol.seed} links {step}")
        pairs = self.draw_pairs(draw, self.protocol.link_share)
        return {pair: draw.randint(1, MAX_LINKS) for pair in pairs}

    def draw_pairs(self, draw: random.Random, share: float) -> list[tuple[int, int]]:
        """Draw (source, target) of that share of the pairs; the idle instance is no source."""
        return [
            (source, target)
            for source in range(self.protocol.num_instances)
            for target in range(self.protocol.num_instances)
            if source not in (target, self.protocol.idle_instance) and draw.random() < share
        ]

    def hand_over(self, step: int) -> None:
        draw = random.Random(f"{self.protocol.seed} hand-offs {step}")
        pairs = self.draw_pairs(draw, self.protocol.hand_off_share)
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
        """Send Q along the links, reply to every Q that arrives, then read the replies."""
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
        """Dispatch to every peer, also zero tokens; combine answers only those that sent tokens."""
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
        share = 0.2 if self.me == self.protocol.slow_instance else 0.004
        if self.own_random.random() < share:
            time.sleep(self.own_random.random() * 0.003)


def mark(epoch: int, source: int, target: int) -> int:
    """A number that differs between neighbouring epochs and pairs; exact in every dtype here."""
    return (epoch * 16 + source * 4 + target) % 60_000


def join_namespace(name: str) -> None:
    """Move this thread, and those that it starts, into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as namespace:
        assert libc.setns(namespace.fileno(), 0) == 0, os.strerror(ctypes.get_errno())


def run_protocol(
    cluster_id: str, instance: int, node: str, protocol: Protocol, pipe: Connection
) -> None:
    """Send this instance's Peer, receive all, run the protocol; send "ok" or the error's text."""
    if protocol.namespaces:
        join_namespace(protocol.namespaces[instance])
    server = TcpSegmentServer(protocol.addresses[instance], receive_puts)
    segments = Segments(cluster_id, server, node=node)
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
