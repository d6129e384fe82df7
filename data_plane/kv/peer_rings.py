"""Page rings between peers, which move full KV pages between instances' frames.

Both ends decode meanwhile (docs/decisions/0008), so nothing here waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from data_plane.kv.page_ring import ArrivedPage, PageRing, PageRingWriter
from data_plane.transport.exchange import PeerLost
from data_plane.transport.segments import Segments
from nanocp.config.limits import LimitsConfig

_RING_PAGES = 2
"""Places of a ring: one is filled while the other is copied."""


class PeerRings:
    """One instance's end: a ring from each peer, and a writer to each peer's ring."""

    def __init__(
        self,
        segments: Segments,
        instance: int,
        num_instances: int,
        page_bytes: int,
        limits: LimitsConfig,
        ring_pages: int = _RING_PAGES,
    ) -> None:
        self._segments = segments
        self._instance = instance
        self._limits = limits
        self._writers: dict[int, PageRingWriter] = {}
        self._rings = {
            peer: PageRing.create(segments, instance, ring_pages, page_bytes, _kind(peer))
            for peer in range(num_instances)
            if peer != instance
        }

    def connect(self) -> None:
        """Attach to this instance's ring at every peer. Raises as PageRingWriter does."""
        for peer in filter(self._segments.is_there, self._rings):
            self._writers[peer] = PageRingWriter(
                self._segments, peer, self._limits, _kind(self._instance)
            )

    def arrived(self) -> Iterator[Iterator[ArrivedPage]]:
        """Yield each peer's pages that are here now."""
        return (ring.arrived() for ring in self._rings.values())

    def has_lost(self, peer: int) -> bool:
        """True if the connection of the peer's pages has ended; ask before `arrived`."""
        return self._rings[peer].has_lost_writer

    def has_place(self, peer: int) -> bool:
        """True if the peer's ring has a place. Raises PeerLost if it never will."""
        writer = self._writers[peer]
        if not writer.has_place and not writer.receiver_is_alive():
            # Pages for others would wait behind this one, and their tickets stay open.
            raise PeerLost(f"a page for instance {peer} finds no place: its ring is gone", peer)
        return writer.has_place

    def send(self, peer: int, *, ticket: int, page: int, num_tokens: int, payload: Any) -> None:
        """Write a page into the peer's ring, which must have a place."""
        self._writers[peer].write(
            ticket=ticket, page=page, num_tokens=num_tokens, payload=payload, timeout_ms=0
        )

    def close(self) -> None:
        """Close the writers and remove the rings. Idempotent."""
        ends: list[PageRing | PageRingWriter] = [*self._writers.values(), *self._rings.values()]
        for end in ends:
            end.close()


def _kind(source: int) -> str:
    return f"moves_from_{source}"
