"""Pages from one instance to another: through shared memory, and within one process."""

import os
from contextlib import closing

import numpy as np
import pytest

from data_plane.instance.page_transfers import AppliedTable, PageTransfers
from data_plane.kv.peer_rings import PeerRings
from data_plane.transport.segments import Segments
from harness.transports.local_pages import local_peer_rings
from nanocp.config.limits import LimitsConfig
from nanocp.values.plan import TargetRun, Transfer
from nanocp.values.table_changes import PageRun, TableChanges

PAGE_BYTES = 64 * 8


@pytest.fixture(params=["shared memory", "one process"])
def movers(request):
    """One end for each of three instances."""
    if request.param == "one process":
        yield local_peer_rings(3)
        return
    cluster_id = f"moves{os.getpid()}"
    ends = [
        PeerRings(Segments(cluster_id), instance, 3, PAGE_BYTES, LimitsConfig())
        for instance in range(3)
    ]
    with closing(ends[0]), closing(ends[1]), closing(ends[2]):
        for end in ends:
            end.connect()
        yield ends


def content(number):
    return np.arange(64, dtype=np.uint64) + 1000 * number


def taken(mover):
    return [
        (arrived.ticket, arrived.page, arrived.payload.view(np.uint64).tolist())
        for pages in mover.arrived()
        for arrived in pages
    ]


def send_to_third(mover, ticket, page, payload):
    mover.send(2, ticket=ticket, page=page, num_tokens=64, payload=payload)


def test_pages_of_two_senders_arrive_whole_and_in_each_ones_order(movers):
    first, second, receiver = movers
    send_to_third(first, 7, 3, content(1))
    send_to_third(first, 7, 4, content(2))
    send_to_third(second, 9, 0, content(3))
    assert taken(receiver) == [
        (7, 3, content(1).tolist()),
        (7, 4, content(2).tolist()),
        (9, 0, content(3).tolist()),
    ]
    assert taken(receiver) == taken(first) == taken(second) == []


def test_a_full_ring_has_no_place_and_has_room_again_when_pages_were_taken(movers):
    first, second, receiver = movers
    for page in range(2):
        assert first.has_place(2)
        send_to_third(first, 1, page, content(page))
    assert not first.has_place(2)
    assert second.has_place(2), "each sender has its own ring"
    send_to_third(second, 2, 0, content(9))
    assert len(taken(receiver)) == 3
    assert first.has_place(2)
    send_to_third(first, 1, 2, content(2))
    assert taken(receiver) == [(1, 2, content(2).tolist())]


class OneInstance:
    """Frames of which frame f holds content(f); it counts the pages that are read."""

    num_read = 0

    def read(self, frame):
        self.num_read += 1
        return content(frame)


def test_a_page_is_read_only_when_there_is_a_place_for_it(movers):
    sender, _, receiver = movers
    frames, table = OneInstance(), AppliedTable(0, 3)
    instance = PageTransfers(table, frames, [], (), sender)
    table.now.apply(TableChanges(pages=(PageRun(5, 0, 3, 40),)))
    instance.send(Transfer(1, 5, 3 * 64, (TargetRun(0, 3, 2, 0),), source=0))
    for num_read, num_taken in ((2, 2), (3, 1), (3, 0)):
        instance.send_pages()
        instance.send_pages()
        assert frames.num_read == num_read
        assert len(taken(receiver)) == num_taken
    assert not instance.is_moving_pages
