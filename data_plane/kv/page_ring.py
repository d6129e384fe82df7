"""The page ring: how KV pages of a prefill reach an instance, whose frames nobody else may touch
(3, MIGRATE).

Enters: pages, each under its ticket, from the one writer. Leaves: the same pages, in order, to the
one receiver. Does not know: which tickets are valid, what a payload means, frames.

The ring lies in the receiver's shared memory; a writer on another node gets there by TCP (tcp.py).
Two counts say all: pages written (the writer raises it after the page is complete, so a writer that
dies leaves nothing that looks like a page) and pages consumed (the receiver's).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from data_plane.transport.exchange import ExchangeTimeout, PeerLost
from data_plane.transport.futex import Word
from data_plane.transport.segments import Segment, Segments
from data_plane.transport.shared_memory import CACHE_LINE, OwnedSegment, aligned
from nanocp.config import LimitsConfig

_NUM_COUNTS = 2
_CLOSE_CHECK_MS = 1000


class ArrivedPage(NamedTuple):
    """A page as it was written."""

    ticket: int
    page: int
    num_tokens: int
    payload: Any
    """uint8, (page_bytes,), in place: the receiver's until it asks for the next page. An array; a
    tensor on a GPU."""


class _Places:
    """The ring's memory: both counts, for each place a header of three u64, and the payloads, which
    may be apart."""

    def __init__(self, segment: OwnedSegment | Segment, ring_pages: int, page_bytes: int) -> None:
        base, stride = segment.data_offset, aligned(page_bytes)
        self.written = Word(segment.memory, base)
        self.consumed = Word(segment.memory, base + CACHE_LINE)
        self.headers: list[np.ndarray] = []
        self.payloads: list[Any] = []
        """Arrays of uint8; tensors if they are apart, on a GPU."""
        self.chunks: list[tuple[tuple[int, int], ...]] = []
        """(offset, bytes) of what of a place is in the segment's memory."""
        self.bulk_chunks: list[tuple[int, int] | None] = []
        """And in its bulk."""
        pages_offset = base + _data_bytes(ring_pages)
        for place in range(ring_pages):
            offset = base + (_NUM_COUNTS + place) * CACHE_LINE
            self.headers.append(np.ndarray(3, np.uint64, buffer=segment.memory, offset=offset))
            header_chunk = offset, self.headers[-1].nbytes
            if segment.bulk is not None:
                self.payloads.append(segment.bulk[place * stride :][:page_bytes])
                self.chunks.append((header_chunk,))
                self.bulk_chunks.append((place * stride, page_bytes))
                continue
            offset = pages_offset + place * stride
            self.payloads.append(
                np.ndarray(page_bytes, np.uint8, buffer=segment.memory, offset=offset)
            )
            self.chunks.append((header_chunk, (offset, page_bytes)))
            self.bulk_chunks.append(None)


def _data_bytes(ring_pages: int) -> int:
    return (_NUM_COUNTS + ring_pages) * CACHE_LINE


class PageRing:
    """The receiver's end, in the receiver's memory. Made with `create`.

    `arrived` and `close` belong to the instance's thread; `wait` may be called by one other.
    """

    def __init__(self, segment: OwnedSegment, ring_pages: int, page_bytes: int) -> None:
        self._segment = segment
        self._places: _Places | None = _Places(segment, ring_pages, page_bytes)
        segment.served_words = (self._places.written, self._places.consumed)
        self._num_noticed = 0

    @property
    def is_open(self) -> bool:
        """Whether pages can still come: False after `close`."""
        return self._places is not None

    @classmethod
    def create(
        cls, segments: Segments, instance: int, ring_pages: int, page_bytes: int, kind: str = "ring"
    ) -> PageRing:
        """Make the instance's ring of `ring_pages` places for payloads of `page_bytes`; `kind`
        tells its rings apart.

        Raises ValueError if one of the two is not positive, or for what OwnedSegment refuses.
        """
        if ring_pages < 1 or page_bytes < 1:
            raise ValueError(
                f"ring_pages is {ring_pages} and page_bytes {page_bytes}; both must be at least 1"
            )
        description = f"ring_pages {ring_pages}\npage_bytes {page_bytes}"
        segment = segments.own(
            kind, instance, description, _data_bytes(ring_pages), ring_pages * aligned(page_bytes)
        )
        return cls(segment, ring_pages, page_bytes)

    def arrived(self) -> Iterator[ArrivedPage]:
        """The pages that are here now, in order; does not block.

        A page's place is free for the writer again when the next page is asked for. So a loop that
        breaks leaves the page it has seen, and all behind it, for the next call.
        """
        assert self._places is not None, "the ring is closed"
        places = self._places
        # At most what was here at the call: a fast writer cannot hold a step up.
        num_written = places.written.load()
        for index in range(places.consumed.load(), num_written):
            place = index % len(places.headers)
            ticket, page, num_tokens = places.headers[place].tolist()
            yield ArrivedPage(ticket, page, num_tokens, places.payloads[place])
            assert places.consumed.load() == index, "two loops over the ring's pages at one time"
            self._segment.publish(places.consumed, index + 1)

    def wait(self, timeout_ms: float) -> bool:
        """Block until a page has arrived that no earlier `wait` told of; False after the timeout or
        a `close`.

        A page that stays in the ring is told of once: whoever left it there knows.
        """
        places = self._places
        if places is None:
            return False
        num_written = places.written.wait_at_least(
            self._num_noticed + 1,
            timeout_ms,
            _CLOSE_CHECK_MS,
            go_on=lambda: self._places is not None,
        )
        if num_written is None:
            return False
        self._num_noticed = num_written
        return True

    def close(self) -> None:
        """Remove the ring and end a `wait` in another thread. Idempotent."""
        places, self._places = self._places, None
        if places is not None:
            places.written.wake()
        self._segment.close()


