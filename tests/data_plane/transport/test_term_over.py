"""Waits end with their term, and a term shares nothing with the one before."""

import os
import threading
import time
from contextlib import closing
from dataclasses import replace

import pytest

from data_plane.native.receiver import receive_puts
from data_plane.transport.exchange import Channel, Field, Term, TermOver
from data_plane.transport.regions import TensorExchange
from data_plane.transport.segments import Segments
from data_plane.transport.shm import ShmExchange
from data_plane.transport.tcp.server import TcpSegmentServer
from harness.transports.transport_processes import LIMITS
from nanocp.values.members import Peer

LAYOUT = {Channel.DISPATCH: (Field("hidden", "float32", (4, 8)),)}
PATIENT = replace(LIMITS, exchange_timeout_ms=12_000, plan_timeout_ms=10_000)


def ended_soon(term):
    """A thread that ends the term while something waits."""
    thread = threading.Timer(0.1, term.end, [term.number])
    thread.start()
    return thread


def test_a_term_is_over_when_it_or_a_later_one_ends():
    term = Term(3)
    term.end(2)
    term.check()
    term.end(4)
    term.end(1)
    with pytest.raises(TermOver, match="term 3 is over"):
        term.check()
    term.number = 5
    assert not term.is_over


@pytest.mark.parametrize("nodes", ["aa", "ab"])
def test_a_wait_inside_a_step_ends_with_its_term(cluster_id, nodes):
    terms = [Term(), Term()]
    servers = [TcpSegmentServer("127.0.0.1", receive_puts) for _ in nodes]
    ways = [
        Segments(cluster_id, server, node=node, term=term)
        for server, node, term in zip(servers, nodes, terms, strict=True)
    ]
    for way in ways:
        way.meet([Peer(other.node, other.address) for other in ways])
    ends = [ShmExchange.create(way, i, 2, LAYOUT, PATIENT) for i, way in enumerate(ways)]
    with closing(ends[0]), closing(ends[1]), closing(ways[0]), closing(ways[1]):
        for end in ends:
            end.connect(10_000)
        began, thread = time.monotonic(), ended_soon(terms[0])
        with pytest.raises(TermOver):
            ends[0].wait(Channel.DISPATCH, 1, 1)
        assert time.monotonic() - began < 8, "not by a limit"
        assert ends[0].awaited is None
        thread.join()


@pytest.mark.parametrize("is_shared", [True, False])
def test_waiting_for_a_segment_ends_with_the_term(cluster_id, is_shared):
    term = Term(2)
    server = TcpSegmentServer("127.0.0.1", receive_puts)
    way = Segments(cluster_id, node="a", term=term)
    way.meet([Peer("a" if is_shared else "b", server.address)])
    began, thread = time.monotonic(), ended_soon(term)
    with closing(server), pytest.raises(TermOver):
        way.attach("exchange", 0, "instance 1", PATIENT, 60_000)
    assert time.monotonic() - began < 20
    thread.join()


def test_a_term_has_segments_of_its_own(cluster_id):
    terms = [Term(1), Term(2)]
    ends = [
        ShmExchange.create(Segments(cluster_id, term=term), 0, 2, LAYOUT, LIMITS) for term in terms
    ]
    names = {name for name in os.listdir("/dev/shm") if cluster_id in name}
    assert names == {f"nanocp-{cluster_id}-t{term.number}-exchange-0" for term in terms}
    for end in ends:
        end.close()


def test_tensors_of_another_term_are_others_and_epochs_begin_anew(cluster_id):
    def pair(number):
        term = Term(number)
        ends = [
            ShmExchange.create(Segments(cluster_id, term=term), i, 2, LAYOUT, LIMITS)
            for i in range(2)
        ]
        for end in ends:
            end.connect(10_000)
        return ends

    first, second = pair(1), pair(2)
    tensors = TensorExchange(first[0], LAYOUT)
    tensors.attention_epoch, tensors.moe_epoch = 7, 9
    region = tensors.outgoing(Channel.DISPATCH, 1, 10)
    region["hidden"][:] = 1
    tensors.close()
    assert not region, "no view keeps the old memory mapped"
    tensors.begin_term(second[0])
    assert (tensors.attention_epoch, tensors.moe_epoch) == (0, 0)
    tensors.outgoing(Channel.DISPATCH, 1, 0)["hidden"][:] = 2
    tensors.put(Channel.DISPATCH, 1, 0, 4)
    assert (second[1].wait(Channel.DISPATCH, 0, 0)["hidden"] == 2).all()
    for end in (first[1], *second):
        end.close()
