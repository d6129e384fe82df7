"""One-sided puts across TCP, for CPU instances on different nodes: the owner's thread writes what a
peer sends.

Enters: at the peer, chunks of a segment and a word; at the owner, connections. Leaves: the chunks
in the owner's segment and then the word, as if the peer had mapped it. Does not know: what the
bytes mean, epochs, who decides.

A connection is one writer's way into one segment, so that pages do not hold up a step. Messages
have a fixed header (word, value, a table of chunks) and then the chunks; back come words alone. The
end of a connection is the death of its other end: the kernel closes those of a process that dies,
keepalive those of a node that vanishes.
"""

from __future__ import annotations

import logging
import mmap
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from data_plane.transport.exchange import ExchangeTimeout
from data_plane.transport.futex import Word
from data_plane.transport.shared_memory import OwnedSegment, require_description
from nanocp.config import LimitsConfig

logger = logging.getLogger(__name__)

_MAX_CHUNKS = 8
_HEADER = struct.Struct(
    f"<{3 + 2 * _MAX_CHUNKS}Q"
)  # word, value, number of chunks, (offset, bytes) of each
_BACK = struct.Struct("<QQ")  # word, value
_HELLO = struct.Struct("<8sQ")  # magic, bytes of text: the segment's name and the writer's
_WELCOME = struct.Struct(
    "<QQQQQQ"
)  # answer, bytes of the segment, data offset, bytes of text and of grant, words
_MAGIC = b"nanocp\x00t"
_ATTACHED, _ABSENT, _TAKEN = range(3)
_ANNOUNCED = 0
"""In place of a word's offset: the writer's pages come another way (nixl.py), for which the owner
is needed too."""
_PROGRESS_S = 50e-6
_MAX_TEXT_BYTES = 1 << 20
_MAX_CONNECTIONS = 4096
_HANDSHAKE_S = 10.0
_DIAL_AGAIN_S = 0.02
_CLOSE_S = 2.0
_KEEPALIVE_S = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 4}
"""A node that vanished is noticed after 2 + 4 * 1 seconds."""
_USER_TIMEOUT_MS = 6000
"""The same where something was sent that nobody acknowledges."""


