"""The loops around an instance and around the prefill, with scripted doors; links and token streams
with real gRPC."""

import contextlib
import socket
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import Queue

import grpc
import numpy as np
import pytest

from data_plane.instance.interface import Polled, ResyncNeeded
from data_plane.kv.page_ring import PageRing, PageRingWriter
from data_plane.member import prefill_runner
from data_plane.member.controller_link import ControllerLink, ControllerLost
from data_plane.member.instance_runner import DecodeLoop
from data_plane.member.lifetime import Left
from data_plane.member.prefill_runner import PrefillLoop
from data_plane.member.token_streams import TokenStreams
from data_plane.transport.segments import Segments
from data_plane.transport.shared_memory import unlink_cluster
from nanocp.config import LimitsConfig
from nanocp.plan import (
    FinishReason,
    InstancePlan,
    TargetRun,
    Transfer,
    TransferDone,
    TransferFenced,
    WindowDone,
)
from nanocp.sampling import Token, TokenLogprobs
from nanocp.wire.convert import instance_plan_to_wire, transfer_to_wire
from nanocp.wire.v1 import cluster_pb2 as pb
from nanocp.wire.v1 import cluster_pb2_grpc as rpc

LIMITS = LimitsConfig(
    tick_ms=20, plan_timeout_ms=300, exchange_timeout_ms=1000, retry_ms=200, start_timeout_ms=500
)
PATIENT = replace(LIMITS, exchange_timeout_ms=30_000)
WAIT_S = 60.0
CLUSTER_ID = f"test-{uuid.uuid4().hex}"


class Link:
    """A controller that has said all it will say."""

    def __init__(self, *messages):
        self.inbox = Queue()
        for message in messages:
            self.inbox.put(message)
        self.sent = []

    def send(self, message):
        self.sent.append(message)

    def kinds(self):
        return [message.WhichOneof("message") for message in self.sent]


class Instance:
    """Writes down what it is told; `mismatches` counts down the plans it refuses."""

    ring = None

    def __init__(self, mismatches=0):
        self.calls = []
        self.mismatches = mismatches
        self.events = []

    def begin(self, plan):
        self.calls.append(("begin", plan.window, plan.is_full))
        if self.mismatches:
            self.mismatches -= 1
            return ResyncNeeded(plan.window, "digest 1, not 2")
        self.plan, self.steps = plan, 0
        return None

    def run_step(self):
        self.calls.append("step")
        self.steps += 1
        if self.steps == self.plan.num_steps:
            self.events.append(WindowDone(0, self.plan.window))

    def expect(self, transfer):
        self.calls.append(("expect", transfer.ticket))

    def fence(self, ticket):
        self.calls.append(("fence", ticket))
        self.events.append(TransferFenced(ticket, 0))

    is_moving_pages = False

    def send(self, transfer):
        self.calls.append(("send", transfer.ticket))

    def send_pages(self):
        pass

    def copy_arrived_pages(self):
        pass

    def poll(self):
        polled = Polled(tuple(self.events))
        self.events.clear()
        return polled


def plan(window, num_steps=1, is_full=False):
    return pb.ToInstance(
        plan=instance_plan_to_wire(InstancePlan(0, window, window, num_steps, 0, 0, is_full))
    )


def expect(ticket):
    return pb.ToInstance(expect=transfer_to_wire(Transfer(ticket, 9, 10, (TargetRun(0, 1, 0, 0),))))


SHUTDOWN = pb.ToInstance(shutdown=pb.Shutdown(reason="enough"))


def run(link, instance, error=Left):
    with pytest.raises(error) as raised:
        DecodeLoop(instance, link, TokenStreams(0, LIMITS), LIMITS).run()
    return str(raised.value)


