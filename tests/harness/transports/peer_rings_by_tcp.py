"""Page rings of two instances as on two nodes, and the end of a connection between them."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from data_plane.kv.peer_rings import PeerRings
from data_plane.native.receiver import receive_puts
from data_plane.transport.segments import Segments
from data_plane.transport.tcp.messages import shut
from data_plane.transport.tcp.server import TcpSegmentServer
from harness.waits import until
from nanocp.config.limits import LimitsConfig
from nanocp.values.members import Peer

WAIT_S = 120


@contextmanager
def peer_rings_by_tcp(page_bytes: int) -> Iterator[tuple[PeerRings, PeerRings]]:
    """The ends of instances 0 and 1, connected by TCP though they are in one process."""
    with ExitStack() as held:
        segments = []
        for _ in range(2):
            server = TcpSegmentServer("127.0.0.1", receive_puts)
            segments.append(Segments(f"rings{os.getpid()}", server, is_always_tcp=True))
            held.callback(segments[-1].close)
        first, second = (
            PeerRings(own, instance, 2, page_bytes, LimitsConfig())
            for instance, own in enumerate(segments)
        )
        for own, rings in zip(segments, (first, second), strict=True):
            held.callback(rings.close)
            own.meet([Peer(each.node, each.address) for each in segments])
            rings.connect()
        yield first, second


def cut(source: PeerRings, target: PeerRings) -> None:
    """End the connection by which instance 0 sends; instance 1 knows it when this returns."""
    shut(source._writers[1]._segment._connection)
    until(lambda: target.has_lost(0))
