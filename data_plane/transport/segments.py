"""The segments of one member: its own, and its peers', mapped where memory is shared, else across
TCP; pair by pair.

Enters: names, and where every instance is. Leaves: segments that are written alike, wherever their
owner is. Does not know: what is in them.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from data_plane.transport.futex import Word
from data_plane.transport.nixl import NixlAgent, NixlSegment
from data_plane.transport.shared_memory import DIRECTORY, OwnedSegment, PeerSegment, segment_name
from data_plane.transport.tcp import TcpSegment, TcpSegmentServer
from nanocp.config import LimitsConfig


class Segment(Protocol):
    """A segment of another process, to be written in the places that are this process's."""

    name: str
    description: str
    data_offset: int
    memory: mmap.mmap
    bulk: Any
    """Memory for pages beside `memory`, uint8, if they go by NIXL; else None, and pages are in
    `memory`."""

    def publish(
        self,
        word: Word,
        value: int,
        chunks: Sequence[tuple[int, int]] = (),
        bulk: tuple[int, int] | None = None,
    ) -> None:
        """Set the word, after all that was written to `memory` before. Of that, only the chunks
        must arrive: (offset, number of bytes), and of `bulk` the chunk `bulk`. What is published to
        a dead owner is lost, as it would be in its memory.
        """

    def owner_is_alive(self) -> bool:
        """Whether the owner's process lives."""

    def claim(self) -> bool:
        """Be the only writer that claims the segment, for life; False if there is another."""

    def require(self, description: str) -> None:
        """Raise ValueError, naming the first line that differs, unless the segment was made with
        this description."""

    def close(self) -> None:
        """Give up the segment. Idempotent."""


class Peer(NamedTuple):
    """Where an instance is."""

    node: str
    """See node_identity."""
    address: str
    """host:port of its TcpSegmentServer; empty if it has none."""


def node_identity() -> str:
    """The same in two processes exactly if they share /dev/shm: the machine's boot and the mount,
    which containers and other namespaces have of their own."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id}/{os.stat(DIRECTORY).st_dev}"


class Segments:
    """What one process owns, and how it gets to what others own."""

    def __init__(
        self,
        cluster_id: str,
        server: TcpSegmentServer | None = None,
        is_always_tcp: bool = False,
        node: str | None = None,
        nixl: NixlAgent | None = None,
    ) -> None:
        """server: where processes of other nodes attach; None if none can. is_always_tcp: also within
        a node. node: as node_identity, which is the default. nixl: pages go by it, to any node, and
        need the owner's server."""
        self.cluster_id = cluster_id
        self.node = node or node_identity()
        self._server = server
        self._is_always_tcp = is_always_tcp
        self._nixl = nixl
        self._peers: Sequence[Peer] = ()

    @property
    def address(self) -> str:
        """host:port for processes of other nodes; empty: none."""
        return self._server.address if self._server is not None else ""

    def meet(self, peers: Sequence[Peer]) -> None:
        """Where every instance is. Without it, all are on this node."""
        self._peers = peers

    def is_shared(self, instance: int) -> bool:
        """Whether the instance's segments are mapped, not reached by TCP."""
        if not self._peers:
            return True
        return not self._is_always_tcp and self._peers[instance].node == self.node

    def own(
        self, kind: str, instance: int, description: str, data_bytes: int, page_bytes: int = 0
    ) -> OwnedSegment:
        """Make a segment of this process; see OwnedSegment. page_bytes: for pages, behind the data
        or in `bulk`."""
        name = segment_name(self.cluster_id, kind, instance)
        is_apart = page_bytes > 0 and self._nixl is not None
        segment = OwnedSegment(name, description, data_bytes + (0 if is_apart else page_bytes))
        if is_apart:
            assert self._nixl is not None
            segment.bulk, place = self._nixl.allocate(page_bytes)
            segment.grant, segment.progress = self._nixl.grant(place), self._nixl.progress
        if self._server is not None:
            segment.server = self._server
            self._server.admit(segment)
        return segment

    def attach(
        self,
        kind: str,
        instance: int,
        writer: str,
        limits: LimitsConfig,
        timeout_ms: float,
        has_pages: bool = False,
    ) -> Segment:
        """The instance's segment, once it is there. `writer` is who writes what this process will:
        one at a time.

        Raises ExchangeTimeout, PeerLost, or ValueError if the segment cannot be what is meant.
        """
        name = segment_name(self.cluster_id, kind, instance)
        if has_pages and self._nixl is not None:
            return NixlSegment(
                name, self._peers[instance].address, writer, limits, timeout_ms, self._nixl
            )
        if self.is_shared(instance):
            return PeerSegment(name, timeout_ms)
        address = self._peers[instance].address
        if not address:
            raise ValueError(
                f"instance {instance} is on another node and takes no connections (data_plane.exchange_backend is "
                "shm); auto lets instances of several nodes exchange over TCP"
            )
        return TcpSegment(name, address, writer, limits, timeout_ms)

    def close(self) -> None:
        """Let nobody attach any more. Idempotent."""
        if self._server is not None:
            self._server.close()
