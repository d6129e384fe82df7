"""The interface of a receiver of puts by TCP into a segment, and the receiver in Python.

It is the slow reference of native/receiver.py.
"""

from __future__ import annotations

import mmap
import socket
from collections.abc import Callable, Sequence

from data_plane.transport.futex import Word
from data_plane.transport.tcp.messages import ANNOUNCED, HEADER, MAX_CHUNKS, receive_into

Receiver = Callable[[socket.socket, mmap.mmap, int], int]
"""A receiver of puts, called with (connection, memory, data_offset).

connection: without a timeout. memory: the segment's, which puts may change from `data_offset` on.
Returns the longest time in ms at an announcement of pages that come another way. Raises
ConnectionError at the end of the stream, OSError if the connection breaks, ValueError if a message
cannot be from a writer of this cluster.
"""


def receive_in_python(connection: socket.socket, memory: mmap.mmap, data_offset: int) -> int:
    """Receive puts under the interpreter's lock; a Receiver."""
    view = memoryview(memory)
    words: dict[int, Word] = {}
    header = memoryview(bytearray(HEADER.size))
    while True:
        receive_into(connection, [header])
        put = HEADER.unpack(header)
        offset, value, num_chunks, *table = put
        if num_chunks > MAX_CHUNKS or offset % 8 or not data_offset <= offset <= len(view) - 8:
            return announced_ms(put, len(view))
        chunks = []
        for begin, num_bytes in zip(
            table[: 2 * num_chunks : 2], table[1 : 2 * num_chunks : 2], strict=True
        ):
            if begin < data_offset or begin + num_bytes > len(view):
                return announced_ms(put, len(view))
            chunks.append(view[begin : begin + num_bytes])
        receive_into(connection, chunks)
        if offset not in words:
            words[offset] = Word(memory, offset)
        words[offset].store(value)


def announced_ms(header: Sequence[int], memory_bytes: int) -> int:
    """Return the longest time in ms of an announcement.

    header: of a message that is no put into the segment of `memory_bytes`. Raises ValueError if it
    is no announcement.
    """
    offset, value, num_chunks, *table = header
    if offset != ANNOUNCED:
        raise ValueError(
            f"a word at {offset} after {num_chunks} chunks {table} into {memory_bytes} bytes"
        )
    return value
