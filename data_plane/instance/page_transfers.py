"""The pages that come into an instance's frames and leave them, under tickets."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from data_plane.instance.interface import PageFrames, PageMover, Pages, PageSource
from data_plane.kv.page_copier import PageCopier
from data_plane.kv.page_ring import ArrivedPage
from data_plane.transport.exchange import PeerLost
from nanocp.values.members import Report
from nanocp.values.plan import (
    PAGE_SIZE,
    Fetch,
    InstancePlan,
    Stow,
    Transfer,
    TransferDone,
    TransferFenced,
)
from nanocp.values.table import InstanceTable
from nanocp.values.table_changes import PageRun

_PLANS_UNDER_WAY = 2
"""Most plans that were made before a ticket and are applied after it."""


class _Expected(NamedTuple):
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


class AppliedTable:
    """The page table of an instance as its plans have made it (protocol.md, table digests)."""

    def __init__(self, instance: int, num_instances: int) -> None:
        self.seat = instance, num_instances
        self.clear()

    def clear(self) -> None:
        """Nothing goes on from here: no request, no ticket, no window."""
        self.now = InstanceTable(*self.seat)
        self._given: deque[tuple[int, Transfer]] = deque()
        """(newest window then, ticket): frames that were given to requests, the latest last."""
        self._newest_window = -1
        self._is_in_step = True
        """Whether the latest plan fitted the table."""

    def give(self, transfer: Transfer) -> None:
        """The ticket's frames may hold pages of its request from now on."""
        self._given.append((self._newest_window, transfer))

    def apply(self, plan: InstancePlan) -> str:
        """Bring the table to the plan's; returns what differed, or an empty string."""
        mismatch = self._apply(plan)
        self._is_in_step = not mismatch
        return mismatch

    def _apply(self, plan: InstancePlan) -> str:
        if plan.is_full:
            self.now = InstanceTable(*self.seat)
        elif self.now.digest != plan.base_digest:
            return (
                f"the table's digest is {self.now.digest:#x}, "
                f"the plan's base is {plan.base_digest:#x}"
            )
        self.now.apply(plan.changes)
        if self.now.digest != plan.result_digest:
            return (
                f"the changed table's digest is {self.now.digest:#x}, "
                f"the plan's is {plan.result_digest:#x}"
            )
        self._newest_window = plan.window
        while self._given and self._given[0][0] < plan.window - _PLANS_UNDER_WAY:
            self._given.popleft()
        return ""

    def kept_pages(self) -> list[PageRun]:
        """List the pages of requests in the table, without frames that a ticket has given away.

        The plan that takes a frame from its owner may come behind the ticket for the next one.
        """
        given: dict[int, set[tuple[int, int]]] = {}
        for _, transfer in self._given:
            for page, frame in transfer.frames_at(self.seat[0]).items():
                given.setdefault(frame, set()).add((transfer.request_id, page))
        return [
            run
            for request_id, runs in self.now.pages.items()
            if self._is_in_step
            and all(
                given.get(run.frame + index, set()) <= {(request_id, run.first_page + index)}
                for run in runs
                for index in range(run.num_pages)
            )
            for run in runs
        ]


class PageTransfers(Pages):
    """The tickets of an instance in one term; instance.interface.Pages has the contract."""

    def __init__(
        self,
        table: AppliedTable,
        frames: PageFrames,
        events: list[Report],
        rings: Sequence[PageSource],
        moves: PageMover,
    ) -> None:
        """events: gets what happens."""
        self.rings = rings
        """A ring for each writer of the prefill, none with synthetic KV.

        A watcher may wait on one; only `copy_arrived_pages` takes pages from it.
        """
        self.moves = moves
        self.copier: PageCopier | None = None
        """Copies pages to slots and back; None without kv_offload."""
        self._instance, self._num_instances = table.seat
        self._table, self._frames, self._events = table, frames, events
        self._to_send: deque[_Outgoing] = deque()
        self._expected: dict[int, _Expected] = {}
        self._newest_ticket = -1

    def join(self, rings: Sequence[PageSource], moves: PageMover, newest_ticket: int) -> None:
        """A term begins; the newest ticket is of the terms before."""
        self.rings, self.moves, self._newest_ticket = rings, moves, newest_ticket

    def leave(self) -> None:
        """Forget the tickets and close the ends."""
        if self.copier is not None:
            self.copier.abandon()
        self.close_ends()
        self._to_send.clear()
        self._expected.clear()

    def close_ends(self) -> None:
        """Close the rings and the ways to other instances."""
        self.moves.close()
        for ring in self.rings:
            ring.close()

    def close(self) -> None:
        """Release everything. Idempotent."""
        if self.copier is not None:
            self.copier.close()
        self.close_ends()

    def expect(self, transfer: Transfer) -> None:
        self._newest_ticket = transfer.ticket
        if self._frames.make(transfer):
            self._events.append(TransferDone(transfer.ticket, self._instance))
            return
        self._table.give(transfer)
        self._expected[transfer.ticket] = _Expected(
            transfer, transfer.frames_at(self._instance), {}
        )

    def send(self, transfer: Transfer) -> None:
        frames = self._table.now.frames(transfer.request_id)
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
        self._send_loaded()
        while self._to_send:
            receiver, ticket, page, frame = self._to_send[0]
            if not self.moves.has_place(receiver):
                return
            payload = self._frames.read(frame)
            self.moves.send(
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
        lost = {peer for peer in self._senders() if self.moves.has_lost(peer)}
        for ring in self.rings:
            self._copy(ring.arrived())
        for arrived in self.moves.arrived():
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
            if not self.moves.has_place(receiver):
                return
            self.moves.send(
                receiver, ticket=ticket, page=page, num_tokens=PAGE_SIZE, payload=payload
            )
            self.copier.sent()

    def _copy(self, arrived: Iterator[ArrivedPage]) -> None:
        for ticket, page, num_tokens, payload, offset, page_bytes in arrived:
            if ticket > self._newest_ticket:
                break  # its `expect` is under way: it stays in the ring, with all after it
            if ticket not in self._expected:
                continue  # done or fenced; below, two writers may have been asked for a page
            _, frames, parts_of = self._expected[ticket]
            parts = parts_of.setdefault(page, {})
            if page not in frames or offset in parts:
                continue
            self._frames.write(frames[page], num_tokens, payload, offset)
            parts[offset] = len(payload)
            if sum(parts.values()) >= page_bytes:
                self._is_there(ticket, page)

    def _is_there(self, ticket: int, page: int) -> None:
        frames = self._expected[ticket].frames
        del frames[page]
        if not frames:
            if self.copier is not None:
                self.copier.cancel(ticket)
            del self._expected[ticket]
            self._events.append(TransferDone(ticket, self._instance))
