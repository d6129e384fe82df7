"""The loop around the prefill, with a scripted controller and a scripted model."""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from data_plane.kv.page_ring import PageRing
from data_plane.member import prefill_runner
from data_plane.member.lifetime import ShutdownRequested
from data_plane.member.prefill_runner import PrefillLoop
from data_plane.member.token_streams import TokenStreams
from data_plane.transport.exchange import Term
from data_plane.transport.segments import Segments
from harness.member_fakes import CLUSTER_ID, LIMITS, WAIT_S, Link, Sink, serve, until
from nanocp.plan import TargetRun, Transfer
from nanocp.sampling import TokenLogprobs
from nanocp.wire.convert import transfer_to_wire
from nanocp.wire.v1 import cluster_pb2 as pb

PATIENT = replace(LIMITS, exchange_timeout_ms=30_000)
JOIN = pb.ToPrefill(term=1, join=pb.Join())
PREFILL_SHUTDOWN = pb.ToPrefill(shutdown=pb.Shutdown(reason="enough"))


class Model:
    """A model whose pages are zeros."""

    def __init__(self, error=None):
        self.error = error
        self.num_pages = 0

    def pages(self, token_ids, num_tokens, prompt_logprobs=None):
        if prompt_logprobs is not None:
            for token_id in token_ids[1 : num_tokens + 1]:
                prompt_logprobs.report(
                    [TokenLogprobs(-token_id, ((prompt_logprobs.num_top, -0.5),))]
                )
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


def prefill_loop(model, link, streams, limits=LIMITS):
    return PrefillLoop(model, link, Segments(CLUSTER_ID), 1, streams, limits)


def reports(link):
    """What the prefill sent, but for being ready."""
    return [message for message in link.sent if message.WhichOneof("message") != "ready"]


@contextlib.contextmanager
def running(link, model, limits=PATIENT):
    """Run a prefill, which is asked to shut down at the end."""

    def loop():
        with (
            pytest.raises(ShutdownRequested),
            contextlib.closing(TokenStreams(0, limits)) as streams,
            contextlib.closing(prefill_loop(model, link, streams, limits)) as loop,
        ):
            loop.run()

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(loop)
        try:
            yield
        finally:
            link.inbox.put(PREFILL_SHUTDOWN)
        done.result(WAIT_S)


def test_pages_go_out_with_their_lengths(ring):
    link = Link(JOIN, prefill(1, 2))
    with running(link, Model()):
        seen = []
        until(
            lambda: (
                seen.extend((page.ticket, page.page, page.num_tokens) for page in ring.arrived())
                or len(seen) == 2
            )
        )
    assert seen == [(1, 0, 64), (1, 1, 54)]


def test_a_cancelled_ticket_stops_waiting_for_a_full_ring_and_the_next_is_served(ring):
    link = Link(JOIN, prefill(1, 9), prefill(2, 1), prefill(3, 1))
    model = Model()
    with running(link, model):
        until(lambda: model.num_pages == 3)
        link.inbox.put(pb.ToPrefill(cancel=2))
        link.inbox.put(pb.ToPrefill(cancel=1))
        link.inbox.put(pb.ToPrefill(cancel=99))
        until(link.inbox.empty)
        tickets = []
        until(lambda: tickets.extend(page.ticket for page in ring.arrived()) or 3 in tickets)
    assert tickets == [1, 1, 3]
    assert reports(link) == []


def test_a_prefill_that_fails_gives_up_its_ticket_only(ring):
    model = Model(ValueError("the prompt is cursed"))
    link = Link(JOIN, prefill(1, 1))
    with running(link, model):
        until(lambda: reports(link))
        model.error = None
        link.inbox.put(prefill(2, 1))
        until(lambda: [page.ticket for page in ring.arrived()] == [2])
    assert [(message.failed.ticket, message.failed.message) for message in reports(link)] == [
        (1, "prefill failed: the prompt is cursed")
    ]


def test_a_ring_that_nobody_empties_is_reported_in_a_bounded_time(ring):
    link = Link(JOIN, prefill(1, 9))
    with running(link, Model(), LIMITS):
        until(lambda: reports(link))
    suspect = reports(link)[0].suspect
    assert (suspect.instance, suspect.is_gone) == (0, False)
    assert "ExchangeTimeout" in suspect.message


def test_the_prefills_queue_has_a_limit(ring, monkeypatch):
    monkeypatch.setattr(prefill_runner, "MAX_QUEUED_PROMPTS", 2)
    loop = prefill_loop(Model(), link := Link(), TokenStreams(0, LIMITS))
    for ticket in range(4):
        loop._take(prefill(ticket, 1))
    assert [message.failed.ticket for message in reports(link)] == [2, 3]


def test_a_prompts_logprobs_go_to_the_front_end_that_asked(ring, free_port):
    sink = Sink()
    server, address = serve(sink)
    link = Link(JOIN, prefill(1, 1), prefill(2, 1))
    for message, front_end in zip(
        list(link.inbox.queue)[1:], (address, f"127.0.0.1:{free_port}"), strict=True
    ):
        message.prefill.token_ids[:] = range(55)
        message.prefill.prompt_logprobs = 4
        message.prefill.front_end = front_end
    with running(link, Model()):
        pages = []

        def has_come(page):
            pages.extend((page.ticket, page.page) for page in ring.arrived())
            return page in pages

        until(lambda: has_come((1, 0)))
        until(lambda: len(sink.prompts) == 54)
        # A front end that takes nothing costs only its own request, if that is noticed in time.
        until(lambda: reports(link) or has_come((2, 0)))
    assert sink.prompts == [(1, position, -position, [4]) for position in range(1, 55)]
    assert sink.ended.wait(WAIT_S)
    server.stop(0)


def test_a_front_end_that_takes_no_logprobs_costs_the_ticket(ring, monkeypatch, free_port):
    monkeypatch.setattr("data_plane.member.token_streams._MAX_BATCHES", 3)
    link = Link(JOIN, prefill(1, 1))
    _, message = link.inbox.queue
    message.prefill.prompt_logprobs = 0
    message.prefill.front_end = f"127.0.0.1:{free_port}"
    with running(link, Model()):
        until(lambda: reports(link))
    assert "does not take the prompt's log probabilities" in reports(link)[0].failed.message


def test_a_new_term_forgets_every_ticket_and_writes_into_rings_of_its_own(ring):
    link = Link(JOIN, prefill(1, 9), prefill(2, 1))
    model = Model()
    with running(link, model):
        until(lambda: model.num_pages == 3)  # the ring of two is full
        segments = Segments(CLUSTER_ID, term=Term(4))
        with contextlib.closing(PageRing.create(segments, 0, 2, 64)) as ring_of_4:
            link.inbox.put(pb.ToPrefill(term=4, join=pb.Join()))
            link.inbox.put(prefill(3, 1))
            until(lambda: [page.ticket for page in ring_of_4.arrived()] == [3])
    assert [page.ticket for page in ring.arrived()] == [1, 1]
    assert [message.term for message in link.sent] == [1, 4] and reports(link) == []


def test_a_term_that_ends_while_the_prefill_joins_it_is_left(ring):
    link = Link(pb.ToPrefill(term=7, join=pb.Join()))
    with contextlib.closing(TokenStreams(0, PATIENT)) as streams:
        loop = prefill_loop(Model(), link, streams, PATIENT)
        loop._segments.term.end(7)
        link.inbox.put(PREFILL_SHUTDOWN)
        with pytest.raises(ShutdownRequested):
            loop.run()
    assert link.sent == []
