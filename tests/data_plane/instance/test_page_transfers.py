"""Tickets of an instance: which pages are taken, and when they are done."""

import time

import numpy as np
import pytest

from data_plane.instance.page_transfers import AppliedTable, PageTransfers
from data_plane.kv.page_ring import ArrivedPage
from data_plane.transport.exchange import PeerLost
from harness.transports.peer_rings_by_tcp import WAIT_S, cut, peer_rings_by_tcp
from nanocp.values.plan import PAGE_SIZE, TargetRun, Transfer, TransferDone


class Ring(list):
    """Pages that a writer has put; each is consumed when the next is asked for."""

    def arrived(self):
        while self:
            yield self[0]
            del self[0]

    def close(self):
        """The writer's pages stay, as in a ring that it still has open."""


class NoMoves:
    """No other instance sends pages."""

    def arrived(self):
        return ()

    def has_lost(self, peer):
        return False

    def close(self):
        """There is nothing to close."""


class Frames:
    """Records which pages were written."""

    states = None

    def __init__(self):
        self.written = []

    def write(self, frame, num_tokens, payload, offset):
        self.written.append((frame, num_tokens, payload))

    def make(self, transfer):
        return False


class Transfers(PageTransfers):
    """Takes pages of a ring into recorded frames."""

    def __init__(self, ring, moves=None):
        table, frames = AppliedTable(0 if moves is None else 1, 2), Frames()
        super().__init__(table, frames, [], [ring], moves or NoMoves())
        self.written = frames.written

    def take_events(self):
        events = list(self._events)
        self._events.clear()
        return events


def page(ticket, number=0, payload="KV"):
    return ArrivedPage(ticket, number, PAGE_SIZE, payload)


def transfer(ticket, num_pages=1, source=None):
    target = TargetRun(0, num_pages, 0, 10 * ticket)
    return Transfer(ticket, 7, num_pages * PAGE_SIZE, (target,), source)


@pytest.fixture
def ring():
    return Ring()


def test_a_ticket_is_done_when_its_last_page_is_there_and_pages_come_once(ring):
    instance = Transfers(ring)
    instance.expect(transfer(1, num_pages=2))
    ring += [page(1, 1), page(1, 1, "again")]
    instance.copy_arrived_pages()
    assert instance.written == [(11, PAGE_SIZE, "KV")] and instance.take_events() == []
    ring += [page(1, 0), page(1, 0, "late")]
    instance.copy_arrived_pages()
    assert len(instance.written) == 2 and instance.take_events() == [TransferDone(1, 0)]


def test_a_page_of_a_newer_ticket_waits_and_one_of_an_unknown_older_is_refused(ring):
    instance = Transfers(ring)
    instance.expect(transfer(2))
    ring += [page(1), page(3), page(2)]
    instance.copy_arrived_pages()
    assert instance.written == [] and [each.ticket for each in ring] == [3, 2]
    instance.expect(transfer(3))
    instance.copy_arrived_pages()
    assert [frame for frame, *_ in instance.written] == [30, 20] and not ring


def test_a_survivor_takes_no_page_of_a_ticket_of_the_term_before(ring):
    """The frame may belong to another request by now (protocol.md, terms)."""
    instance = Transfers(ring)
    instance.expect(transfer(1))
    instance.leave()
    ring.append(page(1))
    instance.copy_arrived_pages()
    assert instance.written == [] and instance.take_events() == [] and not ring
    assert not instance.is_moving_pages


def test_a_move_of_the_term_before_is_forgotten(ring):
    instance = Transfers(ring)
    instance.expect(transfer(1, source=1))
    assert instance.is_moving_pages
    instance.leave()
    assert not instance.is_moving_pages


def test_a_page_is_there_with_its_last_part_and_each_part_comes_once(ring):
    instance = Transfers(ring)
    first, second = {"offset": 0, "page_bytes": 5}, {"offset": 3, "page_bytes": 5}
    instance.expect(transfer(1, num_pages=2))
    instance.expect(transfer(2, source=1))
    ring += [
        page(1, 0, "abc")._replace(**first),
        page(1, 0, "old")._replace(**first),
        page(1, 1, "de")._replace(**second),
        page(1, 1, "abc")._replace(**first),
    ]
    instance.copy_arrived_pages()
    assert [payload for *_, payload in instance.written] == ["abc", "de", "abc"]
    assert instance.take_events() == []
    ring += [page(1, 1, "old")._replace(**first), page(1, 0, "ed")._replace(**second)]
    instance.copy_arrived_pages()
    assert instance.written[3:] == [(10, PAGE_SIZE, "ed")]
    assert instance.take_events() == [TransferDone(1, 0)]
    ring.append(page(2, 0, "moved"))
    instance.copy_arrived_pages()
    assert instance.take_events() == [TransferDone(2, 0)], "peers send whole pages"


@pytest.fixture
def by_tcp():
    """The end of instance 0, and instance 1, which has another's ticket of two pages to wait for.

    The first page is there.
    """
    with peer_rings_by_tcp(8) as (sender, receiver):
        instance = Transfers(Ring(), moves=receiver)
        target = TargetRun(0, 2, 1, 10)
        instance.expect(Transfer(1, 7, 2 * PAGE_SIZE, (target,), source=0))
        move(sender, instance, 0)
        yield sender, instance


def move(sender, instance, number):
    """Send a page, and wait until it is in its frame."""
    written = len(instance.written)
    sender.send(1, ticket=1, page=number, num_tokens=PAGE_SIZE, payload=np.zeros(8, np.uint8))
    deadline = time.monotonic() + WAIT_S
    while len(instance.written) == written:
        assert time.monotonic() < deadline
        instance.copy_arrived_pages()


def test_a_connection_that_is_cut_in_the_middle_of_a_move_is_a_lost_peer(by_tcp):
    """Else the ticket would stay open until its term ends: the sender has no page left to send."""
    sender, instance = by_tcp
    cut(sender, instance.moves)
    with pytest.raises(
        PeerLost, match=r"instance 1 waits for pages: its connection from instance 0 has ended"
    ) as lost:
        instance.copy_arrived_pages()
    assert lost.value.peer == 0


def test_a_connection_that_ends_after_a_move_costs_nothing(by_tcp):
    sender, instance = by_tcp
    move(sender, instance, 1)
    instance.expect(transfer(2))  # of the prefill
    cut(sender, instance.moves)
    instance.copy_arrived_pages()
    assert instance.take_events() == [TransferDone(1, 1)]


def test_a_connection_that_is_cut_loses_a_peer_whose_slots_have_pages_of_a_prompt(by_tcp):
    """A prompt's ticket has no source, and any peer with slots may send some of its pages."""
    sender, instance = by_tcp
    move(sender, instance, 1)
    instance.copier = NoCopies()
    instance.expect(transfer(2))
    instance.copy_arrived_pages()
    cut(sender, instance.moves)
    with pytest.raises(PeerLost) as lost:
        instance.copy_arrived_pages()
    assert lost.value.peer == 0


class NoCopies:
    """A copier with nothing to do."""

    def take(self):
        return (), ()

    def cancel(self, ticket):
        """Nothing is under way."""


def test_pages_for_others_do_not_wait_for_ever_behind_one_whose_ring_is_gone(by_tcp):
    sender, instance = by_tcp
    cut(sender, instance.moves)
    with pytest.raises(PeerLost, match="a page for instance 1 finds no place") as lost:
        for number in range(9):
            assert sender.has_place(1)
            sender.send(1, ticket=9, page=number, num_tokens=1, payload=np.zeros(8, np.uint8))
    assert lost.value.peer == 1
