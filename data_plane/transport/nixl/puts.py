"""Puts by NIXL: a region of the exchange is one write into memory of the receiver, on any node.

Enters: at the writer, bytes of a segment and a word; at the owner, a word that is awaited. Leaves:
the bytes in the owner's segment, then the word. Does not know: layers, what an epoch is.

UCX promises no order between two writes, nor between the bytes of one. NIXL's notification comes
behind the write, but the writer sends it only when it calls its agent after the owner's agent has
acknowledged: neither may happen while both compute. So a put needs no second message. Its bytes
follow a header with two sums of all that is behind them, and the owner believes nothing but a whole
message: it copies the message, adds up the copy, and only then writes the segment. The
sums are of 64 bits each, so that a message of which bytes are missing, or are of an earlier put or
term, passes with a chance of 2^-58 at most.

An agent makes progress only when it is called, where no network card writes by itself. The owner
calls it each time it looks for a word. What was put while it computed waits in its socket.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from data_plane.transport.exchange import PeerLost, Term
from data_plane.transport.futex import Word
from data_plane.transport.nixl.pages import NixlAgent, Place
from data_plane.transport.shared_memory import CACHE_LINE, OwnedSegment
from data_plane.transport.tcp.segment import TcpSegment
from nanocp.config.limits import LimitsConfig

_VALUE, _TERM, _SIZE = 2, 3, 4
"""Words of the header behind the two sums."""
_WORD_BYTES = 8
_HEADER_BYTES = 5 * _WORD_BYTES
assert _HEADER_BYTES <= CACHE_LINE, "a message must fit where its region's flag and rows are"
_ACKNOWLEDGED_S = 0.1
"""So long after a message was taken its owner goes on: what acknowledges it must be sent."""


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _WORD_BYTES) * _WORD_BYTES


@functools.cache
def _weights(num_words: int) -> np.ndarray:
    """Random numbers, the same in every process; uint64 [2, num_words]."""
    return np.random.PCG64(1).random_raw(2 * num_words).reshape(2, num_words)


def _sums(message: np.ndarray) -> tuple[int, int]:
    """Two sums of a message, uint64 [words], without the words that hold them.

    What differs only in high bits of its words changes few bits of the first sum. It changes many
    of the second one, which takes the bytes of each word in reverse.
    """
    words = message[_VALUE:]
    first, second = _weights(1 << len(words).bit_length())[:, : len(words)]
    return int(np.dot(words, first)), int(np.dot(words.byteswap(), second))


class Inbox:
    """Memory of an owner for messages, and the way of whole ones into its segment.

    A message lies where its region lies in the segment's data, from the region's flag on.
    """

    def __init__(self, segment: OwnedSegment, term: int, agent: NixlAgent) -> None:
        """segment: of the exchange; `bulk` is memory for as many bytes as its data has."""
        self._agent = agent
        self._data_offset = segment.data_offset
        self._segment = np.frombuffer(segment.memory, np.uint8)
        self._bytes: np.ndarray = segment.bulk
        self._words = memoryview(segment.bulk).cast("Q")
        self._term = term

    def look(self, word: Word, offset: int, most: int) -> None:
        """Raise the word of a region if a later message than the last is there, all of it.

        offset, most: where the region is behind its word, and its bytes.
        """
        self._agent.progress()
        begin = word.offset - self._data_offset
        first = begin // _WORD_BYTES
        value, term, size = self._words[first + _VALUE : first + _SIZE + 1]
        if value <= word.load() or term != self._term or size > most:
            return
        end = begin + _HEADER_BYTES + _padded(size)
        # What is checked is what is taken: a late write of another term may still come.
        message = self._bytes[begin:end].copy().view(np.uint64)
        if [*_sums(message), value, term, size] != message[: _SIZE + 1].tolist():
            return
        self._segment[offset : offset + size] = message.view(np.uint8)[_HEADER_BYTES:][:size]
        word.store(value)
        self._agent.go_on(_ACKNOWLEDGED_S)


class NixlPuts(TcpSegment):
    """A peer's segment whose chunks and words go by NIXL; see segments.Segment.

    The connection brings what NIXL needs to know, and shows whether the owner is alive. Raises what
    TcpSegment raises, and ValueError if the owner takes no puts by NIXL.
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
        agent: NixlAgent,
    ) -> None:
        super().__init__(name, instance, address, writer, limits, timeout_ms, term)
        self._local: Place | None = None
        if not self.grant:
            self.close()
            raise ValueError(
                f"{name} takes no puts by NIXL: exchange_backend must be the same everywhere"
            )
        self._agent = agent
        self._peer, self._remote = agent.meet(self.grant)
        self._what = f"a put to {self._peer} by NIXL"
        self._number = term.number
        self._begin = 0
        self._message = np.zeros(0, np.uint8)
        self._writes: dict[tuple[int, int], Any] = {}
        """Prepared, by (offset in the owner's memory, bytes)."""
        self._under_way: dict[int, Any] = {}
        """The last write that was posted to an offset, unless it is known to be done."""

    def own_block(self, begin: int, num_bytes: int) -> None:
        """Say which part of the owner's data this writer writes."""
        self._begin = begin
        self._message, self._local = self._agent.allocate(num_bytes)

    def publish(
        self,
        word: Word,
        value: int,
        chunks: Sequence[tuple[int, int]] = (),
        bulk: tuple[int, int] | None = None,
    ) -> None:
        """Post the only chunk and the word, as one write; see segments.Segment.

        Raises PeerLost if NIXL has lost the owner, and while the word's last write is under way
        still, ExchangeTimeout or TermOver.
        """
        assert bulk is None and len(chunks) == 1, "a region is one run of bytes"
        word.store(value)
        if not self.owner_is_alive():
            return
        begin = word.offset - self.data_offset
        self._finish(begin)
        ((offset, size),) = chunks
        end = _HEADER_BYTES + _padded(size)
        message = self._message[begin - self._begin :][:end]
        mirror = np.frombuffer(self.memory, np.uint8)
        message[_HEADER_BYTES : _HEADER_BYTES + size] = mirror[offset : offset + size]
        words = message.view(np.uint64)
        words[_VALUE], words[_TERM], words[_SIZE] = value, self._number, size
        words[:_VALUE] = _sums(words)
        if (write := self._writes.get((begin, end))) is None:
            assert self._local is not None
            write = self._agent.prepare(
                self._local.part(begin - self._begin, end),
                self._peer,
                self._remote.part(begin, end),
                self._what,
                self._instance,
            )
            self._writes[begin, end] = write
        self._under_way[begin] = write
        self._agent.post(write, self._what, self._instance)
        self._agent.go_on(self._limits.exchange_timeout_ms / 1000)

    def close(self) -> None:
        """End the connection and release the memory of what is done. Idempotent."""
        super().close()
        local, self._local = self._local, None
        if local is None:
            return
        if all(map(self._is_over, self._under_way.values())):
            for write in self._writes.values():
                self._agent.discard(write)
            self._agent.release(local)
        else:
            self._agent.keep(self._writes)

    def _finish(self, begin: int) -> None:
        if (write := self._under_way.get(begin)) is not None:
            limit_s = self._limits.exchange_timeout_ms / 1000
            self._agent.finish(write, self._what, self._instance, self._goes_on, limit_s)
            del self._under_way[begin]

    def _goes_on(self) -> bool:
        self._term.check()
        return self.owner_is_alive()

    def _is_over(self, write: Any) -> bool:
        try:
            return self._agent.is_done(write, self._what, self._instance)
        except PeerLost:
            return True
