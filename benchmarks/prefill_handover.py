"""How fast pages go from an engine into an instance, and what they cost its decode.

    python benchmarks/prefill_handover.py [--quick] [--namespaces] [--json PATH]

Enters: pages of DeepSeek-V3's size (61 layers, bf16) that a process with the connector's own
writers gathers from blocks; a real service whose prompts a scripted engine writes. Leaves: pages/s
and GB/s by shared memory, TCP and, where it is installed, NIXL; the ratio of decode's step time
with and without arriving pages; exit status 1 if the ratio is more than claimed. Does not know:
vLLM; no prompt is computed.

--namespaces (root): the writer is in a network namespace of its own, so that TCP and NIXL cross a
link between two machines.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import repeat
from multiprocessing import get_context
from typing import Annotated

import numpy as np
from kit import BenchRun, bench
from page_arrivals import step_cost

from data_plane.connectors.paged_kv import PagedKv
from data_plane.connectors.rings import PageWriters
from data_plane.connectors.ticket import EngineTicket
from data_plane.kv.page_ring import PageRing, prefill_ring
from data_plane.native.receiver import receive_puts
from data_plane.transport.nixl import NixlAgent, nixl_package
from data_plane.transport.segments import Segments
from data_plane.transport.tcp_server import TcpSegmentServer

NUM_LAYERS, WIDTH, BLOCK, NUM_BLOCKS = 61, 576, 64, 32
PAGE_BYTES = NUM_LAYERS * 64 * WIDTH * 2
RING_PAGES = 8
NAMESPACE, HOST_END, ENGINE_END = "nanocp-engine", "10.213.7.1", "10.213.7.2"
"""The writer's network namespace, and the two ends of its link."""
LINK = "nanocp-link"
START_S = 60.0
_SEND = "--send"
"""Begins the arguments of the process that writes pages."""


@dataclass(frozen=True, slots=True)
class Handover:
    """One way, measured."""

    way: str
    num_pages: int
    seconds: float
    pages_per_s: float
    gb_per_s: float


@bench("A short run on the preset tiny.")
def main(
    run: BenchRun,
    blocks: Annotated[int, "Blocks of three windows of decode."] = 60,
    namespaces: Annotated[bool, "TCP and NIXL between two namespaces too (root)."] = False,
) -> None:
    """Measure each way, then decode with and without arriving pages."""
    handovers = measure_ways(1.0 if run.is_quick else 5.0, namespaces)
    run.keep(*map(asdict, handovers))
    title = f"Pages of {PAGE_BYTES / 1e6:.1f} MB from an engine's writer into frames"
    run.table(title, run.results, way="", pages_per_s=".0f", gb_per_s=".2f")
    cost = step_cost(*(("tiny", 6) if run.is_quick else ("small", blocks)))
    run.keep(asdict(cost))
    run.judge([cost.claim])


def measure_ways(seconds: float, namespaces: bool) -> list[Handover]:
    """Every way that this machine has."""
    dialled = ["tcp", *(["nixl"] if nixl_package() else [])]
    # UCX reads its variables once in a process.
    alone = ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1)
    with alone, contextlib.ExitStack() as held:
        handovers = list(alone.map(measure, ("auto", *dialled), repeat(seconds)))
        if namespaces:
            held.enter_context(linked_namespace())
            handovers += alone.map(measure, dialled, repeat(seconds), repeat(True))
    return handovers


