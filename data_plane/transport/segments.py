"""The segments of one member: its own, and its peers', mapped or, between nodes, across TCP."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

from data_plane.transport.exchange import Term
from data_plane.transport.nixl.pages import NixlAgent, NixlSegment
from data_plane.transport.shared_memory import (
    DIRECTORY,
    NoRoom,
    OwnedSegment,
    PeerSegment,
    Segment,
    is_owned,
    segment_name,
    sweep_stale,
)
from data_plane.transport.tcp.segment import TcpSegment
from data_plane.transport.tcp.server import TcpSegmentServer
from nanocp.config.limits import LimitsConfig
from nanocp.values.members import Peer

logger = logging.getLogger(__name__)

_PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8)
"""Before further tries while /dev/shm has no room."""
_START_PAUSES = 6
"""Before the first term, as an operator waits."""
_LOOK_S = 0.05
"""A pause looks so often whether the term is over."""


def node_identity() -> str:
    """Return a string of boot and mount, equal in two processes exactly if they share /dev/shm."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id}/{os.stat(DIRECTORY).st_dev}"


class Segments:
    """The segments of one process, and its way to those of others."""

    def __init__(
        self,
        cluster_id: str,
        server: TcpSegmentServer | None = None,
        is_always_tcp: bool = False,
        node: str | None = None,
        nixl: NixlAgent | None = None,
        term: Term | None = None,
    ) -> None:
        """Nothing is shared or served before `own` and `attach`.

        server: where processes of other nodes attach; None if none can. is_always_tcp: use TCP also
        within a node. node: by default `node_identity()`. nixl: sends pages, to any node; it needs
        the owner's server. term: of all segments, by default the first, which does not end.
        """
        self.cluster_id = cluster_id
        self.term = term or Term()
        self.node = node or node_identity()
        self._server = server
        self._is_always_tcp = is_always_tcp
        self._nixl = nixl
        self._peers: Sequence[Peer | None] = ()
        self._owned = weakref.WeakSet[OwnedSegment]()

    @property
    def address(self) -> str:
        """host:port at which processes of other nodes attach; empty if they cannot."""
        return self._server.address if self._server is not None else ""

    def meet(self, peers: Sequence[Peer | None]) -> None:
        """Take the term's places, None for other instances; else all are on this node."""
        self._peers = peers

    def is_there(self, instance: int) -> bool:
        """True if the instance is in the term."""
        return not self._peers or self._peers[instance] is not None

    def is_shared(self, instance: int) -> bool:
        """True if the instance's segments are mapped, False if TCP reaches them."""
        if not self._peers:
            return True
        return not self._is_always_tcp and self._place(instance).node == self.node

    def _place(self, instance: int) -> Peer:
        place = self._peers[instance]
        assert place is not None, f"instance {instance} is not in the term"
        return place

    def own(
        self,
        kind: str,
        instance: int,
        description: str,
        data_bytes: int,
        page_bytes: int = 0,
    ) -> OwnedSegment:
        """Make an OwnedSegment of this process in the present term.

        page_bytes: bytes for pages, after the data or, with NIXL, in `bulk`. Waits a bounded
        time for room, until every peer has let go of the last term's. Raises TermOver besides.
        """
        name = segment_name(self.cluster_id, self.term.number, kind, instance)
        is_apart = page_bytes > 0 and self._nixl is not None
        segment = self._make(name, description, data_bytes + (0 if is_apart else page_bytes))
        if is_apart:
            assert self._nixl is not None
            segment.bulk, place = self._nixl.allocate(page_bytes)
            segment.grant, segment.progress = self._nixl.grant(place), self._nixl.progress
        if self._server is not None:
            segment.server = self._server
            self._server.admit(segment)
        self._owned.add(segment)
        return segment

    def _make(self, name: str, description: str, data_bytes: int) -> OwnedSegment:
        for number, pause_s in enumerate(_PAUSES_S[: None if self._peers else _START_PAUSES]):
            try:
                return OwnedSegment(name, description, data_bytes)
            except NoRoom as error:
                if not number:
                    logger.warning("%s; waiting for room", error)
            sweep_stale()
            end_s = time.monotonic() + pause_s
            while (left_s := end_s - time.monotonic()) > 0:
                self.term.check()
                time.sleep(min(left_s, _LOOK_S))
        return OwnedSegment(name, description, data_bytes)

    def attach(
        self,
        kind: str,
        instance: int,
        writer: str,
        limits: LimitsConfig,
        timeout_ms: float,
        has_pages: bool = False,
    ) -> Segment:
        """Return the instance's segment of this kind, once it exists.

        writer: a name, unique at a time. has_pages: `bulk` is written, by NIXL if it is used.
        Raises ExchangeTimeout or PeerLost, which name the instance, TermOver, or ValueError for
        another configuration.
        """
        name = segment_name(self.cluster_id, self.term.number, kind, instance)
        nixl = self._nixl if has_pages else None
        if self.is_shared(instance) and nixl is None:
            return PeerSegment(name, instance, timeout_ms, self.term)
        address = self._place(instance).address
        if not address:
            raise ValueError(
                f"instance {instance} is on another node and takes no connections "
                "(data_plane.exchange_backend is shm); auto lets instances of several nodes "
                "exchange over TCP"
            )
        where = name, instance, address, writer, limits, timeout_ms, self.term
        return TcpSegment(*where) if nixl is None else NixlSegment(*where, nixl)

    def is_owned(self, kind: str, instance: int, term: int) -> bool:
        """True if an instance on this node still has its segment of this kind, in a term."""
        return is_owned(segment_name(self.cluster_id, term, kind, instance))

    def close(self) -> None:
        """Close the owned segments, and let no process attach. Idempotent."""
        for segment in list(self._owned):
            segment.close()
        if self._server is not None:
            self._server.close()
