"""The connector's half in vLLM's worker: the thread that sends pages, behind vLLM's steps.

A failed send is logged and forgotten: the prefill has a deadline.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from data_plane.prefill.connector.requests import PagePart
from data_plane.prefill.connector.rings import PageWriters
from data_plane.transport.exchange import ExchangeTimeout, PeerLost
from nanocp.values.plan import PAGE_SIZE

logger = logging.getLogger(__name__)

_JOIN_S = 5.0


@dataclass(slots=True, eq=False)
class _Queued:
    part: PagePart
    ready: Callable[[], None]
    is_cancelled: bool = False


class PageSender:
    """Sends parts in order, in a thread of its own."""

    def __init__(self, read_page: Callable[[PagePart, int, int], Any], places: PageWriters) -> None:
        """read_page: (part, page, tokens in it) -> payload, valid until the next call.

        A page of a recurrent state has no tokens.
        """
        self._read_page = read_page
        self._places = places
        self._queue: deque[_Queued] = deque()
        """The first one is in progress."""
        self._num_queued: Counter[str] = Counter()
        """By request, cancelled ones too."""
        self._known: set[str] = set()
        """Requests with parts, before their report."""
        self._ended: set[str] = set()
        self._failed: set[str] = set()
        self._changed = threading.Condition()
        self._reading = threading.Lock()
        self._is_open = True
        self.num_pages = 0
        self._thread = threading.Thread(target=self._run, name="nanocp pages", daemon=True)
        self._thread.start()

    def queue(self, parts: Iterable[PagePart], ready: Callable[[], None] = lambda: None) -> None:
        """Send the parts after earlier ones. ready: waits until their KV can be read."""
        with self._changed:
            for part in parts:
                self._queue.append(_Queued(part, ready, part.request_id in self._failed))
                self._num_queued[part.request_id] += 1
                self._known.add(part.request_id)
            self._changed.notify_all()

    def drop(self, request_ids: Iterable[str]) -> None:
        """Stop sending these requests' parts; on return none of their blocks is being read."""
        dropped = set(request_ids)
        if not dropped:
            return
        with self._changed:
            self._cancel(dropped)
        with self._reading:
            pass

    def finished(self, request_ids: Iterable[str], timeout_s: float = 0.0) -> set[str]:
        """Take ended requests; return, once each, those whose blocks are no longer needed."""
        with self._changed:
            self._ended.update(self._known.intersection(request_ids))
            self._changed.wait_for(lambda: not self._ended or bool(self._unneeded()), timeout_s)
            unneeded = self._unneeded()
            self._ended -= unneeded
            self._known -= unneeded
            self._failed -= unneeded
            return unneeded

    def close(self) -> None:
        """End the thread, and close the writers. Idempotent."""
        with self._changed:
            self._is_open = False
            self._cancel(set(self._num_queued))
            self._changed.notify_all()
        self._thread.join(_JOIN_S)
        self._places.close()

    def _unneeded(self) -> set[str]:
        return {request_id for request_id in self._ended if not self._num_queued[request_id]}

    def _cancel(self, request_ids: set[str]) -> None:
        for queued in self._queue:
            if queued.part.request_id in request_ids:
                queued.is_cancelled = True

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or not self._is_open)
                if not self._is_open:
                    return
                queued = self._queue[0]
            try:
                self._send(queued)
            except (PeerLost, ExchangeTimeout, ValueError, OSError) as error:
                part = queued.part
                logger.warning("ticket %d is given up: %s", part.ticket.ticket, error)
                with self._changed:
                    self._failed.add(part.request_id)
                    self._cancel({part.request_id})
            with self._changed:
                self._queue.popleft()
                self._num_queued[queued.part.request_id] -= 1
                self._num_queued += Counter()  # without those that have none left
                self._changed.notify_all()

    def _send(self, queued: _Queued) -> None:
        part = queued.part
        for page in part.pages():
            instance = part.ticket.instance_of(page)
            if instance is None:
                continue
            num_tokens = max(min(PAGE_SIZE, part.ticket.num_tokens - page * PAGE_SIZE), 0)
            with self._reading:
                if queued.is_cancelled:
                    return
                queued.ready()
                payload = self._read_page(part, page, num_tokens)
            if not self._places.write(
                part.ticket,
                instance,
                page=page,
                num_tokens=num_tokens,
                payload=payload,
                is_cancelled=lambda: queued.is_cancelled,
            ):
                return
            self.num_pages += 1
