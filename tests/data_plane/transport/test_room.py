"""/dev/shm has room for one term: what is given up is free at once, and who lacks room waits."""

import gc
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from data_plane.kv.page_ring import PageRing
from data_plane.transport import segments as module
from data_plane.transport import shared_memory
from data_plane.transport.exchange import Term, TermOver
from data_plane.transport.segments import Segments
from data_plane.transport.shared_memory import NoRoom, unlink_cluster


@pytest.fixture
def segments():
    made = Segments(f"room-{os.getpid()}", term=Term(2))
    yield made
    made.close()
    unlink_cluster(made.cluster_id)


def mappings():
    """Lines of this process's mappings of segments, also of those that have lost their name."""
    return [
        line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/" in line
    ]


def test_a_ring_that_is_closed_keeps_no_memory_though_it_is_referred_to(segments):
    gc.collect()  # or what other tests have left goes in between
    before = mappings()
    ring = PageRing.create(segments, 0, 4, 64)
    assert len(mappings()) == len(before) + 1
    ring.close()
    assert mappings() == before, "the next term has no room for its own"


class Shortage:
    """/dev/shm without room, until so many have asked."""

    def __init__(self, monkeypatch, number):
        self.left, self.allocate = number, shared_memory._allocate
        monkeypatch.setattr(shared_memory, "_allocate", self)

    def __call__(self, *arguments):
        if self.left:
            self.left -= 1
            raise NoRoom("a segment needs 2.0 MiB of /dev/shm, which has 0.4 MiB free")
        self.allocate(*arguments)


def test_who_lacks_room_waits_and_says_so_once(segments, monkeypatch, caplog):
    monkeypatch.setattr(module, "_PAUSES_S", (0.01,) * 5)
    Shortage(monkeypatch, 4)
    assert segments.own("exchange", 0, "", 64).name.endswith("-t2-exchange-0")
    (record,) = caplog.records
    assert "needs 2.0 MiB of /dev/shm, which has 0.4 MiB free; waiting" in record.getMessage()


def test_the_number_of_tries_is_bounded_and_smaller_before_the_first_term(segments, monkeypatch):
    monkeypatch.setattr(module, "_PAUSES_S", (0.01,) * 9)
    shortage = Shortage(monkeypatch, 100)
    with pytest.raises(NoRoom):
        segments.own("exchange", 0, "", 64)
    assert shortage.left == 100 - 7
    segments.meet([None])
    with pytest.raises(NoRoom):
        segments.own("exchange", 0, "", 64)
    assert shortage.left == 100 - 7 - 10


def test_a_term_that_ends_ends_the_wait_for_room(segments, monkeypatch):
    Shortage(monkeypatch, 100)
    segments.meet([None])
    segments.term.end(2)
    began_s = time.monotonic()
    with pytest.raises(TermOver):
        segments.own("exchange", 0, "", 64)
    assert time.monotonic() - began_s < sum(module._PAUSES_S) / 2


def test_more_instances_need_as_much_as_one_that_is_here(segments, monkeypatch):
    assert shared_memory.obstacle_to_more(segments.cluster_id, 100) == "", "nothing is known"
    for instance, kinds in enumerate((["exchange"], ["exchange", "prefill0", "moves_from_1"])):
        for kind in kinds:
            segments.own(kind, instance, "", 1 << 20)
    free = SimpleNamespace(f_bavail=7, f_frsize=1 << 20)
    monkeypatch.setattr(shared_memory.os, "statvfs", lambda path: free)
    assert shared_memory.obstacle_to_more(segments.cluster_id, 2) == ""
    said = shared_memory.obstacle_to_more(segments.cluster_id, 3)
    assert re.match(
        r"room for 3 more: needed are 9\.\d MiB of /dev/shm, which has 7\.0 MiB free: enlarge", said
    )
    assert shared_memory.obstacle_to_more("another", 3) == ""