class PageRingWriter:
    """The writer's end: one process at a time, one thread.

    Raises ExchangeTimeout if the ring does not appear within start_timeout_ms, PeerLost if its
    instance is dead, and ValueError if it has a writer already.
    """

    def __init__(
        self, segments: Segments, instance: int, limits: LimitsConfig, kind: str = "ring"
    ) -> None:
        self._instance = instance
        self._limits = limits
        self._segment = segments.attach(
            kind, instance, "its writer", limits, limits.start_timeout_ms, has_pages=True
        )
        if not self._segment.claim():
            self._segment.close()
            raise ValueError(
                f"the page ring of instance {instance} has a writer already; it can have only one"
            )
        sizes = dict(line.split() for line in self._segment.description.splitlines())
        self.page_bytes = int(sizes["page_bytes"])
        self._places: _Places | None = _Places(
            self._segment, int(sizes["ring_pages"]), self.page_bytes
        )
        # A writer that died may have left half a page behind the count: its place is written again.
        self._num_written = self._places.written.load()

    @property
    def has_place(self) -> bool:
        """Whether `write` would find a place at once."""
        assert self._places is not None, "the writer is closed"
        return self._num_written - self._places.consumed.load() < len(self._places.headers)

    def write(
        self,
        ticket: int,
        page: int,
        num_tokens: int,
        payload: Any,
        timeout_ms: float,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Write one page as soon as there is a place; False if `is_cancelled` (asked each tick)
        ended the wait.

        payload: bytes, an array, or a tensor of bytes on a GPU. Raises PeerLost or ExchangeTimeout
        while waiting, ValueError if the payload is not page_bytes long.
        """
        assert self._places is not None, "the writer is closed"
        places = self._places
        data = np.frombuffer(payload, np.uint8) if isinstance(payload, bytes) else payload
        if isinstance(data, np.ndarray):
            data = _bytes_of(data)
        if data.nbytes != self.page_bytes:
            raise ValueError(
                f"the payload of page {page} is {data.nbytes} bytes; a page has {self.page_bytes}"
            )
        if not self._wait_for_place(places, timeout_ms, is_cancelled):
            return False
        place = self._num_written % len(places.headers)
        places.headers[place][:] = (ticket, page, num_tokens)
        _copy(data, places.payloads[place])
        self._num_written += 1
        self._segment.publish(
            places.written, self._num_written, places.chunks[place], places.bulk_chunks[place]
        )
        return True

    def close(self) -> None:
        """Give up the mapping; pages that were written stay. Idempotent."""
        self._places = None
        self._segment.close()

    def _wait_for_place(
        self, places: _Places, timeout_ms: float, is_cancelled: Callable[[], bool]
    ) -> bool:
        num_consumed = places.consumed.wait_at_least(
            self._num_written + 1 - len(places.headers),
            timeout_ms,
            self._limits.tick_ms,
            go_on=lambda: self._segment.owner_is_alive() and not is_cancelled(),
        )
        if num_consumed is not None:
            return True
        what = f"a page for instance {self._instance} waits for a place in its ring of {len(places.headers)}"
        if not self._segment.owner_is_alive():
            raise PeerLost(f"{what}: the process of the instance is gone")
        if is_cancelled():
            return False
        raise ExchangeTimeout(
            f"{what}: the instance lives but consumed none in {timeout_ms:.0f} ms"
        )


def _bytes_of(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _copy(data: Any, place: Any) -> None:
    """Bytes into a place; each is an array, or a tensor on a GPU."""
    if isinstance(place, np.ndarray):
        place[:] = data if isinstance(data, np.ndarray) else data.cpu().numpy()
        return
    import torch

    place.copy_(torch.from_numpy(data) if isinstance(data, np.ndarray) else data)
