"""The messages of puts across TCP, and the socket calls of both ends.

A writer says hello; the owner answers with a welcome, the segment's description, grant and words.
Then a writer's message is a header (word, value, table of chunks) and the chunks; the owner sends
words.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

MAX_CHUNKS = 8
HEADER = struct.Struct(f"<{3 + 2 * MAX_CHUNKS}Q")
"""A message: the word's offset, its value, the number of chunks, (offset, bytes) of each chunk."""
WORD = struct.Struct("<QQ")
"""The offset and value of a word of the owner."""
HELLO = struct.Struct("<8sQ")
"""The magic, and the bytes of the names behind: segment and writer."""
MAGIC = b"nanocp\x00t"
ATTACHED, ABSENT, TAKEN = range(3)
"""The owner's answers: attached; no such segment; a writer of this name is there."""
ANNOUNCED = 0
"""Word offset of an announcement: pages come another way."""
HANDSHAKE_S = 10.0
"""Longest wait of hello and welcome."""
CLOSE_S = 2.0
_KEEPALIVE_S = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 4}
"""A vanished node is noticed after 2 + 4 * 1 seconds."""
_USER_TIMEOUT_MS = 6000
"""Without acknowledgements."""


class Welcome(NamedTuple):
    """The owner's answer to a hello, before the text, the grant and the words."""

    answer: int
    """ATTACHED, ABSENT or TAKEN; nothing follows the last two."""
    segment_bytes: int = 0
    data_offset: int = 0
    text_bytes: int = 0
    grant_bytes: int = 0
    num_words: int = 0


WELCOME = struct.Struct(f"<{len(Welcome._fields)}Q")


def put_header(word: int, value: int, chunks: Sequence[tuple[int, int]]) -> bytes:
    """Return a message's header with these chunks, each (offset, bytes), then the word."""
    assert len(chunks) <= MAX_CHUNKS, f"{len(chunks)} chunks; a message has at most {MAX_CHUNKS}"
    table = [number for chunk in chunks for number in chunk]
    return HEADER.pack(word, value, len(chunks), *table, *[0] * (2 * MAX_CHUNKS - len(table)))


def tune(connection: socket.socket) -> None:
    """Send without delay, and notice a node that vanishes."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in _KEEPALIVE_S.items():
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)


def shut(connection: socket.socket | None) -> None:
    """Shut the connection down, which wakes its reading thread."""
    if connection is not None:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def receive(connection: socket.socket, num_bytes: int) -> bytes:
    """Receive exactly `num_bytes` bytes; raises as `receive_into` does."""
    data = bytearray(num_bytes)
    receive_into(connection, [memoryview(data)])
    return bytes(data)


def receive_into(connection: socket.socket, views: list[memoryview]) -> None:
    """Receive into the views in turn.

    Raises ConnectionError at the end of the stream, TimeoutError after the connection's timeout.
    """
    views = [view for view in views if len(view)]
    while views:
        num_received = connection.recvmsg_into(views)[0]
        if not num_received:
            raise ConnectionError("the other end closed the connection")
        views = rest_of(views, num_received)


def rest_of(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    """Return the views without their first `num_bytes` bytes."""
    for number, view in enumerate(views):
        if num_bytes < len(view):
            return [view[num_bytes:], *views[number + 1 :]]
        num_bytes -= len(view)
    return []
