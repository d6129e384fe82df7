"""Token streams to front ends that are quick, slow, gone or back again, with real gRPC."""

import threading
import time
from dataclasses import replace

from data_plane.member.token_streams import TokenStreams, _Stream
from harness.members.member_fakes import LIMITS, Sink, serve
from harness.waits import WAIT_S, until
from nanocp.values.plan import FinishReason
from nanocp.values.sampling import Token


def token(front_end, request_id, index):
    return Token(front_end, request_id, index, 5, FinishReason.LENGTH if index == 9 else None)


def test_each_front_end_gets_its_own_tokens_in_order_and_close_sends_the_last():
    sinks = Sink(), Sink()
    (server_a, a), (server_b, b) = map(serve, sinks)
    streams = TokenStreams(3, LIMITS)
    for index in range(10):
        assert not streams.send([token(a, 1, index), token(b, 2, index), token(a, 4, index)])
    streams.close()
    assert all(sink.ended.wait(WAIT_S) for sink in sinks)
    assert sinks[0].tokens == [(3, request, index) for index in range(10) for request in (1, 4)]
    assert sinks[1].tokens == [(3, 2, index) for index in range(10)]
    server_a.stop(0)
    server_b.stop(0)


def test_a_front_end_that_is_gone_stalls_nobody_and_may_come_back(free_port):
    address = f"127.0.0.1:{free_port}"
    streams = TokenStreams(0, LIMITS)
    began = time.monotonic()
    while not (lost := streams.send([token(address, 1, 0)])):
        assert time.monotonic() - began < WAIT_S
    assert lost == {1}
    sink = Sink()
    server, _ = serve(sink, free_port)
    until(lambda: [streams.send([token(address, 1, 1)]), sink.tokens][1])
    streams.close()
    assert (0, 1, 1) in sink.tokens
    server.stop(0)


def test_a_front_end_that_does_not_read_costs_a_bounded_queue(monkeypatch):
    monkeypatch.setattr("data_plane.member.token_streams._MAX_BATCHES", 100)
    held = threading.Event()

    class Stuck(Sink):
        def Deliver(self, batches, context):
            held.wait(WAIT_S)
            return super().Deliver(batches, context)

    server, address = serve(Stuck())
    streams = TokenStreams(0, replace(LIMITS, retry_ms=200))
    began = time.monotonic()
    lost = set()
    for index in range(3000):
        if lost := streams.send([token(address, request, index) for request in range(300)]):
            break
    assert lost == set(range(300)) and time.monotonic() - began < WAIT_S / 2
    held.set()
    streams.close()
    server.stop(0)


def test_a_stream_that_breaks_within_a_call_names_the_requests_as_well(monkeypatch):
    server, address = serve(Sink())
    streams = TokenStreams(0, replace(LIMITS, retry_ms=1))
    assert not streams.send([token(address, 7, 0)])
    stream = streams._streams[address]
    server.stop(0)
    until(stream._call.done)
    early, take_unsure = [set()], stream.take_unsure
    # The first look was before the break.
    monkeypatch.setattr(_Stream, "take_unsure", lambda _: early.pop() if early else take_unsure())
    assert 7 in streams.send([token(address, 8, 0)])
    streams.close()


def test_a_stream_that_was_replaced_leaves_no_thread(free_port):
    streams = TokenStreams(0, replace(LIMITS, retry_ms=1))
    address = f"127.0.0.1:{free_port}"
    num_threads = threading.active_count()
    until(lambda: streams.send([token(address, 1, 0)]))
    for _ in range(5):
        time.sleep(0.01)
        streams.send([token(address, 1, 0)])
        until(lambda: streams.send([token(address, 1, 0)]))
    until(lambda: threading.active_count() <= num_threads + 2)
    streams.close()


def test_a_stream_that_breaks_names_the_requests_that_may_have_lost_tokens():
    server, address = serve(Sink())
    streams = TokenStreams(0, LIMITS)
    for index in range(3):
        assert not streams.send([token(address, 7, index), token(address, 8, index)])
    server.stop(0)
    lost = set()

    def all_are_named():
        lost.update(streams.send([token(address, 9, 0)]))
        return lost == {7, 8, 9}

    until(all_are_named)
    streams.close()
