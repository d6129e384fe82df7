"""The page ring: order, wrap-around, back-pressure; writers and receivers that die or give up."""

import os
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_plane.kv import page_ring
from data_plane.kv.page_ring import PageRing, PageRingWriter
from data_plane.transport.exchange import ExchangeTimeout, PeerLost
from data_plane.transport.segments import Segments
from data_plane.transport.shared_memory import sweep_stale
from harness.transports.page_writers import (
    assert_written,
    page_payload,
    write_half_a_page,
    write_pages,
    written_page,
)
from harness.transports.transport_processes import (
    IMPATIENT,
    LIMITS,
    NOTICED_S,
    hold_instance,
    processes,
    receive,
)

PAGE_BYTES = 1000
RING_PAGES = 4


@pytest.fixture
def ring(cluster_id):
    ring = PageRing.create(Segments(cluster_id), 0, RING_PAGES, PAGE_BYTES)
    yield ring
    ring.close()


@pytest.fixture
def writer(ring, cluster_id):
    writer = PageRingWriter(Segments(cluster_id), 0, IMPATIENT)
    yield writer
    writer.close()


def write(writer, *pages, timeout_ms=100):
    return [
        writer.write(
            **written_page(page), payload=page_payload(page, PAGE_BYTES), timeout_ms=timeout_ms
        )
        for page in pages
    ]


def take(ring, num_pages=1000):
    """Take at most `num_pages` of the pages here and check each against what was written."""
    pages = []
    for arrived in ring.arrived():
        if len(pages) == num_pages:
            break
        assert_written(arrived, PAGE_BYTES)
        pages.append(arrived.page)
    return pages


def test_an_empty_ring_has_nothing_and_does_not_block(ring):
    assert take(ring) == []


def test_pages_arrive_whole_in_order_and_around_the_end(ring, writer):
    for first in range(0, 30, 3):
        assert write(writer, first, first + 1, first + 2) == [True] * 3
        assert take(ring) == [first, first + 1, first + 2]
    assert take(ring) == []


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, RING_PAGES), st.integers(0, RING_PAGES)), max_size=30),
    st.integers(1, 5),
)
def test_any_interleaving_is_a_queue(turns, ring_pages):
    cluster_id = f"test-{uuid.uuid4().hex}"
    with (
        closing(PageRing.create(Segments(cluster_id), 0, ring_pages, PAGE_BYTES)) as ring,
        closing(PageRingWriter(Segments(cluster_id), 0, IMPATIENT)) as writer,
    ):
        held, num_written = [], 0
        for num_to_write, num_to_take in turns:
            for _ in range(min(num_to_write, ring_pages - len(held))):
                write(writer, num_written)
                held.append(num_written)
                num_written += 1
            assert take(ring, num_to_take) == held[:num_to_take]
            del held[:num_to_take]


def test_a_full_ring_holds_the_writer_until_a_page_is_consumed(ring, writer):
    write(writer, *range(RING_PAGES))
    with pytest.raises(
        ExchangeTimeout,
        match="place in its ring of 4: the instance is alive but consumed none in 100 ms",
    ):
        write(writer, 4)
    consumer = threading.Timer(0.05, take, [ring])
    begin = time.monotonic()
    consumer.start()
    assert write(writer, 4, timeout_ms=30_000) == [True]
    assert 0.05 <= time.monotonic() - begin < 10
    consumer.join()
    assert take(ring) == [4]


def test_a_page_that_is_being_looked_at_is_not_overwritten(ring, writer):
    write(writer, *range(RING_PAGES))
    for arrived in ring.arrived():
        if arrived.page == 0:
            with pytest.raises(ExchangeTimeout):
                write(writer, 4)
        else:
            assert write(writer, arrived.page + 3) == [True]
        np.testing.assert_array_equal(arrived.payload, page_payload(arrived.page, PAGE_BYTES))
    assert take(ring) == [4, 5, 6]


def test_a_loop_that_breaks_leaves_its_page_for_the_next_call(ring, writer):
    write(writer, 0, 1, 2)
    for arrived in ring.arrived():
        if arrived.page == 1:
            break
    assert take(ring) == [1, 2]


def test_a_loop_ends_with_what_was_there_when_it_began(ring, writer):
    write(writer, 0)
    taken = []
    for arrived in ring.arrived():
        taken.append(arrived.page)
        write(writer, arrived.page + 1)
    assert taken == [0]
    assert take(ring) == [1]


def test_a_cancelled_ticket_stops_waiting_and_writes_nothing(ring, writer):
    write(writer, *range(RING_PAGES))
    cancelled_at = time.monotonic() + 0.05
    payload = page_payload(4, PAGE_BYTES)
    assert not writer.write(
        **written_page(4),
        payload=payload,
        timeout_ms=30_000,
        is_cancelled=lambda: time.monotonic() > cancelled_at,
    )
    assert time.monotonic() - cancelled_at < 10
    assert take(ring) == list(range(RING_PAGES))
    assert write(writer, 5) == [True]
    assert take(ring) == [5]