class TcpSegmentServer:
    """Where writers on other nodes attach to segments of this process. A thread for each
    connection."""

    def __init__(self, host: str) -> None:
        """Listen on a free port of this address. Raises OSError if that is impossible."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        port = self._listener.getsockname()[1]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._lock = threading.Lock()
        self._segments: dict[str, OwnedSegment] = {}
        self._writers: dict[tuple[str, str], socket.socket | None] = {}
        """By (segment, writer): its connection, None once it has ended."""
        self._thread = threading.Thread(target=self._accept, name="tcp segments", daemon=True)
        self._thread.start()

    def admit(self, segment: OwnedSegment) -> None:
        """Let writers attach to it."""
        with self._lock:
            self._segments[segment.name] = segment

    def withdraw(self, segment: OwnedSegment) -> None:
        """End its connections: to its writers, the owner is dead."""
        with self._lock:
            self._segments.pop(segment.name, None)
            ended = [
                connection
                for (name, _), connection in self._writers.items()
                if name == segment.name
            ]
        for connection in ended:
            _shut(connection)

    def is_attached(self, segment: str, writer: str) -> bool | None:
        """Whether the writer's connection is open. None: it has had none. All it put is here before
        this is False."""
        with self._lock:
            if (segment, writer) not in self._writers:
                return None
            return self._writers[segment, writer] is not None

    def send_word(self, segment: str, offset: int, value: int) -> None:
        """Send a word of the segment to its writers. They have few of them under way: this does not
        block."""
        with self._lock:
            for (name, _), connection in self._writers.items():
                if name == segment and connection is not None:
                    with suppress(OSError):
                        connection.sendall(_BACK.pack(offset, value))

    def close(self) -> None:
        """Take no more connections and end those there are. Idempotent."""
        # A close alone does not wake the thread in accept.
        _shut(self._listener)
        self._thread.join(_CLOSE_S)
        self._listener.close()
        with self._lock:
            ended = list(self._writers.values())
        for connection in ended:
            _shut(connection)

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
        key = None
        with connection:
            try:
                _tune(connection)
                connection.settimeout(_HANDSHAKE_S)
                greeted = self._greet(connection)
                if greeted is None:
                    return
                key, memory, data_offset, progress = greeted
                # For ever: keepalive bounds it.
                connection.settimeout(None)
                self._receive(connection, memory, data_offset, progress)
            except (OSError, ValueError) as error:
                logger.debug("a connection of %s ended: %s", key, error)
            finally:
                if key is not None:
                    with self._lock:
                        self._writers[key] = None

    def _greet(
        self, connection: socket.socket
    ) -> tuple[tuple[str, str], mmap.mmap, int, Callable[[], None] | None] | None:
        """Attach whom the connection is from: (segment, writer), and of the segment its memory,
        offset and progress. None: refused."""
        magic, num_bytes = _HELLO.unpack(_read(connection, _HELLO.size))
        if magic != _MAGIC or num_bytes > _MAX_TEXT_BYTES:
            return None
        name, _, writer = _read(connection, num_bytes).decode().partition("\n")
        key = name, writer
        with self._lock:
            segment = self._segments.get(name)
            if segment is None or self._writers.get(key) is not None:
                answer = _ABSENT if segment is None else _TAKEN
                connection.sendall(_WELCOME.pack(answer, 0, 0, 0, 0, 0))
                return None
            # Under the lock: no word may change between the welcome that tells it and the first
            # `send_word`.
            text = segment.description.encode()
            sizes = (
                len(segment.memory),
                segment.data_offset,
                len(text),
                len(segment.grant),
                len(segment.served_words),
            )
            words = b"".join(_BACK.pack(word.offset, word.load()) for word in segment.served_words)
            connection.sendall(_WELCOME.pack(_ATTACHED, *sizes) + text + segment.grant + words)
            self._writers[key] = connection
            return key, segment.memory, segment.data_offset, segment.progress

    @staticmethod
    def _receive(
        connection: socket.socket,
        memory: mmap.mmap,
        data_offset: int,
        progress: Callable[[], None] | None,
    ) -> None:
        """Write what comes until the connection ends, which is an OSError. ValueError: the writer
        is not of ours."""
        view = memoryview(memory)
        words: dict[int, Word] = {}
        header = memoryview(bytearray(_HEADER.size))
        while True:
            _fill(connection, [header])
            offset, value, num_chunks, *table = _HEADER.unpack(header)
            if offset == _ANNOUNCED and progress is not None:
                _until_readable(connection, progress, limit_s=value / 1000)
                continue
            if num_chunks > _MAX_CHUNKS or offset % 8 or not data_offset <= offset <= len(view) - 8:
                raise ValueError(f"a put of {num_chunks} chunks and a word at {offset}")
            chunks = []
            for begin, num_bytes in zip(
                table[: 2 * num_chunks : 2], table[1 : 2 * num_chunks : 2], strict=True
            ):
                if begin < data_offset or begin + num_bytes > len(view):
                    raise ValueError(f"a put of {num_bytes} bytes at {begin} into {len(view)}")
                chunks.append(view[begin : begin + num_bytes])
            _fill(connection, chunks)
            if offset not in words:
                words[offset] = Word(memory, offset)
            words[offset].store(value)


class TcpSegment:
    """A segments.Segment whose owner is across TCP: `memory` is a mirror, of which chunks are sent.
    For one thread.

    Raises ExchangeTimeout if it cannot be attached in time, ValueError if it has a writer of this
    name already.
    """

    def __init__(
        self, name: str, address: str, writer: str, limits: LimitsConfig, timeout_ms: float
    ) -> None:
        self.name = name
        self._address = address
        self._limits = limits
        self.bulk: Any = None
        self.grant = b""
        """See OwnedSegment."""
        self._connection = self._dial(writer, timeout_ms)
        self._is_open = True
        self._reader = threading.Thread(
            target=self._read_words, name=f"words of {name}", daemon=True
        )
        self._reader.start()

    def publish(
        self,
        word: Word,
        value: int,
        chunks: Sequence[tuple[int, int]] = (),
        bulk: tuple[int, int] | None = None,
    ) -> None:
        """See segments.Segment. Raises ExchangeTimeout if the owner lives but takes nothing."""
        assert bulk is None, "there is no bulk"
        chunks = [chunk for chunk in chunks if chunk[1]]
        assert len(chunks) <= _MAX_CHUNKS, (
            f"{len(chunks)} chunks; a message has at most {_MAX_CHUNKS}"
        )
        table = [number for chunk in chunks for number in chunk]
        table += [0] * (2 * _MAX_CHUNKS - len(table))
        word.store(value)
        view = memoryview(self.memory)
        message = [memoryview(_HEADER.pack(word.offset, value, len(chunks), *table))]
        message += [view[offset : offset + num_bytes] for offset, num_bytes in chunks]
        if self._is_open:
            self._send(message)

    def announce(self) -> None:
        """Ask the owner for what its `progress` does, until the next message, for as long as this
        end would wait."""
        self._send(
            [
                memoryview(
                    _HEADER.pack(
                        _ANNOUNCED, self._limits.exchange_timeout_ms, *(0,) * (1 + 2 * _MAX_CHUNKS)
                    )
                )
            ]
        )

    def owner_is_alive(self) -> bool:
        """See segments.Segment: whether the connection is open."""
        return self._is_open

    def claim(self) -> bool:
        """See segments.Segment: the owner let one writer in."""
        return True

    def require(self, description: str) -> None:
        """See segments.Segment."""
        require_description(self.name, self.description, description)

    def close(self) -> None:
        """End the connection. Idempotent."""
        self._is_open = False
        _shut(self._connection)
        if threading.current_thread() is not self._reader:
            self._reader.join(_CLOSE_S)
        self._connection.close()

    def _send(self, message: list[memoryview]) -> None:
        deadline = time.monotonic() + self._limits.exchange_timeout_ms / 1000
        while message:
            try:
                message = _rest(message, self._connection.sendmsg(message))
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise ExchangeTimeout(
                        f"{self.name} at {self._address}: its process is alive but took nothing in "
                        f"{self._limits.exchange_timeout_ms} ms"
                    ) from None
            except OSError:
                self._is_open = False
                return

    def _read_words(self) -> None:
        """Until the connection ends: words of the owner's into the mirror."""
        words: dict[int, Word] = {}
        with suppress(OSError):
            while True:
                offset, value = _BACK.unpack(_read(self._connection, _BACK.size, is_patient=True))
                if offset not in words:
                    words[offset] = Word(self.memory, offset)
                words[offset].store(value)
        self._is_open = False
        for word in words.values():
            word.wake()

    def _dial(self, writer: str, timeout_ms: float) -> socket.socket:
        host, _, port = self._address.rpartition(":")
        deadline = time.monotonic() + timeout_ms / 1000
        reason = "no answer"
        while True:
            left_s = deadline - time.monotonic()
            try:
                connection = socket.create_connection(
                    (host.strip("[]"), int(port)), max(0.01, left_s)
                )
                try:
                    if self._greet(connection, writer):
                        return connection
                except BaseException:
                    connection.close()
                    raise
                connection.close()
                reason = "the instance there does not have it"
            except OSError as error:
                reason = str(error)
            if time.monotonic() >= deadline:
                raise ExchangeTimeout(
                    f"{self.name} could not be attached at {self._address} in {timeout_ms:.0f} ms: {reason}"
                )
            time.sleep(_DIAL_AGAIN_S)

    def _greet(self, connection: socket.socket, writer: str) -> bool:
        """Attach; False if the owner does not have the segment. Raises ValueError if it has another
        such writer."""
        _tune(connection)
        connection.settimeout(_HANDSHAKE_S)
        text = f"{self.name}\n{writer}".encode()
        connection.sendall(_HELLO.pack(_MAGIC, len(text)) + text)
        answer, num_bytes, data_offset, num_text, num_grant, num_words = _WELCOME.unpack(
            _read(connection, _WELCOME.size)
        )
        if answer == _TAKEN:
            raise ValueError(f"{self.name} has {writer} as a writer already; it can have only one")
        if answer == _ABSENT:
            return False
        self.description = _read(connection, num_text).decode()
        self.grant = _read(connection, num_grant)
        self.data_offset = data_offset
        self.memory = mmap.mmap(-1, num_bytes)
        for _ in range(num_words):
            offset, value = _BACK.unpack(_read(connection, _BACK.size))
            Word(self.memory, offset).store(value)
        connection.settimeout(self._limits.tick_ms / 1000)
        return True