def test_tickets_are_handled_between_steps_and_windows_in_order():
    link = Link(plan(0, 2), plan(1), expect(5), pb.ToInstance(fence=5), SHUTDOWN)
    instance = Instance()
    assert run(link, instance) == "enough"
    assert instance.calls == [
        *[("expect", 5), ("fence", 5)],
        *[("begin", 0, False), "step", "step"],
        *[("begin", 1, False), "step"],
    ]
    assert link.kinds() == ["transfer_fenced", "window_done", "window_done"]


def test_tickets_are_handled_between_the_steps_of_a_long_window():
    class Interrupted(Instance):
        """A ticket comes while its second step runs."""

        def run_step(self):
            super().run_step()
            if self.steps == 2:
                link.inbox.put(expect(5))
                link.inbox.put(pb.ToInstance(fence=5))

    link = Link(plan(0, num_steps=4), SHUTDOWN)
    instance = Interrupted()
    run(link, instance)
    assert instance.calls == [
        *[("begin", 0, False), "step", "step"],
        *[("expect", 5), ("fence", 5)],
        *["step", "step"],
    ]
    assert link.kinds() == ["transfer_fenced", "window_done"]


def test_an_idle_instance_looks_again_while_pages_move_between_instances():
    class Mover(Instance):
        is_moving_pages = True
        num_looks = 0

        def send_pages(self):
            self.num_looks += 1
            if self.num_looks == 4:
                self.is_moving_pages = False
                link.inbox.put(SHUTDOWN)

    link = Link(pb.ToInstance(send=expect(3).expect))
    instance = Mover()
    assert run(link, instance) == "enough"
    assert instance.calls == [("send", 3)] and instance.num_looks >= 4


def test_a_shutdown_waits_for_the_windows_that_were_sent():
    instance = Instance()
    run(Link(SHUTDOWN, None, plan(0), plan(1)), instance)
    assert instance.calls == [("begin", 0, False), "step", ("begin", 1, False), "step"]


def test_no_thread_is_left_when_the_instance_is_closed():
    instance = Instance()
    instance.ring = PageRing.create(Segments(CLUSTER_ID), 0, ring_pages=2, page_bytes=64)
    loop = DecodeLoop(instance, Link(SHUTDOWN), TokenStreams(0, LIMITS), LIMITS)
    with pytest.raises(Left):
        loop.run()
    assert "ring watcher" in {thread.name for thread in threading.enumerate()}
    instance.ring.close()
    loop.join()
    assert "ring watcher" not in {thread.name for thread in threading.enumerate()}


def test_a_stream_that_ends_ends_the_loop():
    assert run(Link(plan(0), None), Instance(), ControllerLost) == "the controller's stream ended"


def test_a_mismatch_is_answered_by_the_full_plan_whatever_came_before_it():
    link = Link(plan(0), plan(1), expect(3), plan(0, is_full=True), SHUTDOWN)
    instance = Instance(mismatches=1)
    run(link, instance)
    assert [call for call in instance.calls if call != "step"] == [
        ("expect", 3),
        ("begin", 0, False),
        ("begin", 0, True),
        ("begin", 1, False),
    ]
    assert link.kinds() == ["resync", "window_done", "window_done"]
    assert (link.sent[0].resync.window, link.sent[0].resync.reason) == (0, "digest 1, not 2")


def test_a_full_plan_that_is_refused_is_a_failure():
    message = run(Link(plan(0), plan(0, is_full=True)), Instance(mismatches=2), RuntimeError)
    assert message == "the full table of window 0 was refused: digest 1, not 2"


def test_a_full_plan_that_does_not_come_has_a_limit():
    began = time.monotonic()
    message = run(Link(plan(0)), Instance(mismatches=1), ControllerLost)
    assert message == "the full table of window 0 did not come in 300 ms"
    assert 0.3 <= time.monotonic() - began < 10


@pytest.fixture
def ring():
    ring = PageRing.create(Segments(CLUSTER_ID), 0, 2, 64)
    yield ring
    ring.close()
    unlink_cluster(CLUSTER_ID)


