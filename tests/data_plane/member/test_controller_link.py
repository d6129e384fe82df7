"""The stream to the controller, with real gRPC."""

import logging
import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import Queue

import grpc
import pytest

from data_plane.member import controller_link
from data_plane.member.controller_link import ControllerLink, ControllerLost
from data_plane.transport.exchange import Term
from harness.members.member_fakes import LIMITS as IMPATIENT
from nanocp import parent
from nanocp.values.commands import Join
from nanocp.values.members import Beat, Envelope
from nanocp.wire.members import CONTROLLER, FROM_INSTANCE, TO_INSTANCE


def test_a_controller_that_does_not_answer_is_named(free_port):
    address = f"127.0.0.1:{free_port}"
    with pytest.raises(
        ControllerLost, match=f"no controller answered at {address} within start_timeout_ms"
    ):
        ControllerLink(address, IMPATIENT)


LIMITS = replace(IMPATIENT, start_timeout_ms=60_000)


class Silent:
    """A controller that takes what comes and tells each member the next term."""

    def __init__(self, term):
        self.term = term
        self.received = Queue()

    def attach(self, requests, context):
        yield Envelope(Join(), self.term)
        for message in requests:
            self.received.put(message)


def serve(port, term, service=CONTROLLER):
    server, controller = grpc.server(ThreadPoolExecutor(4)), Silent(term)
    handler = grpc.stream_stream_rpc_method_handler(
        controller.attach, FROM_INSTANCE.open, TO_INSTANCE.seal
    )
    methods = grpc.method_handlers_generic_handler(service, {"AttachInstance": handler})
    server.add_generic_rpc_handlers((methods,))
    assert server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    return server, controller


def test_a_member_goes_over_to_another_controller_and_its_later_term(free_port):
    limits = replace(LIMITS, orphan_ms=30_000)
    server, _ = serve(free_port, term=3)
    link = ControllerLink(f"127.0.0.1:{free_port}", limits)
    assert link.inbox.get(timeout=30).term == 3
    link.term.number = 3
    server.stop(0).wait()
    assert link.inbox.get(timeout=30) is None
    assert link.term.is_over
    server, controller = serve(free_port, term=1_000_001)
    link.redial()
    link.send(Beat(), 4)
    assert controller.received.get(timeout=30).term == 4
    assert link.inbox.get(timeout=30).term == 1_000_001
    assert link.term.is_over, "the old term stays over"
    link.term.number = 1_000_001
    assert not link.term.is_over, "and the new one may begin"
    link.close()
    server.stop(0).wait()


def test_a_controller_of_another_version_is_named(free_port, caplog):
    server, _ = serve(free_port, 1, "nanocp.v1.Controller")
    with caplog.at_level(logging.INFO):
        link = ControllerLink(f"127.0.0.1:{free_port}", LIMITS)
        assert link.inbox.get(timeout=30) is None
    assert "stream broke: it is of another version" in caplog.text
    link.close()
    server.stop(0).wait()


def test_a_member_without_a_controller_ends_after_its_limit(free_port):
    server, _ = serve(free_port, term=1)
    link = ControllerLink(f"127.0.0.1:{free_port}", replace(LIMITS, orphan_ms=300))
    assert link.inbox.get(timeout=30).term == 1
    server.stop(0).wait()
    assert link.inbox.get(timeout=30) is None
    with pytest.raises(ControllerLost, match=r"within orphan_ms \(300 ms\)"):
        while True:
            link.redial()
            assert link.inbox.get(timeout=30) is None


def test_a_member_does_not_wait_for_another_controller_when_nobody_could_start_one(
    free_port, monkeypatch
):
    server, _ = serve(free_port, term=1)
    link = ControllerLink(f"127.0.0.1:{free_port}", replace(LIMITS, orphan_ms=600_000))
    server.stop(0).wait()
    monkeypatch.setattr(parent.os, "getppid", lambda: 1)
    monkeypatch.setattr(controller_link, "SLICE_S", 0.1)
    with pytest.raises(ControllerLost, match="process that started this one is gone"):
        link.redial()


def test_time_in_which_a_member_does_not_run_is_no_waiting(free_port, monkeypatch):
    """One that is stopped while it waits finds the controller that has come meanwhile."""
    server, _ = serve(free_port, term=1)
    link = ControllerLink(f"127.0.0.1:{free_port}", replace(LIMITS, orphan_ms=500))
    assert link.inbox.get(timeout=30).term == 1
    server.stop(0).wait()
    assert link.inbox.get(timeout=30) is None
    real, waits = grpc.channel_ready_future, []

    class Stopped:
        def __init__(self, channel):
            self._ready = real(channel)

        def result(self, timeout):
            waits.append(timeout)
            if len(waits) == 1:
                time.sleep(1)
                raise grpc.FutureTimeoutError
            return self._ready.result(30)

    monkeypatch.setattr(grpc, "channel_ready_future", Stopped)
    monkeypatch.setattr(controller_link, "SLICE_S", 0.1)
    server, _ = serve(free_port, term=2)
    link.redial()
    assert link.inbox.get(timeout=30).term == 2
    link.close()
    server.stop(0).wait()


def test_a_term_of_a_lost_controller_stays_over_and_a_later_one_may_begin():
    term = Term(3)
    term.end(math.inf)
    term.go_on()
    assert term.is_over
    term.number = 1_000_001
    assert not term.is_over
