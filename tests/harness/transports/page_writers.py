"""Processes that write pages into a ring, or hold one, through shared memory, TCP and NIXL."""

import random
import time
from multiprocessing.connection import Connection

import numpy as np

from data_plane.kv.page_ring import ArrivedPage, PageRing, PageRingWriter
from data_plane.native.receiver import receive_puts
from data_plane.transport.exchange import PeerLost
from data_plane.transport.nixl.pages import NixlAgent
from data_plane.transport.segments import Segments
from data_plane.transport.tcp.server import TcpSegmentServer
from harness.transports.transport_processes import LIMITS
from nanocp.values.members import Peer


def page_payload(page: int, page_bytes: int) -> np.ndarray:
    """Bytes that differ along the page and between any 251 pages in a row."""
    return ((np.arange(page_bytes) + page) % 251).astype(np.uint8)


def written_page(page: int) -> dict[str, int]:
    """The ticket, page number and number of tokens under which tests write a page."""
    return {"ticket": page + 100, "page": page, "num_tokens": page % 64 + 1}


def assert_written(arrived: ArrivedPage, page_bytes: int) -> None:
    """Fail unless the page arrived as `written_page` and `page_payload` made it."""
    header = arrived._asdict()
    payload = header.pop("payload")
    assert (header.pop("offset"), header.pop("page_bytes")) == (0, 0)
    assert header == written_page(arrived.page)
    np.testing.assert_array_equal(payload, page_payload(arrived.page, page_bytes))


def write_pages(cluster_id: str, pages: range, address: str, pipe: Connection) -> None:
    """Write the pages, pausing at random; send "ok" or the error's text.

    address: empty, or that of the receiver, which is then on another node.
    """
    pause = random.Random(0)
    try:
        segments = Segments(cluster_id, node="b")
        if address:
            segments.meet([Peer("a", address)])
        writer = PageRingWriter(segments, 0, LIMITS)
        for page in pages:
            assert writer.write(
                **written_page(page),
                payload=page_payload(page, writer.page_bytes),
                timeout_ms=30_000,
            )
            if pause.random() < 0.02:
                time.sleep(pause.random() * 0.005)
        pipe.send("ok")
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
    time.sleep(600)


def write_half_a_page(cluster_id: str, pipe: Connection) -> None:
    """Write one whole page and half of a second, which is copied but never published."""
    writer = PageRingWriter(Segments(cluster_id), 0, LIMITS)
    payload = page_payload(0, writer.page_bytes)
    writer.write(**written_page(0), payload=payload, timeout_ms=5_000)
    places = writer._places
    places.headers[1][:] = (2, 1, 64, 0, writer.page_bytes)
    places.payloads[1][: writer.page_bytes // 2] = 255
    pipe.send("half way")
    time.sleep(600)


# --- NIXL


def kv_page(num_layers: int, width: int, page: int):
    """Random latent KV [num_layers, 64, width] bf16, different for every page."""
    import torch

    return torch.randn(
        num_layers, 64, width, generator=torch.Generator().manual_seed(page)
    ).bfloat16()


def write_kv_pages(
    cluster_id: str, address: str, shape: tuple[int, int, int], pipe: Connection
) -> None:
    """Write pages from this process's frames, which hold them in random order.

    shape: (layers, width, pages). Sends "ok" or the error's text.
    """
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
            payload = frames.page_view(frame)
            assert writer.write(**written_page(page), payload=payload, timeout_ms=30_000)
        writer.close()
        pipe.send("ok")
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
    time.sleep(600)


def hold_nixl_ring(cluster_id: str, ring_pages: int, page_bytes: int, pipe: Connection) -> None:
    """Make a ring, send its address, and take no page from it."""
    segments = Segments(
        cluster_id,
        TcpSegmentServer("127.0.0.1", receive_puts),
        nixl=NixlAgent(f"{cluster_id} receiver"),
    )
    ring = PageRing.create(segments, 0, ring_pages, page_bytes)
    pipe.send(segments.address)
    time.sleep(600)
    ring.close()


def write_nixl_pages(
    cluster_id: str, address: str, num_pages: int, page_bytes: int, pipe: Connection
) -> None:
    """Write pages to a ring that is never emptied until the receiver is lost, then once more."""
    segments = Segments(cluster_id, nixl=NixlAgent(f"{cluster_id} writer"))
    segments.meet([Peer("elsewhere", address)])
    writer = PageRingWriter(segments, 0, LIMITS)
    segment = writer._segment
    try:
        for page in range(num_pages):
            payload = np.zeros(page_bytes, np.uint8)
            writer.write(**written_page(page), payload=payload, timeout_ms=30_000)
            pipe.send(page)
    except PeerLost as lost:
        pipe.send(str(lost))
    try:
        segment._write(0, page_bytes)
    except PeerLost as lost:
        pipe.send(str(lost))
    # The test kills this process. UCX has been seen to abort when it closes an agent that has lost
    # a peer.
    time.sleep(600)


def rest_with_a_nixl_ring(cluster_id: str, pipe: Connection) -> None:
    """Send the CPU seconds that an idle ring used in each of three periods of 0.3 s."""
    segments = Segments(
        cluster_id,
        TcpSegmentServer("127.0.0.1", receive_puts),
        nixl=NixlAgent(f"{cluster_id} receiver"),
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