def test_payloads_may_be_bytes_or_any_array_of_the_right_size(ring, writer):
    floats = np.arange(PAGE_BYTES // 4, dtype=np.float32).reshape(25, 10).T
    writer.write(**written_page(0), payload=bytes(range(250)) * 4, timeout_ms=100)
    writer.write(**written_page(1), payload=floats, timeout_ms=100)
    first, second = (arrived.payload.copy() for arrived in ring.arrived())
    assert first.tobytes() == bytes(range(250)) * 4
    np.testing.assert_array_equal(second.view(np.float32).reshape(10, 25), floats)
    with pytest.raises(ValueError, match="payload of page 2 is 999 bytes; a page has 1000"):
        writer.write(**written_page(2), payload=bytes(999), timeout_ms=100)
    assert take(ring) == []


def test_wait_reports_every_arrival_once(ring, writer):
    begin = time.monotonic()
    assert not ring.wait(60)
    assert 0.05 < time.monotonic() - begin < 10
    write(writer, 0)
    assert ring.wait(0)
    assert not ring.wait(20), "a page that stays in the ring is reported once"
    write(writer, 1)
    assert take(ring) == [0, 1]
    assert ring.wait(0), "a page that came and went since is reported too, which is harmless"


def test_a_writer_wakes_a_sleeping_wait(ring, writer, monkeypatch):
    monkeypatch.setattr(page_ring, "_CLOSE_CHECK_MS", 30_000)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ring.wait, 30_000)
        time.sleep(0.05)
        write(writer, 0)
        assert answer.result(60)


def test_close_ends_a_sleeping_wait_and_those_after_it(ring):
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(lambda: [ring.wait(30_000), ring.wait(30_000)])
        time.sleep(0.05)
        ring.close()
        assert answers.result(60) == [False, False]


def test_two_writers_at_one_time_are_refused(ring, writer, cluster_id):
    with pytest.raises(ValueError, match="ring of instance 0 has a writer already"):
        PageRingWriter(Segments(cluster_id), 0, IMPATIENT)
    write(writer, 0)
    writer.close()
    second = PageRingWriter(Segments(cluster_id), 0, IMPATIENT)
    write(second, 1)
    second.close()
    assert take(ring) == [0, 1]


def test_a_ring_that_does_not_appear_or_is_nobodys_names_its_instance(cluster_id):
    limits = replace(IMPATIENT, start_timeout_ms=50)
    with pytest.raises(ExchangeTimeout, match="did not appear in 50 ms") as late:
        PageRingWriter(Segments(cluster_id), 3, limits)
    assert late.value.peer == 3
    ring = PageRing.create(Segments(cluster_id), 3, RING_PAGES, PAGE_BYTES)
    ring._segment.disown()  # as the end of its process would
    with pytest.raises(PeerLost) as lost:
        PageRingWriter(Segments(cluster_id), 3, limits)
    assert lost.value.peer == 3
    sweep_stale(cluster_id)


@pytest.mark.parametrize(("ring_pages", "page_bytes"), [(0, 10), (4, 0)])
def test_sizes_must_be_positive(ring_pages, page_bytes):
    with pytest.raises(ValueError, match="both must be at least 1"):
        PageRing.create(Segments("test"), 0, ring_pages, page_bytes)


def test_close_is_idempotent_and_leaves_nothing(cluster_id):
    ring = PageRing.create(Segments(cluster_id), 3, RING_PAGES, PAGE_BYTES)
    writer = PageRingWriter(Segments(cluster_id), 3, IMPATIENT)
    assert f"nanocp-{cluster_id}-t1-prefill0-3" in os.listdir("/dev/shm")
    for end in (ring, writer, ring, writer):
        end.close()
    assert not [name for name in os.listdir("/dev/shm") if cluster_id in name]
    assert not ring.wait(1000)


def test_a_thousand_pages_from_another_process_through_three_places(cluster_id):
    ring = PageRing.create(Segments(cluster_id), 0, 3, PAGE_BYTES)
    with processes((write_pages, (cluster_id, range(1000), ""))) as [(_, pipe)]:
        pages = []
        deadline = time.monotonic() + 60
        while len(pages) < 1000 and time.monotonic() < deadline:
            ring.wait(100)
            pages += take(ring)
        assert pages == list(range(1000))
        assert receive(pipe) == "ok"
    assert not ring.wait(0) or take(ring) == []
    ring.close()


def test_half_a_page_of_a_killed_writer_is_never_seen_and_its_place_is_written_again(cluster_id):
    ring = PageRing.create(Segments(cluster_id), 0, RING_PAGES, PAGE_BYTES)
    with processes((write_half_a_page, (cluster_id,))) as [(_, pipe)]:
        assert receive(pipe) == "half way"
    assert [arrived.page for arrived in ring.arrived()] == [0]
    successor = PageRingWriter(Segments(cluster_id), 0, IMPATIENT)
    write(successor, *range(1, 1 + RING_PAGES))
    assert take(ring) == list(range(1, 1 + RING_PAGES))
    successor.close()
    ring.close()


def test_a_killed_receiver_is_noticed_by_a_writer_that_waits(cluster_id):
    with processes((hold_instance, (cluster_id, 0, 1, False, ""))) as [(process, pipe)]:
        receive(pipe)
        writer = PageRingWriter(Segments(cluster_id), 0, LIMITS)
        killed_at = []
        killer = threading.Timer(0.1, lambda: (killed_at.append(time.monotonic()), process.kill()))
        killer.start()
        with pytest.raises(
            PeerLost, match=r"instance 0 waits for a place in its ring of 2: the process .* is gone"
        ):
            for page in range(3):
                writer.write(**written_page(page), payload=bytes(64), timeout_ms=30_000)
        assert time.monotonic() - killed_at[0] < NOTICED_S
        killer.join()
        writer.close()
    sweep_stale(cluster_id)
