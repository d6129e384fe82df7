"""The compiled receiver of puts by TCP: no interpreter lock while it waits, copies and wakes.

The slow reference, with the interface, is tcp/receiver.py.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import os
import socket
from typing import Any

from data_plane.native.build import NativeUnavailable, receiver_library
from data_plane.transport.tcp.messages import HEADER
from data_plane.transport.tcp.receiver import Receiver, announced_ms, receive_in_python

logger = logging.getLogger(__name__)

_CLOSED = -1
"""Result at the end of the stream; 0 if a header is no put, else an errno."""


def receive_puts(connection: socket.socket, memory: mmap.mmap, data_offset: int) -> int:
    """Receive as fast as this machine can; a Receiver."""
    return fastest_receiver()(connection, memory, data_offset)


@functools.cache
def fastest_receiver() -> Receiver:
    """Return the compiled receiver, or the one in Python where this machine cannot compile it."""
    try:
        return native_receiver()
    except NativeUnavailable as reason:
        logger.info("puts by TCP are received in Python (native unavailable: %s)", reason)
        return receive_in_python


def native_receiver() -> Receiver:
    """Return the compiled receiver. Raises NativeUnavailable if this machine cannot compile it."""
    call = receiver_library().nanocp_receive_puts
    pointer, u64 = ctypes.c_void_p, ctypes.c_uint64
    call.restype, call.argtypes = ctypes.c_int, (ctypes.c_int, pointer, u64, u64, pointer, u64)
    return functools.partial(_receive, call)


def _receive(call: Any, connection: socket.socket, memory: mmap.mmap, data_offset: int) -> int:
    assert connection.gettimeout() is None, "with a timeout, Python makes a socket non-blocking"
    header = ctypes.create_string_buffer(HEADER.size)
    # This view keeps the memory mapped during the call.
    base = ctypes.c_char.from_buffer(memory)
    address, num_bytes = ctypes.addressof(base), len(memory)
    ended = call(connection.fileno(), address, num_bytes, data_offset, header, HEADER.size)
    if ended == _CLOSED:
        raise ConnectionError("the other end closed the connection")
    if ended:
        raise OSError(ended, os.strerror(ended))
    return announced_ms(HEADER.unpack(header.raw), num_bytes)
