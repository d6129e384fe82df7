"""Processes that the transport tests start, and one that holds an instance until it is killed.

This file and its neighbours step_protocol.py and page_writers.py are light to import: their
processes are forks of one that has imported them.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection, Listener

from data_plane.kv.page_ring import PageRing
from data_plane.native.receiver import receive_puts
from data_plane.transport.exchange import Channel, Field
from data_plane.transport.segments import Segments
from data_plane.transport.shm import ShmExchange
from data_plane.transport.tcp.server import TcpSegmentServer
from harness.programs.forks import FORKS, Forked
from nanocp.config.limits import LimitsConfig
from nanocp.values.members import Peer

LIMITS = LimitsConfig(tick_ms=50, exchange_timeout_ms=30_000, plan_timeout_ms=29_000, retry_ms=100)
IMPATIENT = LimitsConfig(tick_ms=10, exchange_timeout_ms=300, plan_timeout_ms=200, retry_ms=100)
START_MS = 30_000
NOTICED_S = LIMITS.exchange_timeout_ms / 3000
"""A limit for what a wait notices at its next tick, on any machine; far below its timeout."""
MAX_LINKS, WIDTH = 6, 257
LAYOUT = {
    Channel.Q: (Field("position", "int64", (MAX_LINKS,)),
                Field("q", "float32", (MAX_LINKS, WIDTH))),
    Channel.RES: (Field("partial", "float32", (MAX_LINKS, WIDTH)),
                  Field("lse", "float32", (MAX_LINKS,))),
    Channel.DISPATCH: (Field("count", "int32", (1,)),
                       Field("hidden", "uint16", (MAX_LINKS, WIDTH))),
    Channel.COMBINE: (Field("hidden", "uint16", (MAX_LINKS, WIDTH)),),
    Channel.MAILBOX: (Field("payload", "uint8", (100,)),),
}  # fmt: skip


@contextmanager
def processes(
    *bodies: tuple[Callable[..., None], tuple],
) -> Iterator[list[tuple[Forked, Connection]]]:
    """Start each body with its arguments and then one end of a pipe; yield (process, other end)."""
    started: list[tuple[Forked, Connection]] = []
    with Listener(family="AF_UNIX") as listener:
        try:
            for body, arguments in bodies:
                main, imports = f"{__name__}:run_body", [body.__module__]
                process = FORKS.popen(main, [listener.address], imports)
                pipe = listener.accept()
                pipe.send((body, arguments))
                started.append((process, pipe))
            yield started
        finally:
            for process, pipe in started:
                process.kill()
                process.wait()
                pipe.close()


def run_body() -> None:
    """Run what `processes` sends to this process."""
    with Client(sys.argv[1]) as pipe:
        body, arguments = pipe.recv()
        body(*arguments, pipe)


def receive(pipe: Connection, timeout_s: float = 60):
    """The next message of a process; fails if none comes."""
    assert pipe.poll(timeout_s), "the process sent nothing"
    return pipe.recv()


def hold_instance(
    cluster_id: str,
    instance: int,
    num_instances: int,
    with_forked_child: bool,
    address: str,
    pipe: Connection,
) -> None:
    """Make and connect an instance, then wait to be killed; a forked child outlives it by a minute.

    address: empty, or that of instance 0, which is then on another node. In that case the process
    sends its own address first. It always sends the pid of its child, 0 without one.
    """
    segments = (
        Segments(cluster_id, TcpSegmentServer("127.0.0.1", receive_puts), node="b")
        if address
        else Segments(cluster_id)
    )
    exchange = ShmExchange.create(segments, instance, num_instances, LAYOUT, LIMITS)
    ring = PageRing.create(segments, instance, 2, 64)
    if address:
        segments.meet([Peer("a", address), Peer("b", segments.address)])
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
