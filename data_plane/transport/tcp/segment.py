"""A peer's segment on another node: the writer's end of puts across TCP.

The owner's end is tcp/server.py.
"""

from __future__ import annotations

import mmap
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from data_plane.transport.exchange import ExchangeTimeout, Term
from data_plane.transport.futex import Word
from data_plane.transport.shared_memory import Segment
from data_plane.transport.tcp.messages import (
    ABSENT,
    ANNOUNCED,
    CLOSE_S,
    HANDSHAKE_S,
    HELLO,
    MAGIC,
    TAKEN,
    WELCOME,
    WORD,
    Welcome,
    put_header,
    receive,
    rest_of,
    shut,
    tune,
)
from nanocp.config.limits import LimitsConfig

_DIAL_AGAIN_S = 0.02


class TcpSegment(Segment):
    """A peer's segment on another node, for one thread.

    `memory` is a mirror. Raises ExchangeTimeout if the segment cannot be attached in time,
    TermOver, or ValueError if it has a writer of this name.
    """

    def __init__(
        self,
        name: str,
        instance: int,
        address: str,
        writer: str,
        limits: LimitsConfig,
        timeout_ms: float,
        term: Term,
    ) -> None:
        """instance: the owner, named as the peer in errors."""
        self.name = name
        self._instance = instance
        self._term = term
        self._address = address
        self._limits = limits
        self.bulk: Any = None
        self.grant = b""
        """The permission to write pages into the owner's memory."""
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
        """Send the chunks, then the word.

        Raises ExchangeTimeout if the living owner takes nothing, or TermOver.
        """
        assert bulk is None, "the segment has no bulk"
        chunks = [chunk for chunk in chunks if chunk[1]]
        word.store(value)
        view = memoryview(self.memory)
        message = [memoryview(put_header(word.offset, value, chunks))]
        message += [view[offset : offset + num_bytes] for offset, num_bytes in chunks]
        if self._is_open:
            self._send(message)

    def announce(self) -> None:
        """Ask the owner to call its `progress` until the next message or a timeout."""
        header = put_header(ANNOUNCED, self._limits.exchange_timeout_ms, ())
        self._send([memoryview(header)])

    def fileno(self) -> int:
        return self._connection.fileno()

    def owner_is_alive(self) -> bool:
        return self._is_open

    def claim(self) -> bool:
        return True  # the owner let this writer attach as the only one

    def close(self) -> None:
        self._is_open = False
        shut(self._connection)
        if threading.current_thread() is not self._reader:
            self._reader.join(CLOSE_S)
        self._connection.close()

    def _send(self, message: list[memoryview]) -> None:
        deadline = time.monotonic() + self._limits.exchange_timeout_ms / 1000
        while message:
            try:
                message = rest_of(message, self._connection.sendmsg(message))
            except BlockingIOError:  # after SO_SNDTIMEO
                self._term.check()
                if time.monotonic() > deadline:
                    raise ExchangeTimeout(
                        f"{self.name} at {self._address}: its process is alive but took nothing in "
                        f"{self._limits.exchange_timeout_ms} ms",
                        self._instance,
                    ) from None
            except OSError:
                self._is_open = False
                return

    def _read_words(self) -> None:
        words: dict[int, Word] = {}
        with suppress(OSError):
            while True:
                offset, value = WORD.unpack(receive(self._connection, WORD.size))
                if offset not in words:
                    words[offset] = Word(self.memory, offset)
                words[offset].store(value)
        self._is_open = False
        for word in words.values():
            word.wake()

    def _dial(self, writer: str, timeout_ms: float) -> socket.socket:
        host, _, port = self._address.rpartition(":")
        begin_s = time.monotonic()
        # Owners listen before peers learn where: only a network hides one for longer.
        limit_ms = min(timeout_ms, self._limits.exchange_timeout_ms)
        advice = "; nodes must reach each other on all ports"
        while True:
            left_s = begin_s + limit_ms / 1000 - time.monotonic()
            try:
                connection = socket.create_connection(
                    (host.strip("[]"), int(port)), max(0.01, left_s)
                )
                limit_ms, advice = timeout_ms, ""
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
            if time.monotonic() >= begin_s + limit_ms / 1000:
                raise ExchangeTimeout(
                    f"{self.name} could not be attached at {self._address} in {limit_ms:.0f} ms: "
                    f"{reason}{advice}",
                    self._instance,
                )
            self._term.check()
            time.sleep(_DIAL_AGAIN_S)

    def _greet(self, connection: socket.socket, writer: str) -> bool:
        """Attach; False if the owner does not have the segment.

        Raises ValueError if the segment has a writer of this name already.
        """
        tune(connection)
        connection.settimeout(HANDSHAKE_S)
        text = f"{self.name}\n{writer}".encode()
        connection.sendall(HELLO.pack(MAGIC, len(text)) + text)
        welcome = Welcome._make(WELCOME.unpack(receive(connection, WELCOME.size)))
        if welcome.answer == TAKEN:
            raise ValueError(f"{self.name} has {writer} as a writer already; it can have only one")
        if welcome.answer == ABSENT:
            return False
        self.description = receive(connection, welcome.text_bytes).decode()
        self.grant = receive(connection, welcome.grant_bytes)
        self.data_offset = welcome.data_offset
        self.memory = mmap.mmap(-1, welcome.segment_bytes)
        for _ in range(welcome.num_words):
            offset, value = WORD.unpack(receive(connection, WORD.size))
            Word(self.memory, offset).store(value)
        # Limits sending alone. Python's timeout would hold for the reader too, and ask before each
        # call whether there is anything.
        seconds, ms = divmod(self._limits.tick_ms, 1000)
        tick = struct.pack("@ll", seconds, ms * 1000)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)
        connection.settimeout(None)
        return True