def _until_readable(
    connection: socket.socket, progress: Callable[[], None], limit_s: float
) -> None:
    """Call `progress` until there is something to read. The end of the connection is something."""
    deadline = time.monotonic() + limit_s
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    while not poll.poll(0) and time.monotonic() < deadline:
        progress()
        time.sleep(_PROGRESS_S)


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in _KEEPALIVE_S.items():
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)


def _shut(connection: socket.socket | None) -> None:
    """Wake whoever reads from it."""
    if connection is not None:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def _read(connection: socket.socket, num_bytes: int, is_patient: bool = False) -> bytes:
    data = bytearray(num_bytes)
    _fill(connection, [memoryview(data)], is_patient)
    return bytes(data)


def _fill(connection: socket.socket, views: list[memoryview], is_patient: bool = False) -> None:
    """Receive into the views, one after the other. Raises ConnectionError at the end of the stream.

    is_patient: go on after the connection's own timeout, which is then for sending.
    """
    views = [view for view in views if len(view)]
    while views:
        try:
            num_received = connection.recvmsg_into(views)[0]
        except TimeoutError:
            if is_patient:
                continue
            raise
        if not num_received:
            raise ConnectionError("the other end closed the connection")
        views = _rest(views, num_received)


def _rest(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of the views after so many bytes."""
    for number, view in enumerate(views):
        if num_bytes < len(view):
            return [view[num_bytes:], *views[number + 1 :]]
        num_bytes -= len(view)
    return []
