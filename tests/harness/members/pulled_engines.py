"""Engines whose memory is read, without NIXL, and notes of what they are told."""

import contextlib
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from data_plane.kv.page_ring import PageRing
from data_plane.member.lifetime import ShutdownRequested
from data_plane.prefill.pull import puller
from data_plane.prefill.pull.puller import PullerLoop
from data_plane.transport.exchange import Term
from data_plane.transport.segments import Segments
from harness.members.member_fakes import CLUSTER_ID, LIMITS
from harness.waits import WAIT_S, until
from nanocp.values.commands import Join, PrefillRequest, Shutdown
from nanocp.values.members import BlocksRefused, EnginesNow, Envelope
from nanocp.values.plan import TargetRun, Transfer, TransferFailed
from nanocp.values.remote_blocks import RemoteBlocks

PAGE_BYTES = 64
LEASE_S = 30
PATIENT = replace(LIMITS, exchange_timeout_ms=60_000)
URL = "127.0.0.1:5600"
EXPIRED = f"prefill failed: {URL}: {puller._EXPIRED}"


def blocks(name, engine="engine", generation=None, num_tokens=200):
    """A prompt at an engine; with generation: at one that counts its registrations."""
    ids = tuple(range(num_tokens // 16 + 1))
    return RemoteBlocks(engine, name, ids, "127.0.0.1", 5600, 1, num_tokens, generation=generation)


def payload_of(name, page):
    """The page's bytes, which differ between prompts."""
    return np.full(PAGE_BYTES, (sum(name.encode()) + page) % 251, np.uint8)


class Engine:
    """A vLLM server: hands are shaken with `reader`, and `told` has each notification."""

    def __init__(self):
        self.is_up = True
        self.refusal = ""
        """Why no request can be read."""
        self.bad_blocks = {}
        """Name of a prompt -> why it cannot be read."""
        self.failure = None
        """Raised by each read."""
        self.through = iter
        """A filter of the pages of each read."""
        self.told = []
        self.num_meetings = 0
        self.num_closed = self.num_unreached = 0
        self.reads = Counter()
        """Name -> pages read."""
        self.may_read = threading.Event()
        self.may_read.set()
        self.may_meet = threading.Event()
        self.may_meet.set()

    def meet(self, blocks):
        self.num_meetings += 1
        assert self.may_meet.wait(WAIT_S)
        if self.refusal:
            raise ValueError(self.refusal)
        self.require_up()
        return Remote(self, blocks.generation)

    def close(self):
        """The process ends."""

    def require_up(self):
        if not self.is_up:
            self.num_unreached += 1
            raise ConnectionError("127.0.0.1:5600 does not answer")

    def freed(self):
        """Prompts whose blocks are free, in order."""
        return [text.removesuffix(":1") for text in list(self.told) if text.endswith(":1")]

    def beats(self):
        """The prompts of each heartbeat."""
        return [text[3:].split(",") for text in list(self.told) if text.startswith("HB:")]


class Remote:
    """The engine as one handshake found it."""

    def __init__(self, engine, generation):
        self.engine, self.generation = engine, generation

    def check(self, blocks):
        if problem := self.engine.bad_blocks.get(blocks.request_id):
            raise ValueError(problem)

    def notify(self, text):
        self.engine.require_up()
        self.engine.told.append(text)

    def pages(self, *arguments):
        yield from self.engine.through(self._pages(*arguments))

    def _pages(self, blocks, token_ids, num_tokens, wanted, obstacle):
        assert len(token_ids) == num_tokens <= blocks.num_tokens
        for page in wanted:
            while (problem := obstacle()) or not self.engine.may_read.is_set():
                if problem:
                    raise RuntimeError(problem)
                time.sleep(0.005)
            self.engine.require_up()
            if self.engine.failure:
                raise self.engine.failure
            assert blocks.request_id not in self.engine.freed(), "it may be another prompt's"
            self.engine.reads[blocks.request_id] += 1
            yield page, min(64, num_tokens - 64 * page), payload_of(blocks.request_id, page)

    def close(self):
        self.engine.num_closed += 1


class Clock:
    """The time, and how far a test has put it forward."""

    forward_s = 0.0

    def __call__(self):
        return time.monotonic() + self.forward_s


def rings(num_instances=2, ring_pages=8, term=1):
    """The instances' rings in a term."""
    segments = Segments(CLUSTER_ID, term=Term(term))
    return [
        PageRing.create(segments, instance, ring_pages, PAGE_BYTES, "pull")
        for instance in range(num_instances)
    ]


def taken(ring):
    """The pages that are in a ring now: (ticket, page, tokens, first byte)."""
    return [(a.ticket, a.page, a.num_tokens, int(a.payload[0])) for a in ring.arrived()]


@contextlib.contextmanager
def pulling(link, engine, limits, clock=time.monotonic, lease_s=LEASE_S):
    """A puller in term 1, until a shutdown."""
    segments = Segments(CLUSTER_ID, term=Term(0))
    loop = PullerLoop(link, engine, segments, limits, lease_s, clock)

    def run():
        with pytest.raises(ShutdownRequested):
            loop.run()

    with ThreadPoolExecutor(1) as pool, contextlib.closing(loop):
        done = pool.submit(run)
        link.inbox.put(Envelope(Join(), 1))
        try:
            yield loop
        finally:
            link.inbox.put(Envelope(Shutdown("enough")))
            done.result(WAIT_S)


def say(link, *messages, term=1):
    for message in messages:
        link.inbox.put(Envelope(message, term))


def prefill(ticket, request_id=1, num_tokens=150):
    """Ask for pages 0 and 1 at instance 0, and for page 2 at instance 1."""
    targets = TargetRun(0, 2, 0, 0), TargetRun(2, 1, 1, 0)
    return PrefillRequest(Transfer(ticket, request_id, num_tokens, targets), [7] * (num_tokens + 1))


def reports(link, kind):
    return [sent.message for sent in list(link.sent) if isinstance(sent.message, kind)]


def failures(link):
    return [(each.ticket, each.message) for each in reports(link, TransferFailed)]


def refusals(link):
    return [(each.request_id, each.message) for each in reports(link, BlocksRefused)]


def now_of(link):
    """The engine's state in the latest report."""
    states = reports(link, EnginesNow)
    return states[-1].engines[0] if states and states[-1].engines else None


def expected(name, ticket):
    sums = [int(payload_of(name, page)[0]) for page in range(3)]
    return [(ticket, 0, 64, sums[0]), (ticket, 1, 64, sums[1])], [(ticket, 2, 22, sums[2])]


def assert_arrives(both, name, ticket):
    found = [], []

    def all_here():
        for pages, ring in zip(found, both, strict=True):
            pages += taken(ring)
        return sum(map(len, found)) == 3

    until(all_here)
    assert found == expected(name, ticket)


ENGINE = Engine()


def reader(config, checkpoint, progress):
    """The reader of a puller that is run by its MemberSpec: one of ENGINE."""
    return ENGINE
