"""The page ring: the way of KV pages to an instance, which alone may touch its frames.

It is in the receiver's shared memory; other nodes write it by TCP (tcp/segment.py). The writer
counts complete pages, so a death leaves no half page; the receiver counts consumed ones. (Section 3
of the paper, MIGRATE.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from data_plane.transport.exchange import ExchangeTimeout, PeerLost
from data_plane.transport.futex import Word
from data_plane.transport.segments import Segments
from data_plane.transport.shared_memory import CACHE_LINE, OwnedSegment, Segment, aligned
from nanocp.config.limits import LimitsConfig
from nanocp.config.prefill import PrefillConfig
from nanocp.values.passes import even_split

PREFILL_RING, PULL_RING = "prefill0", "pull"
_WRITER = "its writer"
_NUM_COUNTS = 2
_CLOSE_CHECK_MS = 1000


class ArrivedPage(NamedTuple):
    """A page in the ring."""

    ticket: int
    page: int
    num_tokens: int
    payload: Any
    """uint8: an array, or a tensor on a GPU; the ring's own memory, until the next page is asked
    for.
    """
    offset: int = 0
    """Bytes of the page before these: a prefill stage has some layers."""
    page_bytes: int = 0
    """Bytes of the whole page; 0: these are all."""


class _Header(NamedTuple):
    ticket: int
    page: int
    num_tokens: int
    offset: int
    num_bytes: int


class _Places:
    """The ring's memory: both counts, then a header and a payload for each place."""

    def __init__(self, segment: OwnedSegment | Segment, ring_pages: int, page_bytes: int) -> None:
        base, stride = segment.data_offset, aligned(page_bytes)
        self.written = Word(segment.memory, base)
        self.consumed = Word(segment.memory, base + CACHE_LINE)
        self.headers: list[np.ndarray] = []
        self.payloads: list[Any] = []
        """uint8 [page_bytes] each, arrays or tensors."""
        self.chunks: list[tuple[tuple[int, int], ...]] = []
        """(offset, bytes) of each place's header and payload."""
        self.bulk_chunks: list[tuple[int, int] | None] = []
        """(offset, bytes) of each payload in the segment's bulk, if any."""
        pages_offset = base + _data_bytes(ring_pages)
        for place in range(ring_pages):
            offset = base + (_NUM_COUNTS + place) * CACHE_LINE
            self.headers.append(
                np.ndarray(len(_Header._fields), np.uint64, buffer=segment.memory, offset=offset)
            )
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
    """The receiver's end of a ring; `create` makes one.

    One thread calls `arrived` and `close`; one other may call `wait`.
    """

    def __init__(
        self,
        segment: OwnedSegment,
        ring_pages: int,
        place_bytes: int,
        page_bytes: int = 0,
    ) -> None:
        """place_bytes: most bytes of a payload. page_bytes: as of ArrivedPage."""
        self._segment = segment
        self._page_bytes = page_bytes
        self._places: _Places | None = _Places(segment, ring_pages, place_bytes)
        segment.served_words = (self._places.written, self._places.consumed)
        self._num_noticed = 0

    @property
    def is_open(self) -> bool:
        """True until `close`: pages can still arrive."""
        return self._places is not None

    @property
    def has_lost_writer(self) -> bool:
        """True if a connection of pages from another node has ended.

        All its pages are there then: ask before `arrived`.
        """
        return self._segment.is_attached(_WRITER) is False

    @classmethod
    def create(
        cls,
        segments: Segments,
        instance: int,
        ring_pages: int,
        place_bytes: int,
        kind: str = PREFILL_RING,
        page_bytes: int = 0,
    ) -> PageRing:
        """Make a ring of this kind. Raises ValueError for sizes below 1, or as Segments.own."""
        if ring_pages < 1 or place_bytes < 1:
            raise ValueError(
                f"ring_pages is {ring_pages} and place_bytes {place_bytes}; both must be at least 1"
            )
        description = f"ring_pages {ring_pages}\npage_bytes {place_bytes}"
        segment = segments.own(
            kind, instance, description, _data_bytes(ring_pages), ring_pages * aligned(place_bytes)
        )
        return cls(segment, ring_pages, place_bytes, page_bytes)

    def arrived(self) -> Iterator[ArrivedPage]:
        """Yield the pages that are here now, in order, without blocking.

        A page's place becomes free when the next page is asked for.
        """
        assert self._places is not None, "the ring is closed"
        places = self._places
        # Only what was here at the call, so that a fast writer cannot hold up a step.
        num_written = places.written.load()
        for index in range(places.consumed.load(), num_written):
            place = index % len(places.headers)
            header = _Header._make(places.headers[place].tolist())
            payload = places.payloads[place][: header.num_bytes]
            yield ArrivedPage(*header[:3], payload, header.offset, self._page_bytes)
            assert places.consumed.load() == index, "two loops over the ring's pages at one time"
            self._segment.publish(places.consumed, index + 1)

    def wait(self, timeout_ms: float) -> bool:
        """Block until a page arrives that no earlier `wait` has reported."""
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
        """Remove the ring and end another thread's `wait`. Idempotent."""
        places, self._places = self._places, None
        if places is not None:
            places.written.wake()
        self._segment.close()


