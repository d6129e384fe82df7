"""How much a link lets through: many bytes from one end to the other, over one TCP connection.

    python benchmarks/link_rate.py receive
    python benchmarks/link_rate.py send HOST PORT BYTES

Enters: an address. Leaves: the receiver prints its port, and at the end Mbit/s. Does not know: what
the link is, how its ends are named. Standard library only, so that it starts at once.
"""

from __future__ import annotations

import socket
import sys
import time

_FRAME, _PAYLOAD = 1514, 1448
"""Bytes of a full Ethernet frame, and those of them that are a program's."""


def receive() -> None:
    """Take all bytes of one connection.

    The rate counts frames with their headers, as a link does, from the first bytes to the last.
    """
    with socket.create_server(("", 0)) as server:
        print(server.getsockname()[1], flush=True)
        link, _ = server.accept()
    with link:
        link.recv(1)
        began_s = ended_s = time.perf_counter()
        num_bytes = 0
        while piece := link.recv(1 << 18):
            num_bytes += len(piece)
            ended_s = time.perf_counter()
    print(8e-6 * num_bytes * _FRAME / _PAYLOAD / (ended_s - began_s))


def send(host: str, port: str, num_bytes: str) -> None:
    """Send so many bytes, and end the connection."""
    with socket.create_connection((host, int(port))) as link:
        link.sendall(bytes(int(num_bytes)))


if __name__ == "__main__":
    {"receive": receive, "send": send}[sys.argv[1]](*sys.argv[2:])
