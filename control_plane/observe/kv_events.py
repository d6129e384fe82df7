"""Events of cached pages for routers, in the form in which vLLM 0.32 publishes its own.

A router learns whose prompt begins with which pages, and sends a request where they are.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from msgspec import Struct
from msgspec.msgpack import Encoder

from control_plane.observe.observed import ObservedScheduler
from control_plane.scheduler.pages.prefix_sharing import PrefixSharing
from control_plane.scheduler.state.frame_ledger import FrameLedger
from nanocp.config.service import ServiceConfig
from nanocp.values.plan import PAGE_SIZE, Arrival, Ended

_MEDIUM = "GPU"
"""The name of an engine's own KV at routers, whatever device it is on."""
_MAX_BATCHES = 1_000
"""Batches kept for a reader that does not take them; then it misses some."""


class BlockStored(Struct, tag=True, omit_defaults=True):
    """Consecutive pages of one prompt can be shared now."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str] | None] | None = None
    """By page: the salt, at a salted prompt's first one."""


class BlockRemoved(Struct, tag=True, omit_defaults=True):
    """Pages cannot be shared any more."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(Struct, tag=True):
    """No page can be shared: a controller begins."""


class _Prompt(NamedTuple):
    token_ids: array[int]
    hashes: Sequence[bytes]
    salt: bytes


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class PageEvents:
    """Pages of prompts that requests can share, as published; used by the controller's thread.

    Pages of output, whose tokens the controller does not know, are published with the next prompt
    that has them. Pages in slots of KV offload alone count as removed.
    """

    def __init__(
        self, publish: Callable[[list[KvEvent]], None], close: Callable[[], None] = lambda: None
    ) -> None:
        self._publish, self.close = publish, close
        self._prompts: dict[int, _Prompt] = {}
        """By request, until it ends: a page may be lost and written again."""
        self._copies: Counter[bytes] = Counter()
        """Frames with each page that can be found."""
        self._published: set[bytes] = set()
        self._stored: list[tuple[int, bytes]] = []
        self._dropped: list[bytes] = []

    def submitted(self, arrival: Arrival, token_ids: Sequence[int], salt: bytes) -> None:
        """Take a request's attempt with its prompt."""
        if hashes := arrival.page_hashes:
            self._prompts[arrival.request_id] = _Prompt(array("I", token_ids), hashes, salt)

    def planned(self, scheduler: ObservedScheduler, ended: Iterable[Ended]) -> None:
        """Publish what a call of the scheduler has changed."""
        sharing, ledgers = scheduler.prefix_sharing, scheduler.requests.decided[0].frames
        events: list[KvEvent] = []
        if sharing.stored is not self._stored or any(
            ledger.dropped is not self._dropped for ledger in ledgers
        ):
            gone, writers = self._follow(sharing, ledgers), {*self._prompts}
        elif self._stored or self._dropped:
            gone, writers = self._count(), {request_id for request_id, _ in self._stored}
        else:
            gone, writers = [], set[int]()
        self._stored.clear()
        self._dropped.clear()
        if gone:
            self._published.difference_update(gone)
            events.append(BlockRemoved([*map(_as_int, gone)], _MEDIUM))
        for request_id in sorted(writers & self._prompts.keys()):
            events += self._stored_by(request_id)
        for each in ended:
            self._prompts.pop(each.request_id, None)
        if events:
            self._publish(events)

    def _follow(self, sharing: PrefixSharing, ledgers: Sequence[FrameLedger]) -> list[bytes]:
        """Count anew after frames were lost, and from now on; return what is gone."""
        sharing.stored = self._stored
        for ledger in ledgers:
            ledger.dropped = self._dropped
        cached = (ledger.cached_pages() for ledger in ledgers)
        self._copies = Counter(page_hash for pages in cached for _, page_hash, *_ in pages)
        return [page_hash for page_hash in self._published if page_hash not in self._copies]

    def _count(self) -> list[bytes]:
        self._copies.update(page_hash for _, page_hash in self._stored)
        self._copies.subtract(self._dropped)
        ended = [page_hash for page_hash in {*self._dropped} if not self._copies[page_hash]]
        for page_hash in ended:
            del self._copies[page_hash]
        return [page_hash for page_hash in ended if page_hash in self._published]

    def _stored_by(self, request_id: int) -> Iterator[BlockStored]:
        token_ids, hashes, salt = self._prompts[request_id]
        copies, published = self._copies, self._published
        new = [n for n, key in enumerate(hashes) if key in copies and key not in published]
        for _, run in groupby(enumerate(new), lambda each: each[1] - each[0]):
            pages = [page for _, page in run]
            first, end = pages[0], pages[-1] + 1
            published.update(hashes[first:end])
            has_salt = bool(salt) and first == 0
            yield BlockStored(
                [*map(_as_int, hashes[first:end])],
                _as_int(hashes[first - 1]) if first else None,
                token_ids[first * PAGE_SIZE : end * PAGE_SIZE].tolist(),
                PAGE_SIZE,
                None,
                _MEDIUM,
                None,
                [(salt.hex(),), *[None] * (len(pages) - 1)] if has_salt else None,
            )


def _as_int(page_hash: bytes) -> int:
    """Shorten a hash as vLLM does by default: to its last 64 bits."""
    return int.from_bytes(page_hash[-8:], "big")


class KvEventPublisher:
    """A ZMQ publisher of batches; a reader sees by their numbers that it missed some."""

    def __init__(self, endpoint: str, topic: str) -> None:
        """Raises ValueError without pyzmq, or if the endpoint cannot be bound."""
        try:
            import zmq
        except ModuleNotFoundError as error:
            raise ValueError(
                "kv_events is set and the package pyzmq is not installed; pip install "
                "'.[kv_events]' brings it"
            ) from error
        self._topic, self._encoder, self._number = topic.encode(), Encoder(), 0
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, _MAX_BATCHES)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._socket.close()
            raise ValueError(f"kv_events is {endpoint}, which cannot be bound: {error}") from error

    def publish(self, events: list[KvEvent]) -> None:
        """Send a batch, without a wait; the first one says that what was before is gone."""
        first = [] if self._number else [AllBlocksCleared()]
        batch = self._encoder.encode((time.time(), [*first, *events], 0))
        self._socket.send_multipart((self._topic, self._number.to_bytes(8, "big"), batch))
        self._number += 1

    def close(self) -> None:
        """Close the port."""
        self._socket.close(linger=0)


def open_page_events(service: ServiceConfig) -> PageEvents | None:
    """Return what publishes as configured; None if nothing does. Raises as KvEventPublisher."""
    if not service.kv_events:
        return None
    publisher = KvEventPublisher(service.kv_events, service.kv_events_topic)
    return PageEvents(publisher.publish, publisher.close)