class PageRingWriter:
    """The writer's end of a ring, for one thread.

    Raises ExchangeTimeout if the ring does not appear within start_timeout_ms, TermOver if the term
    ends meanwhile, PeerLost if its instance is dead, ValueError if it has a writer already.
    """

    def __init__(
        self,
        segments: Segments,
        instance: int,
        limits: LimitsConfig,
        kind: str = PREFILL_RING,
        may_be_short: bool = False,
    ) -> None:
        """may_be_short: payloads may be shorter than a page."""
        self._may_be_short = may_be_short
        self._instance = instance
        self._limits = limits
        self._segment = segments.attach(
            kind, instance, _WRITER, limits, limits.start_timeout_ms, has_pages=True
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
        # A writer that died may have left half a page after the last counted one. The next page
        # goes to the same place.
        self._num_written = self._places.written.load()

    @property
    def has_place(self) -> bool:
        """True if `write` would find a place at once."""
        assert self._places is not None, "the writer is closed"
        return self._num_written - self._places.consumed.load() < len(self._places.headers)

    def receiver_is_alive(self) -> bool:
        """True while the ring's instance lives and has not closed the ring."""
        return self._places is not None and self._segment.owner_is_alive()

    def write(
        self,
        *,
        ticket: int,
        page: int,
        num_tokens: int,
        payload: Any,
        timeout_ms: float,
        is_cancelled: Callable[[], bool] = lambda: False,
        offset: int = 0,
    ) -> bool:
        """Write one page as soon as there is a place for it.

        payload: bytes, an array, or a tensor on a GPU. Returns False if `is_cancelled`, asked each
        tick, ended the wait. Raises PeerLost or ExchangeTimeout while waiting, ValueError for a
        payload of wrong size.
        """
        assert self._places is not None, "the writer is closed"
        places = self._places
        data = np.frombuffer(payload, np.uint8) if isinstance(payload, bytes) else payload
        data = _bytes_of(data) if isinstance(data, np.ndarray) else data.flatten()
        if data.nbytes != self.page_bytes and not (
            self._may_be_short and data.nbytes < self.page_bytes
        ):
            raise ValueError(
                f"the payload of page {page} is {data.nbytes} bytes; a page has {self.page_bytes}"
            )
        if not self._wait_for_place(places, timeout_ms, is_cancelled):
            return False
        place = self._num_written % len(places.headers)
        places.headers[place][:] = _Header(ticket, page, num_tokens, offset, data.nbytes)
        copy_bytes(data, places.payloads[place][: data.nbytes])
        self._num_written += 1
        chunks = places.chunks[place]
        if self._may_be_short:
            header, (offset, _) = chunks
            chunks = header, (offset, data.nbytes)
        self._segment.publish(places.written, self._num_written, chunks, places.bulk_chunks[place])
        return True

    def close(self) -> None:
        """Close the mapping; written pages stay in the ring. Idempotent."""
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
        what = (
            f"a page for instance {self._instance} waits for a place in its ring of "
            f"{len(places.headers)}"
        )
        if not self._segment.owner_is_alive():
            raise PeerLost(f"{what}: the process of the instance is gone", self._instance)
        if is_cancelled():
            return False
        raise ExchangeTimeout(
            f"{what}: the instance is alive but consumed none in {timeout_ms:.0f} ms",
            self._instance,
        )


def prefill_ring(writer: int) -> str:
    """Return the kind of a prefill writer's ring at each instance."""
    return f"prefill{writer}"


def prefill_rings(
    prefill: PrefillConfig,
    segments: Segments,
    instance: int,
    page_bytes: int,
    num_layers: int,
) -> tuple[PageRing, ...]:
    """Make an instance's rings: one for each writer of the prefill, and one for the puller."""
    place_bytes = page_bytes // num_layers * even_split(num_layers, prefill.stages)[0]
    kinds = {prefill_ring(writer): place_bytes for writer in range(prefill.num_writers)}
    if prefill.pull.allowed:
        kinds[PULL_RING] = page_bytes
    return tuple(
        PageRing.create(segments, instance, prefill.ring_pages, size, kind, page_bytes)
        for kind, size in kinds.items()
    )


def _bytes_of(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def copy_bytes(data: Any, place: Any) -> None:
    """Copy bytes into a place; each is an array, or a tensor on a GPU, free to reuse on return."""
    if isinstance(place, np.ndarray):
        place[:] = data if isinstance(data, np.ndarray) else data.cpu().numpy()
        return
    import torch

    place.copy_(torch.from_numpy(data) if isinstance(data, np.ndarray) else data)
    torch.cuda.current_stream(place.device).synchronize()