def measure(backend: str, seconds: float, is_remote: bool = False) -> Handover:
    """Take pages from a writer for this time. is_remote: it is in the other namespace."""
    address = HOST_END if is_remote else "127.0.0.1"
    if is_remote:
        # Within a machine UCX would go from memory to memory, past the link.
        os.environ |= {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "all"}
    cluster = f"handover-{uuid.uuid4().hex[:8]}"
    with contextlib.ExitStack() as held:
        nixl = NixlAgent(f"{cluster} receiver") if backend == "nixl" else None
        segments = Segments(cluster, TcpSegmentServer(address, receive_puts), nixl=nixl)
        held.callback(segments.close)
        ring = PageRing.create(segments, 0, RING_PAGES, PAGE_BYTES, prefill_ring(0))
        held.callback(ring.close)
        where = {"cluster": cluster, "node": segments.node, "address": segments.address}
        command = [sys.executable, __file__, _SEND, json.dumps(where | {"backend": backend})]
        prefix = ["ip", "netns", "exec", NAMESPACE] if is_remote else []
        writer = subprocess.Popen([*prefix, *command])
        held.callback(writer.wait)
        held.callback(writer.kill)
        num_pages, lasted_s = take_pages(ring, seconds)
    way = {"auto": "shared memory"}.get(backend, backend) + " between namespaces" * is_remote
    pages_per_s = num_pages / lasted_s
    return Handover(way, num_pages, lasted_s, pages_per_s, pages_per_s * PAGE_BYTES / 1e9)


def take_pages(ring: PageRing, seconds: float) -> tuple[int, float]:
    """Copy each page into a frame; how many came after the first, and in how many seconds.

    Raises TimeoutError if none comes.
    """
    frame = np.zeros(PAGE_BYTES, np.uint8)
    deadline, began, num_pages = time.monotonic() + START_S, 0.0, -1
    while not began or time.monotonic() < began + seconds:
        ring.wait(100)
        for arrived in ring.arrived():
            frame[:] = arrived.payload
            num_pages += 1
            # The first page pays for start-up and page faults.
            began = began or time.monotonic()
        if not began and time.monotonic() > deadline:
            raise TimeoutError(f"no page came in {START_S:.0f} s")
    return num_pages, time.monotonic() - began


def write_pages(where: str) -> None:
    """Write pages until killed, as an engine does. where: cluster, node, address and backend."""
    place = json.loads(where)
    layers = [np.zeros((NUM_BLOCKS, BLOCK, WIDTH), np.uint16) for _ in range(NUM_LAYERS)]
    page = np.zeros((NUM_LAYERS, 64, WIDTH), np.uint16)
    kv = PagedKv(layers, page, lambda page: page.view(np.uint8).reshape(-1))
    writers = PageWriters([f"{HOST_END}/32", "127.0.0.0/8"])
    ticket = EngineTicket(
        cluster=place["cluster"],
        term=1,
        ticket=1,
        num_tokens=64,
        targets=((0, 1, 0),),
        peers={0: (place["node"], place["address"])},
        writer=0,
        timeout_ms=30_000,
        page_backend=place["backend"],
        kv_dtype="auto",
        fingerprint={},
        engine="",
    )
    for number in range(sys.maxsize):
        payload = kv.read(range(number % NUM_BLOCKS, NUM_BLOCKS), 0, 64)
        options = {"page": number, "num_tokens": 64, "payload": payload}
        writers.write(ticket, 0, **options, is_cancelled=lambda: False)


@contextlib.contextmanager
def linked_namespace() -> Iterator[None]:
    """A network namespace with a link to this one. Raises CalledProcessError without root."""
    inside = ("ip", "-n", NAMESPACE)
    veth = ("type", "veth", "peer", "name", "eth0", "netns", NAMESPACE)
    commands = [
        ("ip", "netns", "add", NAMESPACE),
        ("ip", "link", "add", LINK, *veth),
        ("ip", "address", "add", f"{HOST_END}/30", "dev", LINK),
        ("ip", "link", "set", LINK, "up"),
        (*inside, "address", "add", f"{ENGINE_END}/30", "dev", "eth0"),
        (*inside, "link", "set", "eth0", "up"),
        (*inside, "link", "set", "lo", "up"),
    ]
    try:
        for command in commands:
            subprocess.run(command, check=True)
        yield
    finally:
        # The link goes with it.
        subprocess.run(["ip", "netns", "delete", NAMESPACE], check=False)


if __name__ == "__main__":
    if sys.argv[1:2] == [_SEND]:
        write_pages(sys.argv[2])
    else:
        main()
