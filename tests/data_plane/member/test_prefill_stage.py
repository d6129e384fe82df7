"""A prefill of one stage, with a scripted controller and a scripted stage."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
import pytest

from data_plane.instance.stage_edge import StageEdge
from data_plane.kv.page_ring import PageRing
from data_plane.member.lifetime import MemberSpec, ShutdownRequested
from data_plane.member.token_streams import TokenStreams
from data_plane.prefill.prefill_stage import PrefillEnds, PrefillStageLoop, StageEnd
from data_plane.prefill.stage_messages import (
    BeginPrompt,
    JoinTerm,
    StageGaveUp,
    StageRan,
    StageSpec,
)
from data_plane.prefill.staged_prefill import StagedPrefillLoop
from data_plane.transport.exchange import Term
from data_plane.transport.segments import Segments
from harness.hash_clusters.hash_model import HashModel
from harness.hash_clusters.pipeline.hash_stage import HashStageModel
from harness.members.member_fakes import CLUSTER_ID, LIMITS, Link, Sink, serve
from harness.members.staged_prefill import prefill_scheduler
from harness.transports.local_pages import local_peer_rings
from harness.transports.local_stage_links import LocalStageLinks
from harness.waits import WAIT_S, until
from nanocp.config.cluster import ClusterConfig
from nanocp.config.pipeline import PipelineConfig
from nanocp.config.prefill import PrefillConfig
from nanocp.config.whole import Config
from nanocp.values.commands import CancelPrefill, Join, PrefillRequest, Shutdown
from nanocp.values.members import Envelope, Ready
from nanocp.values.offload import page_hashes
from nanocp.values.passes import PassDone
from nanocp.values.plan import Arrival, TargetRun, Transfer, TransferFailed
from nanocp.values.sampling import TokenLogprobs

PATIENT = replace(LIMITS, exchange_timeout_ms=30_000)
JOIN = Envelope(Join(), 1)
PREFILL_SHUTDOWN = Envelope(Shutdown("enough"))


class Model:
    """A stage whose pages are zeros."""

    def __init__(self, error=None):
        self.stage = self.requests = self
        self.error = error
        self.num_pages = 0
        self.asked = {}

    def take_prompt(self, request_id, token_ids):
        """Tokens are of no use here."""

    def ask_logprobs(self, request_id, token_ids, wanted):
        self.asked[request_id] = token_ids, wanted

    def run(self, plan):
        if self.error:
            raise self.error
        for request_id, first, num_tokens, _ in plan.spans:
            ids, wanted = self.asked.get(request_id, ((), None))
            for token_id in ids[first + 1 : first + num_tokens + 1]:
                wanted.report([TokenLogprobs(-token_id, ((wanted.num_top, -0.5),))])
        return ()

    def part(self, ticket, page):
        self.num_pages += 1
        return 0, np.zeros(64, np.uint8)

    def poll(self):
        """There is nothing to report."""

    def skip(self, plan):
        """There are no tokens."""


def prefill(ticket, num_pages, num_top=None, front_end=""):
    """Ask for a prompt. num_top: for log probabilities of it too, which need an id more."""
    num_tokens = num_pages * 64 - 10
    transfer = Transfer(ticket, ticket, num_tokens, (TargetRun(0, num_pages, 0, 0),))
    token_ids = [1] * num_tokens if num_top is None else range(num_tokens + 1)
    return Envelope(PrefillRequest(transfer, token_ids, num_top, front_end))


def reports(link):
    """What the prefill sent, but for being ready."""
    return [each.message for each in link.sent if not isinstance(each.message, Ready)]


class StageOf:
    """The stage of a prefill, in a thread: `loop`."""

    def __init__(self, prefill, model, config, streams):
        self.inbox = SimpleQueue()
        spec = StageSpec(MemberSpec("", config, CLUSTER_ID, "", "", Path()), 0, "unused")
        end = StageEnd(self.inbox.get, lambda message: prefill.report(0, message))
        self.loop = PrefillStageLoop(model, spec, end, Segments(CLUSTER_ID), streams)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def send(self, message, stage=None):
        self.inbox.put(message)

    def close(self):
        self.send(None)
        self.thread.join(WAIT_S)
        self.loop.close()

    def _run(self):
        with contextlib.suppress(PrefillEnds):
            self.loop.run()


@contextlib.contextmanager
def running(link, model, limits=PATIENT):
    """Run a prefill, which is asked to shut down at the end; yields its stage."""
    cluster = ClusterConfig(num_instances=1, num_frames=20, max_model_len=1024)
    config = Config(cluster=cluster, limits=limits)
    loop = StagedPrefillLoop(prefill_scheduler(config), link, 1, 60_000.0, lambda: None)

    def run():
        with pytest.raises(ShutdownRequested):
            loop.run()

    with (
        ThreadPoolExecutor(1) as pool,
        contextlib.closing(TokenStreams(0, limits)) as streams,
        contextlib.closing(StageOf(loop, model, config, streams)) as loop.stages,
    ):
        done = pool.submit(run)
        try:
            yield loop.stages.loop
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
    with running(link, model) as stage:
        until(lambda: model.num_pages == 3)
        link.inbox.put(Envelope(CancelPrefill(2)))
        link.inbox.put(Envelope(CancelPrefill(1)))
        link.inbox.put(Envelope(CancelPrefill(99)))
        until(lambda: list(stage._tickets) == [3])
        tickets = []
        until(lambda: tickets.extend(page.ticket for page in ring.arrived()) or 3 in tickets)
    assert tickets == [1, 1, 3]
    assert reports(link) == []


def test_a_pass_that_fails_costs_its_prompts_only(ring):
    model = Model(ValueError("the prompt is cursed"))
    link = Link(JOIN, prefill(1, 1))
    with running(link, model):
        until(lambda: reports(link))
        model.error = None
        link.inbox.put(prefill(2, 1))
        until(lambda: [page.ticket for page in ring.arrived()] == [2])
    assert reports(link) == [TransferFailed(1, "prefill failed: the prompt is cursed")]


def test_a_page_that_cannot_be_sent_costs_its_prompt_only(ring):
    class NoMemory(Model):
        def part(self, ticket, page):
            if ticket == 1:
                raise MemoryError("no memory for the page")
            return super().part(ticket, page)

    link = Link(JOIN, prefill(1, 1), prefill(2, 1))
    with running(link, NoMemory()):
        until(lambda: [page.ticket for page in ring.arrived()] == [2])
        until(lambda: reports(link))
    (failure,) = reports(link)
    assert failure.ticket == 1 and "no memory for the page" in failure.message


class Cursed(HashStageModel):
    """It cannot run the first pass of prompt 1."""

    def run_layer(self, layer, place, spans, rows):
        if spans[0][0][:2] == (1, 0):
            raise ValueError("the prompt is cursed")
        return super().run_layer(layer, place, spans, rows)


class PagesOf(NamedTuple):
    """A stage whose pages have no content."""

    stage: StageEdge

    def part(self, ticket, page):
        return 0, np.zeros(64, np.uint8)


class Reports(list):
    """What the stage says."""

    def report(self, stage, message):
        self.append(message)


@contextlib.contextmanager
def cursed_stage():
    """Yields a real stage of the prefill, what it reports, and a function that plans a pass."""
    cluster = ClusterConfig(num_instances=1, num_frames=20, max_model_len=1024)
    config = Config(cluster=cluster, limits=PATIENT, prefill=PrefillConfig(chunk_tokens=320))
    scheduler, pipeline = prefill_scheduler(config), PipelineConfig(num_stages=1, num_layers=2)
    (links,), (mover,) = LocalStageLinks.create_all(1), local_peer_rings(1)
    cursed = Cursed(pipeline, 32, HashModel(2))
    model = PagesOf(StageEdge(0, pipeline, 32, cursed, links, mover))
    reports = Reports()
    with (
        contextlib.closing(TokenStreams(0, PATIENT)) as streams,
        contextlib.closing(StageOf(reports, model, config, streams)) as stage,
    ):
        stage.send(JoinTerm(1, ()))

        def plan(*events):
            found = scheduler.plan_pass(events, 0).pass_plan
            for arrival in (each for each in events if isinstance(each, Arrival)):
                ticket, num_tokens = arrival.request_id, arrival.prompt_len
                transfer = Transfer(ticket, ticket, num_tokens, (TargetRun(0, 1, 0, 0),))
                stage.send(BeginPrompt(transfer, (7,) * num_tokens))
            return found

        yield stage, reports, plan


def test_a_pass_that_fails_costs_no_prompt_of_a_later_pass(ring):
    """Passes that were planned before hold more of the failed prompt, alone and beside others."""
    with cursed_stage() as (stage, reports, plan):
        passes = [
            plan(Arrival(1, 758, 1)),
            plan(),
            plan(PassDone(0), Arrival(2, 30, 1), Arrival(3, 30, 1)),
        ]
        assert [[span[0] for span in each.spans] for each in passes] == [[1], [1], [1, 2, 3]]
        for each in passes:
            stage.send(each)
        until(lambda: StageRan(2) in reports)
        assert [page.ticket for page in ring.arrived()] == [2, 3]
        stage.send(plan(PassDone(1), PassDone(2), Arrival(4, 30, 1)))
        until(lambda: StageRan(3) in reports)
    assert not stage.loop._failed
    assert [each for each in reports if isinstance(each, StageGaveUp)] == [
        StageGaveUp(1, "the prompt is cursed")
    ]


def test_a_prompt_that_shares_pages_of_a_pass_that_fails_fails_too(ring):
    """It was planned before the failure was known; the next one is computed."""
    hashes = page_hashes([7] * 200)
    with cursed_stage() as (stage, reports, plan):
        passes = [
            plan(Arrival(1, 200, 1, page_hashes=hashes)),
            plan(Arrival(2, 200, 1, page_hashes=hashes)),
        ]
        assert [span[:3] for each in passes for span in each.spans] == [(1, 0, 200), (2, 192, 8)]
        for each in passes:
            stage.send(each)
        until(lambda: StageRan(1, has_failed=True) in reports)
        stage.send(plan(PassDone(0), PassDone(1), Arrival(3, 30, 1)))
        until(lambda: StageRan(2) in reports)
        assert [page.ticket for page in ring.arrived()] == [3]
    gave_up = [each for each in reports if isinstance(each, StageGaveUp)]
    assert [each.ticket for each in gave_up] == [1, 2]
    assert StageRan(0, has_failed=True) in reports and "filled with" in gave_up[1].message


def test_a_pass_for_another_page_table_ends_the_only_stage_too(ring):
    with cursed_stage() as (stage, _, plan):
        plan(Arrival(1, 758, 1))
        with pytest.raises(RuntimeError, match="planned for another page table"):
            stage.loop._run(plan())


def test_a_ring_that_nobody_empties_is_reported_in_a_bounded_time(ring):
    link = Link(JOIN, prefill(1, 9))
    with running(link, Model(), LIMITS):
        until(lambda: reports(link))
    suspect = reports(link)[0]
    assert (suspect.instance, suspect.is_gone) == (0, False)
    assert "ExchangeTimeout" in suspect.message


def test_a_prompts_logprobs_go_to_the_front_end_that_asked(ring, free_port):
    sink = Sink()
    server, address = serve(sink)
    nobody = f"127.0.0.1:{free_port}"
    link = Link(JOIN, prefill(1, 1, 4, address), prefill(2, 1, 4, nobody))
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
    link = Link(JOIN, prefill(1, 1, 0, f"127.0.0.1:{free_port}"))
    with running(link, Model()):
        until(lambda: reports(link))
    assert "does not take the prompt's log probabilities" in reports(link)[0].message


def test_a_new_term_forgets_every_ticket_and_writes_into_rings_of_its_own(ring):
    link = Link(JOIN, prefill(1, 9), prefill(2, 1))
    model = Model()
    with running(link, model):
        until(lambda: model.num_pages == 3)  # the ring of two is full
        segments = Segments(CLUSTER_ID, term=Term(4))
        with contextlib.closing(PageRing.create(segments, 0, 2, 64)) as ring_of_4:
            link.inbox.put(Envelope(Join(), 4))
            link.inbox.put(prefill(3, 1))
            until(lambda: [page.ticket for page in ring_of_4.arrived()] == [3])
    assert [page.ticket for page in ring.arrived()] == [1, 1]
    assert [message.term for message in link.sent] == [1, 4] and reports(link) == []


def test_a_term_that_ends_while_a_stage_joins_it_is_left(ring):
    link = Link()
    with running(link, Model()) as stage:
        stage._segments.term.end(7)
        stage._inbox.put(JoinTerm(7, ()))
        until(lambda: stage._segments.term.number == 7)
    assert link.sent == []
