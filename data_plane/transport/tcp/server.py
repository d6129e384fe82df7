"""The owner's end of one-sided puts across TCP between CPU instances of different nodes.

A thread writes a connection's chunks into the segment, then the word. Each (writer, segment) has
its own connection, so pages do not delay a step. An ended connection means a dead peer; keepalive
ends those of a vanished node.
"""

from __future__ import annotations

import logging
import mmap
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from data_plane.transport.shared_memory import OwnedSegment
from data_plane.transport.tcp.messages import (
    ABSENT,
    ATTACHED,
    CLOSE_S,
    HANDSHAKE_S,
    HELLO,
    MAGIC,
    TAKEN,
    WELCOME,
    WORD,
    Welcome,
    receive,
    shut,
    tune,
)
from data_plane.transport.tcp.receiver import Receiver

logger = logging.getLogger(__name__)

_PROGRESS_S = 50e-6
_MAX_TEXT_BYTES = 1 << 20
_MAX_CONNECTIONS = 4096


class _Attached(NamedTuple):
    key: tuple[str, str]
    """(segment, writer)."""
    memory: mmap.mmap
    data_offset: int
    progress: Callable[[], None] | None
    """Must be called while the writer writes, unless it is None."""


class TcpSegmentServer:
    """Lets writers on other nodes attach to this process's segments; `address` is host:port."""

    def __init__(self, host: str, receiver: Receiver) -> None:
        """Listen on a free port of this host's address. Raises OSError if that is impossible."""
        self._receiver = receiver
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        port = self._listener.getsockname()[1]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._lock = threading.Lock()
        self._segments: dict[str, OwnedSegment] = {}
        self._writers: dict[tuple[str, str], socket.socket | None] = {}
        """By (segment, writer); None once it has ended."""
        self._thread = threading.Thread(target=self._accept, name="tcp segments", daemon=True)
        self._thread.start()

    def admit(self, segment: OwnedSegment) -> None:
        """Let writers attach to the segment."""
        with self._lock:
            self._segments[segment.name] = segment

    def withdraw(self, segment: OwnedSegment) -> None:
        """End the segment's connections: its writers then take the owner for dead."""
        with self._lock:
            self._segments.pop(segment.name, None)
            keys = [key for key in self._writers if key[0] == segment.name]
            ended = [self._writers.pop(key) for key in keys]
        for connection in ended:
            shut(connection)

    def is_attached(self, segment: str, writer: str) -> bool | None:
        """True while the writer's connection is open, None if it never had one.

        All its puts are here before this is False.
        """
        with self._lock:
            if (segment, writer) not in self._writers:
                return None
            return self._writers[segment, writer] is not None

    def send_word(self, segment: str, offset: int, value: int) -> None:
        """Send a word of the segment to its writers."""
        with self._lock:
            for (name, _), connection in self._writers.items():
                if name == segment and connection is not None:
                    with suppress(OSError):
                        connection.sendall(WORD.pack(offset, value))

    def close(self) -> None:
        """Accept no more connections and end all. Idempotent."""
        # Closing the listener does not wake the thread that waits in accept.
        shut(self._listener)
        self._thread.join(CLOSE_S)
        self._listener.close()
        with self._lock:
            ended = list(self._writers.values())
        for connection in ended:
            shut(connection)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                num_open = sum(connection is not None for connection in self._writers.values())
            if num_open >= _MAX_CONNECTIONS:
                connection.close()
                continue
            threading.Thread(
                target=self._serve, args=(connection,), name="tcp receiver", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        attached = None
        with connection:
            try:
                tune(connection)
                connection.settimeout(HANDSHAKE_S)
                attached = self._greet(connection)
                if attached is None:
                    return
                # No timeout: keepalive bounds the wait.
                connection.settimeout(None)
                self._receive(connection, attached)
            except (OSError, ValueError) as error:
                logger.debug("a connection of %s ended: %s", attached and attached.key, error)
            finally:
                if attached is not None:
                    with self._lock:
                        # Not if the segment was withdrawn: each term has segments of its own.
                        if attached.key in self._writers:
                            self._writers[attached.key] = None

    def _greet(self, connection: socket.socket) -> _Attached | None:
        magic, num_bytes = HELLO.unpack(receive(connection, HELLO.size))
        if magic != MAGIC or num_bytes > _MAX_TEXT_BYTES:
            return None
        name, _, writer = receive(connection, num_bytes).decode().partition("\n")
        key = name, writer
        with self._lock:
            segment = self._segments.get(name)
            if segment is None or self._writers.get(key) is not None:
                answer = ABSENT if segment is None else TAKEN
                connection.sendall(WELCOME.pack(*Welcome(answer)))
                return None
            # Under the lock, because no word may change between the welcome that carries it and the
            # first `send_word`.
            text = segment.description.encode()
            welcome = Welcome(
                answer=ATTACHED,
                segment_bytes=len(segment.memory),
                data_offset=segment.data_offset,
                text_bytes=len(text),
                grant_bytes=len(segment.grant),
                num_words=len(segment.served_words),
            )
            words = b"".join(WORD.pack(word.offset, word.load()) for word in segment.served_words)
            connection.sendall(WELCOME.pack(*welcome) + text + segment.grant + words)
            self._writers[key] = connection
            return _Attached(key, segment.memory, segment.data_offset, segment.progress)

    def _receive(self, connection: socket.socket, attached: _Attached) -> None:
        """Receive puts until the connection ends, which raises an OSError.

        Raises ValueError if a message cannot be from a writer of this cluster.
        """
        while True:
            limit_ms = self._receiver(connection, attached.memory, attached.data_offset)
            if attached.progress is None:
                raise ValueError("pages are announced that this segment takes by no other way")
            _until_readable(connection, attached.progress, limit_s=limit_ms / 1000)


def _until_readable(
    connection: socket.socket, progress: Callable[[], None], limit_s: float
) -> None:
    """Call `progress` until input, the connection's end, or the limit."""
    deadline = time.monotonic() + limit_s
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    while not poll.poll(0) and time.monotonic() < deadline:
        progress()
        time.sleep(_PROGRESS_S)