def test_pages_wake_an_idle_instance(ring):
    class Receiver(Instance):
        def copy_arrived_pages(self):
            for page in ring.arrived():
                self.events.append(TransferDone(page.ticket, 0))

    instance = Receiver()
    instance.ring = ring
    link = Link()
    with ThreadPoolExecutor(1) as pool:
        loop = pool.submit(run, link, instance)
        writer = PageRingWriter(Segments(CLUSTER_ID), 0, LIMITS)
        for page in range(5):
            assert writer.write(
                ticket=7, page=page, num_tokens=64, payload=bytes(64), timeout_ms=20_000
            )
        deadline = time.monotonic() + WAIT_S
        while len(link.sent) < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
        link.inbox.put(SHUTDOWN)
        loop.result(WAIT_S)
        writer.close()
    assert link.kinds() == ["transfer_done"] * 5


# --- the prefill ---


class Model:
    """Pages of zeros."""

    def __init__(self, error=None):
        self.error = error
        self.num_pages = 0

    def pages(self, token_ids, num_tokens, prompt_logprobs=None):
        if prompt_logprobs is not None:
            for token_id in token_ids[1 : num_tokens + 1]:
                prompt_logprobs.tell([TokenLogprobs(-token_id, ((prompt_logprobs.num_top, -0.5),))])
        for page in range(-(-num_tokens // 64)):
            if self.error:
                raise self.error
            self.num_pages += 1
            yield page, np.zeros(64, np.uint8)


def prefill(ticket, num_pages):
    targets = (TargetRun(0, num_pages, 0, 0),)
    transfer = transfer_to_wire(Transfer(ticket, ticket, num_pages * 64 - 10, targets))
    return pb.ToPrefill(
        prefill=pb.PrefillRequest(transfer=transfer, token_ids=[1] * (num_pages * 64 - 10))
    )


PREFILL_SHUTDOWN = pb.ToPrefill(shutdown=pb.Shutdown(reason="enough"))


@pytest.fixture
def writer(ring):
    writer = PageRingWriter(Segments(CLUSTER_ID), 0, LIMITS)
    yield writer
    writer.close()


@contextlib.contextmanager
def running(link, model, writer, limits=PATIENT):
    """A prefill at work, told to leave at the end."""

    def loop():
        with pytest.raises(Left), contextlib.closing(TokenStreams(0, limits)) as streams:
            PrefillLoop(model, link, [writer], streams, limits).run()

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(loop)
        try:
            yield
        finally:
            link.inbox.put(PREFILL_SHUTDOWN)
        done.result(WAIT_S)


def until(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def test_pages_go_out_with_their_lengths(ring, writer):
    link = Link(prefill(1, 2))
    with running(link, Model(), writer):
        seen = []
        until(
            lambda: (
                seen.extend((page.ticket, page.page, page.num_tokens) for page in ring.arrived())
                or len(seen) == 2
            )
        )
    assert seen == [(1, 0, 64), (1, 1, 54)]


def test_a_cancelled_ticket_stops_waiting_for_a_full_ring_and_the_next_is_served(ring, writer):
    link = Link(prefill(1, 9), prefill(2, 1), prefill(3, 1))
    model = Model()
    with running(link, model, writer):
        until(lambda: model.num_pages == 3)
        link.inbox.put(pb.ToPrefill(cancel=2))
        link.inbox.put(pb.ToPrefill(cancel=1))
        link.inbox.put(pb.ToPrefill(cancel=99))
        until(link.inbox.empty)
        tickets = []
        until(lambda: tickets.extend(page.ticket for page in ring.arrived()) or 3 in tickets)
    assert tickets == [1, 1, 3]
    assert link.sent == []


def test_a_prefill_that_fails_gives_up_its_ticket_only(ring, writer):
    model = Model(ValueError("the prompt is cursed"))
    link = Link(prefill(1, 1))
    with running(link, model, writer):
        until(lambda: link.sent)
        model.error = None
        link.inbox.put(prefill(2, 1))
        until(lambda: [page.ticket for page in ring.arrived()] == [2])
    assert [(message.failed.ticket, message.failed.message) for message in link.sent] == [
        (1, "prefill failed: the prompt is cursed")
    ]


def test_a_ring_that_nobody_empties_gives_up_in_a_bounded_time(ring, writer):
    link = Link(prefill(1, 9))
    with running(link, Model(), writer, LIMITS):
        until(lambda: link.sent)
    assert "ExchangeTimeout" in link.sent[0].failed.message


def test_the_prefills_queue_has_a_limit(ring, writer, monkeypatch):
    monkeypatch.setattr(prefill_runner, "MAX_QUEUED_PROMPTS", 2)
    loop = PrefillLoop(Model(), link := Link(), [writer], TokenStreams(0, LIMITS), LIMITS)
    for ticket in range(4):
        loop._take(prefill(ticket, 1))
    assert [message.failed.ticket for message in link.sent] == [2, 3]


# --- links and token streams ---


@pytest.fixture
def free_port():
    """Nobody listens on it and nobody else can take it, but a gRPC server of this test."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def test_a_controller_that_does_not_answer_is_named(free_port):
    address = f"127.0.0.1:{free_port}"
    with pytest.raises(
        ControllerLost, match=f"no controller answered at {address} within start_timeout_ms"
    ):
        ControllerLink(address, LIMITS)


class Sink(rpc.TokenSinkServicer):
    """A front end."""

    def __init__(self):
        self.tokens = []
        self.prompts = []
        self.ended = threading.Event()

    def Deliver(self, batches, context):
        for batch in batches:
            self.tokens += [(batch.instance, item.request_id, item.index) for item in batch.tokens]
            self.prompts += [
                (prompt.request_id, prompt.first, item.logprob, list(item.top_token_ids))
                for prompt in batch.prompts
                for item in prompt.logprobs
            ]
        self.ended.set()
        return pb.DeliverResponse()


def serve(sink, port=0):
    server = grpc.server(ThreadPoolExecutor(2))
    rpc.add_TokenSinkServicer_to_server(sink, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    return server, f"127.0.0.1:{port}"


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


def test_a_prompts_logprobs_go_to_the_front_end_that_asked(ring, writer, free_port):
    sink = Sink()
    server, address = serve(sink)
    link = Link(prefill(1, 1), prefill(2, 1))
    for message, front_end in zip(
        link.inbox.queue, (address, f"127.0.0.1:{free_port}"), strict=True
    ):
        message.prefill.token_ids[:] = range(55)
        message.prefill.prompt_logprobs = 4
        message.prefill.front_end = front_end
    with running(link, Model(), writer):
        pages = []

        def has_come(page):
            pages.extend((page.ticket, page.page) for page in ring.arrived())
            return page in pages

        until(lambda: has_come((1, 0)))
        until(lambda: len(sink.prompts) == 54)
        # One that nobody takes costs its request only, if it is seen in time.
        until(lambda: link.sent or has_come((2, 0)))
    assert sink.prompts == [(1, position, -position, [4]) for position in range(1, 55)]
    assert sink.ended.wait(WAIT_S)
    server.stop(0)


def test_a_front_end_that_takes_no_logprobs_costs_the_ticket(ring, writer, monkeypatch, free_port):
    monkeypatch.setattr("data_plane.member.token_streams._MAX_BATCHES", 3)
    link = Link(prefill(1, 1))
    (message,) = link.inbox.queue
    message.prefill.prompt_logprobs = 0
    message.prefill.front_end = f"127.0.0.1:{free_port}"
    with running(link, Model(), writer):
        until(lambda: link.sent)
    assert "does not take the prompt's log probabilities" in link.sent[0].failed.message


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
    began = time.monotonic()
    while not (lost := streams.send([token(address, 9, 0)])):
        assert time.monotonic() - began < WAIT_S
    assert lost == {7, 8, 9}
    streams.close()
