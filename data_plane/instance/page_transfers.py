"""The pages that come into an instance's frames and leave them, under tickets.

Enters: tickets, fences, arrived pages. Leaves: pages for peers, TransferDone and TransferFenced.
Does not know: what a payload means, why a page moves, steps. Subclasses read and write frames.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from data_plane.instance.interface import Instance, PageMover, PageSource
from data_plane.kv.page_copier import PageCopier
from data_plane.kv.page_ring import ArrivedPage
from data_plane.transport.exchange import PeerLost
from nanocp.values.members import Report
from nanocp.values.plan import PAGE_SIZE, Fetch, Stow, Transfer, TransferDone, TransferFenced
from nanocp.values.table import InstanceTable


class _Expected(NamedTuple):
    """A ticket whose pages may still come."""

    transfer: Transfer
    frames: dict[int, int]
    """page -> frame, for the pages that are not all there."""
    arrived: dict[int, dict[int, int]]
    """page -> {offset: bytes} of the parts that are there, for pages with some."""


class _Outgoing(NamedTuple):
    receiver: int
    ticket: int
    page: int
    frame: int


class PageTransfers(Instance):
    """The calls of instance.interface.Instance about pages, for every kind of instance."""

    def __init__(
        self,
        instance: int,
        num_instances: int,
        rings: Sequence[PageSource],
        moves: PageMover,
    ) -> None:
        self.rings = rings
        """Where the prefill puts pages: a ring for each of its writers, none with synthetic KV.

        A watcher may wait on one; only `copy_arrived_pages` takes pages from it.
        """
        self._instance = instance
        self._moves = moves
        self._num_instances = num_instances
        self._table = InstanceTable(instance, num_instances)
        self._events: list[Report] = []
        self._to_send: deque[_Outgoing] = deque()
        self._expected: dict[int, _Expected] = {}
        """By ticket."""
        self._newest_ticket = -1
        self.copier: PageCopier | None = None
        """Copies pages to slots and back; None without kv_offload."""

    @abstractmethod
    def _read_page(self, frame: int) -> Any:
        """A full page's entries, all layers, as `_write_page` takes them at another instance."""

    @abstractmethod
    def _write_page(self, frame: int, num_tokens: int, payload: Any, offset: int) -> None:
        """Put bytes of an arrived page into its frame; offset: see ArrivedPage."""

    def leave(self) -> None:
        if self.copier is not None:
            self.copier.abandon()
        self._moves.close()
        for ring in self.rings:
            ring.close()
        self._events.clear()
        self._to_send.clear()
        self._expected.clear()

    def expect(self, transfer: Transfer) -> None:
        self._newest_ticket = transfer.ticket
        self._expected[transfer.ticket] = _Expected(
            transfer, transfer.frames_at(self._instance), {}
        )

    def send(self, transfer: Transfer) -> None:
        frames = self._table.frames(transfer.request_id)
        for page, receiver in transfer.instances().items():
            if page in frames:
                self._to_send.append(_Outgoing(receiver, transfer.ticket, page, frames[page]))

    def stow(self, stow: Stow) -> None:
        assert self.copier is not None, "the controller knows which instances have slots"
        self.copier.stow(stow)

    def fetch(self, fetch: Fetch) -> None:
        assert self.copier is not None, "the controller knows which instances have slots"
        expected = self._expected.get(fetch.ticket)
        self.copier.fetch(fetch, expected.frames if expected is not None else {})

    def send_pages(self) -> None:
        """Write the pages to send; a page is read only once there is a place for it."""
        self._send_loaded()
        while self._to_send:
            receiver, ticket, page, frame = self._to_send[0]
            if not self._moves.has_place(receiver):
                return
            payload = self._read_page(frame)
            self._moves.send(
                receiver, ticket=ticket, page=page, num_tokens=PAGE_SIZE, payload=payload
            )
            self._to_send.popleft()

    @property
    def is_moving_pages(self) -> bool:
        if self.copier is not None:
            return bool(self._to_send or self._expected) or not self.copier.is_idle
        return bool(self._to_send) or any(
            expected.transfer.source is not None for expected in self._expected.values()
        )

    def fence(self, ticket: int) -> None:
        if self.copier is not None:
            self.copier.cancel(ticket)
        self._expected.pop(ticket, None)
        self._events.append(TransferFenced(ticket, self._instance))

    def copy_arrived_pages(self) -> None:
        """Copy the pages that arrived into their frames.

        Tickets ascend in the order of their `expect`. So a page of an unknown ticket is one of two.
        If the ticket is older, it is done or fenced, and the page is refused. If it is newer, its
        `expect` is still under way, and the page waits in its ring with all pages after it. A page
        that was taken already is dropped: two writers may have been asked for it. The same holds
        for a part of a page, and a page is there with all its bytes.
        """
        lost = {peer for peer in self._senders() if self._moves.has_lost(peer)}
        for ring in self.rings:
            self._copy(ring.arrived())
        for arrived in self._moves.arrived():
            self._copy(arrived)
        if self.copier is not None:
            events, filled = self.copier.take()
            self._events += events
            for ticket, page in filled:
                if ticket in self._expected:
                    self._is_there(ticket, page)
        for peer in lost & self._senders():
            raise PeerLost(
                f"instance {self._instance} waits for pages: its connection from instance {peer} "
                "has ended",
                peer,
            )

    def _senders(self) -> set[int]:
        """Peers from which pages of open tickets may come: of a prompt, from any that has slots."""
        sources = {expected.transfer.source for expected in self._expected.values()}
        if None in sources and self.copier is not None:
            return {*range(self._num_instances)} - {self._instance}
        return {source for source in sources if source is not None}

    def _send_loaded(self) -> None:
        while self.copier is not None and (loaded := self.copier.loaded()) is not None:
            ticket, page, receiver, payload = loaded
            if not self._moves.has_place(receiver):
                return
            self._moves.send(
                receiver, ticket=ticket, page=page, num_tokens=PAGE_SIZE, payload=payload
            )
            self.copier.sent()

    def _copy(self, arrived: Iterator[ArrivedPage]) -> None:
        for ticket, page, num_tokens, payload, offset, page_bytes in arrived:
            if ticket > self._newest_ticket:
                break
            if ticket not in self._expected:
                continue
            _, frames, parts_of = self._expected[ticket]
            parts = parts_of.setdefault(page, {})
            if page not in frames or offset in parts:
                continue
            self._write_page(frames[page], num_tokens, payload, offset)
            parts[offset] = len(payload)
            if sum(parts.values()) >= page_bytes:
                self._is_there(ticket, page)

    def _is_there(self, ticket: int, page: int) -> None:
        """A page is in its frame, with all layers."""
        frames = self._expected[ticket].frames
        del frames[page]
        if not frames:
            if self.copier is not None:
                self.copier.cancel(ticket)
            del self._expected[ticket]
            self._events.append(TransferDone(ticket, self._instance))
