"""Segments of instances that are each on a node of its own, as they meet over TCP."""

from contextlib import ExitStack, contextmanager

from data_plane.native.receiver import receive_puts
from data_plane.transport.exchange import Term
from data_plane.transport.segments import Segments
from data_plane.transport.tcp.server import TcpSegmentServer
from nanocp.values.members import Peer


@contextmanager
def tcp_nodes(cluster_id, num=2, receive=receive_puts):
    """The segments of instances 0, 1, ... of the nodes a, b, ..., in this process."""
    with ExitStack() as held:
        nodes = []
        for instance in range(num):
            server = TcpSegmentServer("127.0.0.1", receive)
            node = chr(ord("a") + instance)
            nodes.append(Segments(cluster_id, server, node=node, term=Term()))
            held.callback(nodes[-1].close)
        for segments in nodes:
            segments.meet([Peer(each.node, each.address) for each in nodes])
        yield nodes
