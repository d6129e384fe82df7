"""The puller's loop: a scripted controller, engines without NIXL, real rings."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc
import pytest

from data_plane.kv.page_ring import PULL_RING, PageRingWriter
from data_plane.member.controller_link import ControllerLost
from data_plane.member.lifetime import MemberSpec
from data_plane.prefill.pull.puller import PullerLoop
from data_plane.programs.process import run_member
from data_plane.transport.segments import Segments
from data_plane.transport.shared_memory import unlink_cluster
from harness.members import pulled_engines
from harness.members.member_fakes import CLUSTER_ID, LIMITS
from harness.members.pulled_engines import (
    LEASE_S,
    PATIENT,
    URL,
    Clock,
    assert_arrives,
    blocks,
    failures,
    now_of,
    prefill,
    pulling,
    refusals,
    reports,
    rings,
    say,
    taken,
)
from harness.waits import WAIT_S, until
from nanocp.config.prefill import PrefillConfig, PullConfig
from nanocp.config.service import ServiceConfig
from nanocp.config.whole import Config
from nanocp.values.commands import (
    CancelPrefill,
    HoldBlocks,
    Join,
    PagesArrived,
    RefuseBlocks,
    ReleaseBlocks,
    Shutdown,
)
from nanocp.values.members import Beat, Envelope, Ready
from nanocp.values.plan import TransferFailed
from nanocp.wire.member_metadata import NAME
from nanocp.wire.members import CONTROLLER, FROM_PREFILL, TO_PREFILL


def test_pages_go_to_their_instances_and_blocks_are_free_once_all_have_arrived(link, engine, both):
    with pulling(link, engine, PATIENT):
        until(lambda: reports(link, Ready))
        say(link, HoldBlocks(1, blocks("a")), prefill(11))
        assert_arrives(both, "a", 11)
        until(lambda: now_of(link) and now_of(link).is_up)
        assert (now_of(link).url, now_of(link).tokens_in_flight) == (URL, 150)
        assert engine.freed() == [], "a receiver may be lost yet"
        say(link, PagesArrived(11))
        until(lambda: engine.freed() == ["a"])
        until(lambda: now_of(link).num_done == 1)
        say(link, ReleaseBlocks(1), RefuseBlocks(blocks("a")), prefill(12))
        until(lambda: failures(link))
    now = now_of(link)
    assert (now.num_pages, now.num_failed, now.tokens_in_flight) == (3, 0, 0)
    assert now.answer_s > 0 and now.arrive_s > 0
    assert failures(link) == [(12, "prefill failed: the request holds no blocks")]
    assert engine.freed() == ["a"] and not refusals(link)


def test_a_release_ends_a_read_before_the_blocks_are_freed(link, engine, both):
    may_end = threading.Event()

    def slow(pages):
        assert may_end.wait(WAIT_S)
        yield from pages

    engine.through = slow
    with pulling(link, engine, PATIENT):
        say(link, HoldBlocks(1, blocks("a")), HoldBlocks(2, blocks("b")))
        say(link, prefill(11), prefill(12, 2))
        until(lambda: now_of(link) and now_of(link).tokens_in_flight == 300)
        say(link, ReleaseBlocks(1))
        until(lambda: now_of(link).num_cancelled == 1)
        assert engine.freed() == []
        may_end.set()
        until(lambda: engine.freed() == ["a"])
        assert_arrives(both, "b", 12)
    assert not failures(link) and engine.reads == {"b": 3}


def test_a_cancelled_read_ends_and_another_attempt_reads_again(link, engine, both):
    engine.may_read.clear()
    with pulling(link, engine, PATIENT):
        say(link, HoldBlocks(1, blocks("a")), prefill(11))
        until(lambda: now_of(link) and now_of(link).tokens_in_flight == 150)
        say(link, CancelPrefill(11))
        until(lambda: now_of(link).num_cancelled == 1)
        engine.may_read.set()
        say(link, prefill(12))
        assert_arrives(both, "a", 12)
    assert not failures(link) and engine.reads == {"a": 3}


def test_a_cancelled_pull_does_not_wait_for_its_ring(link, engine):
    narrow = rings(1, ring_pages=1)
    try:
        with pulling(link, engine, PATIENT):
            say(link, HoldBlocks(1, blocks("a")), HoldBlocks(2, blocks("b")), prefill(11))
            until(lambda: engine.reads["a"] == 2)
            say(link, CancelPrefill(11), prefill(12, 2))
            until(lambda: engine.reads["b"] >= 1)
            assert [page for _, page, *_ in taken(narrow[0])] == [0]
    finally:
        narrow[0].close()
        unlink_cluster(CLUSTER_ID)


def test_a_ring_without_a_place_and_pages_that_do_not_arrive_fail_the_transfer(link, engine, both):
    limits = replace(LIMITS, exchange_timeout_ms=400)
    narrow = rings(1, ring_pages=1, term=2)
    with pulling(link, engine, limits), closing(narrow[0]):
        say(link, HoldBlocks(1, blocks("a")), prefill(11))
        until(lambda: failures(link))
        assert failures(link)[0][1].endswith("its pages did not arrive in 0 s")
        say(link, Join(), prefill(12), term=2)
        until(lambda: len(failures(link)) == 2)
        assert "alive but consumed none in 400 ms" in failures(link)[1][1]


def test_a_lost_instance_is_nobodys_fault(link, engine):
    first, later = rings(2, ring_pages=1), rings(2, term=2)
    ends = closing(first[1]), closing(later[0]), closing(later[1])
    with ends[0], ends[1], ends[2], pulling(link, engine, PATIENT) as loop:
        say(link, HoldBlocks(1, blocks("a")), prefill(11))
        until(lambda: engine.reads["a"] == 2)  # the second page waits for a place
        first[0].close()
        until(lambda: loop._reading is None)
        say(link, Join(), prefill(12), term=2)
        assert_arrives(later, "a", 12)
    assert not failures(link)


def test_a_ring_with_another_writer_is_named(link, engine, both):
    other = PageRingWriter(Segments(CLUSTER_ID), 0, PATIENT, PULL_RING)
    with closing(other), pulling(link, engine, PATIENT):
        say(link, HoldBlocks(1, blocks("a")), prefill(11))
        until(lambda: failures(link))
    assert "ring of instance 0 has a writer already" in failures(link)[0][1]
    assert not refusals(link), "the client is not wrong"


def test_holds_outlive_a_controller_and_end_unless_the_next_one_holds_them(link, engine, both):
    clock = Clock()
    engine.may_read.clear()
    with pulling(link, engine, PATIENT, clock) as loop:
        say(link, HoldBlocks(1, blocks("a")), HoldBlocks(2, blocks("b")), prefill(11))
        until(lambda: now_of(link) and now_of(link).tokens_in_flight == 150)
        loop.forget_term()
        for forward_s in range(6, 30, 6):
            num_beats = len(engine.beats())
            clock.forward_s = forward_s
            loop._inbox.put(print)
            until(lambda: len(engine.beats()) > num_beats)  # noqa: B023
        say(link, Join(), HoldBlocks(2, blocks("b")), prefill(21, 2))
        until(lambda: len(reports(link, Ready)) == 2)
        engine.may_read.set()
        assert_arrives(both, "b", 21)
        assert engine.freed() == []
        clock.forward_s = 66.0
        say(link, CancelPrefill(1 << 40))
        until(lambda: engine.freed() == ["a"])
        say(link, PagesArrived(21))
        until(lambda: engine.freed() == ["a", "b"])
    assert not failures(link)


def test_a_controller_that_is_gone_ends_the_loops_turn_and_not_its_threads(link, engine):
    loop = PullerLoop(link, engine, Segments(CLUSTER_ID), PATIENT, LEASE_S)
    with closing(loop):
        link.inbox.put(Envelope(Join(), 1))
        say(link, HoldBlocks(1, blocks("a")))
        link.inbox.put(None)
        with pytest.raises(ControllerLost, match="stream ended"):
            loop.run()
        until(lambda: engine.beats())

        def full(message, term):
            raise ControllerLost("it reads nothing")

        link.send = full
        loop._inbox.put(partial(loop._take, prefill(1, 99), 1))
        with pytest.raises(ControllerLost, match="reads nothing"):
            loop.run()
        loop._inbox.put(partial(loop._take, HoldBlocks(2, blocks("b")), 1))
    assert sorted(engine.freed()) == ["a", "b"]


class Controller:
    """A controller that gives a puller these messages, and waits to be told to end."""

    def __init__(self, port, *messages):
        self.messages, self.received = messages, []
        self.names = []
        self.server = grpc.server(ThreadPoolExecutor(2))
        handler = grpc.stream_stream_rpc_method_handler(
            self.attach, FROM_PREFILL.open, TO_PREFILL.seal
        )
        methods = grpc.method_handlers_generic_handler(CONTROLLER, {"AttachPrefill": handler})
        self.server.add_generic_rpc_handlers((methods,))
        assert self.server.add_insecure_port(f"127.0.0.1:{port}")
        self.server.start()

    def attach(self, requests, context):
        self.names += [value for key, value in context.invocation_metadata() if key == NAME]
        yield from self.messages
        for envelope in requests:
            self.received.append(envelope.message)
            if isinstance(envelope.message, TransferFailed):
                yield Envelope(Shutdown("enough"))


def test_a_puller_process_goes_over_to_another_controller(free_port, cluster_id):
    """The blocks get heartbeats meanwhile."""
    engine = pulled_engines.ENGINE
    pull = PullConfig(allowed=("127.0.0.0/8",), lease_s=12)
    config = Config(
        limits=replace(LIMITS, start_timeout_ms=60_000, orphan_ms=60_000),
        prefill=PrefillConfig(pull=pull),
        service=ServiceConfig(controller_process=True),
    )
    where = cluster_id, f"127.0.0.1:{free_port}", "secret", Path()
    spec = MemberSpec("harness.members.pulled_engines:reader", config, *where, is_puller=True)
    held = Envelope(HoldBlocks(1, blocks("a")), 1), Envelope(HoldBlocks(2, blocks("b")), 1)
    first = Controller(free_port, Envelope(Join(), 1), *held)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(run_member, spec)
        until(lambda: engine.beats() and engine.beats()[-1] == ["a", "b"])
        first.server.stop(0).wait()
        num_beats = len(engine.beats())
        until(lambda: len(engine.beats()) > num_beats)
        last = Controller(free_port, Envelope(Join(), 2), Envelope(prefill(1, request_id=9), 2))
        done.result(60)
        last.server.stop(0).wait()
    assert first.names == last.names == ["puller"]
    assert sorted(engine.freed()) == ["a", "b"]
    assert {Beat, Ready, TransferFailed} <= {type(message) for message in last.received}


def test_a_fault_of_the_puller_ends_the_member(link, engine):
    loop = PullerLoop(link, engine, Segments(CLUSTER_ID), PATIENT, LEASE_S)
    say(link, Join(), "nonsense")
    with closing(loop), pytest.raises(AssertionError, match="sent nonsense to a running puller"):
        loop.run()


def test_a_puller_with_an_engine_sleeps(link, engine):
    with pulling(link, engine, PATIENT):
        say(link, HoldBlocks(1, blocks("a")))
        until(lambda: now_of(link) and now_of(link).is_up)
        times_s = []
        for _ in range(3):  # threads that other tests have left may work in one of them
            before_s = time.process_time()
            time.sleep(0.5)
            times_s.append(time.process_time() - before_s)
        assert min(times_s) < 0.1
