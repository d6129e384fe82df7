"""How fast pages of KV go from an engine into an instance's ring, and out of it.

    python benchmarks/prefill_handover.py --seconds 3 --json out.json

A process with the connector's own writers sends pages of DeepSeek-V3's size (61 layers, bf16) that
it gathers from blocks, and this process takes them out of the ring and copies each into a frame.
Through shared memory, TCP and, where it is installed, NIXL. No model runs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
import uuid
from dataclasses import asdict, dataclass

import numpy as np

from data_plane.connectors.paged_kv import PagedKv
from data_plane.connectors.rings import PageWriters
from data_plane.connectors.ticket import EngineTicket
from data_plane.kv.page_ring import PageRing
from data_plane.transport.nixl import NixlAgent, nixl_package
from data_plane.transport.segments import Segments
from data_plane.transport.tcp_server import TcpSegmentServer

NUM_LAYERS, WIDTH, BLOCK, NUM_BLOCKS = 61, 576, 64, 32
PAGE_BYTES = NUM_LAYERS * 64 * WIDTH * 2
RING_PAGES = 8


@dataclass(frozen=True)
class Handover:
    """One way, measured."""

    way: str
    num_pages: int
    seconds: float

    @property
    def row(self) -> str:
        """A line of the table."""
        pages_per_s = self.num_pages / self.seconds
        return f"{self.way:12} {pages_per_s:8.0f} {pages_per_s * PAGE_BYTES / 1e9:8.2f}"


def send(cluster: str, node: str, address: str, backend: str, seconds: float) -> None:
    """Write pages for this time, as an engine does."""
    layers = [np.zeros((NUM_BLOCKS, BLOCK, WIDTH), np.uint16) for _ in range(NUM_LAYERS)]
    page = np.zeros((NUM_LAYERS, 64, WIDTH), np.uint16)
    kv = PagedKv(layers, page, lambda page: page.view(np.uint8).reshape(-1))
    writers = PageWriters(())
    ticket = EngineTicket(
        cluster=cluster,
        term=1,
        ticket=1,
        num_tokens=64,
        targets=((0, 1, 0),),
        peers={0: (node, address)},
        writer=0,
        timeout_ms=30_000,
        page_backend=backend,
        kv_dtype="auto",
        fingerprint={},
        engine="",
    )
    deadline, number = time.monotonic() + seconds, 0
    while time.monotonic() < deadline:
        payload = kv.read(range(number % NUM_BLOCKS, NUM_BLOCKS), 0, 64)
        options = {"page": number, "num_tokens": 64, "payload": payload}
        writers.write(ticket, 0, **options, is_cancelled=lambda: False)
        number += 1


def measure(backend: str, seconds: float) -> Handover:
    """Take pages from a sender for this time."""
    cluster = f"handover-{uuid.uuid4().hex[:8]}"
    nixl = NixlAgent(f"{cluster} receiver") if backend == "nixl" else None
    server = TcpSegmentServer("127.0.0.1")
    segments = Segments(cluster, server, nixl=nixl)
    ring = PageRing.create(segments, 0, RING_PAGES, PAGE_BYTES)
    frame = np.zeros(PAGE_BYTES, np.uint8)
    sender = multiprocessing.get_context("spawn").Process(
        target=send, args=(cluster, segments.node, segments.address, backend, seconds + 1)
    )
    sender.start()
    began, num_pages = None, 0
    while began is None or time.monotonic() < began + seconds:
        ring.wait(100)
        for arrived in ring.arrived():
            frame[:] = arrived.payload
            if began is None:
                # The first page pays for start-up and page faults.
                began = time.monotonic()
            else:
                num_pages += 1
    lasted_s = time.monotonic() - began
    sender.kill()
    sender.join()
    ring.close()
    segments.close()
    return Handover({"auto": "shared memory"}.get(backend, backend), num_pages, lasted_s)


def main() -> None:
    """Measure each way and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    ways = ["auto", "tcp", *(["nixl"] if nixl_package() else [])]
    print(f"{'way':12} {'pages/s':>8} {'GB/s':>8}   pages of {PAGE_BYTES / 1e6:.1f} MB")
    handovers = []
    for way in ways:
        handovers.append(measure(way, options.seconds))
        print(handovers[-1].row)
    if options.json:
        with open(options.json, "w") as file:
            json.dump([asdict(handover) for handover in handovers], file)


if __name__ == "__main__":
    main()
