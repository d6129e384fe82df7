"""The prefill with real stages in threads, instances that take its pages, and their judge."""

import contextlib
import threading
from dataclasses import replace
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest
import torch

from data_plane.instance.page_transfers import AppliedTable, PageTransfers
from data_plane.kv.frame_pool import FramePool
from data_plane.member.lifetime import MemberSpec, ShutdownRequested
from data_plane.member.token_streams import TokenStreams
from data_plane.model.weights import load_weights
from data_plane.prefill import prefill_stage
from data_plane.prefill.build import build_prefill_stage
from data_plane.prefill.prefill_stage import PrefillEnds, PrefillStageLoop
from data_plane.prefill.stage_messages import StageSpec
from data_plane.prefill.staged_prefill import StagedPrefillLoop, StageThread
from data_plane.startup.shared_parts import new_carry, page_ways
from data_plane.transport.exchange import Term
from data_plane.transport.segments import Segments
from harness.exact.reference_prefill import prefill_pages
from harness.members.member_fakes import CLUSTER_ID, LIMITS, Link
from harness.paths import ROOT
from nanocp.config.cluster import ClusterConfig
from nanocp.config.data_plane import DataPlaneConfig
from nanocp.config.prefill import PrefillConfig
from nanocp.config.whole import Config
from nanocp.serve.prefill_scheduler import make_prefill_scheduler
from nanocp.serve.served import PREFILL_FACTORY
from nanocp.values.commands import Join, PrefillRequest, Shutdown
from nanocp.values.members import Beat, Envelope
from nanocp.values.plan import PAGE_SIZE, Transfer

PATIENT = replace(LIMITS, exchange_timeout_ms=30_000, start_timeout_ms=30_000)
CONFIG = Config(
    cluster=ClusterConfig(num_instances=2, num_frames=20, max_model_len=512),
    data_plane=DataPlaneConfig(cpu_kernels="torch"),
    prefill=PrefillConfig(stages=2, chunk_tokens=100, ring_pages=2),
    limits=PATIENT,
)
TALE = ROOT / "models/tale"


def join(term):
    return Envelope(Join(), term)


def prefill(ids, *targets, ticket):
    transfer = Transfer(ticket, ticket, len(ids), targets)
    return transfer, Envelope(PrefillRequest(transfer, ids))


class Receiver(PageTransfers):
    """An instance as far as pages go."""

    def __init__(self, instance, term, model, config):
        self.frames = FramePool(model.num_kept_layers, 20, model.attention.kv_width, torch.float32)
        self.frames.carry = new_carry(config, model, 1)
        segments = Segments(CLUSTER_ID, term=Term(term))
        ways = page_ways(config, instance, segments, self.frames)
        super().__init__(AppliedTable(instance, 2), self, [], *ways)

    def make(self, transfer):
        return False

    def write(self, frame, num_tokens, payload, offset):
        if frame < 20:
            self.frames.write_payload(frame, num_tokens, payload, offset)
        else:
            self.frames.carry.page(0, frame - 20)[offset : offset + len(payload)] = payload

    def has(self, event):
        self.copy_arrived_pages()
        return event in self._events


def _must_not_end(status):
    raise AssertionError("a stage has lost the prefill's process, and would end this one")


# These stages are threads: theirs is the process of the tests.
prefill_stage.os = SimpleNamespace(_exit=_must_not_end)


class Threads:
    """The stages, each in a thread of this process."""

    def __init__(self, checkpoint, loop, config):
        member = MemberSpec("", config, CLUSTER_ID, "", "", checkpoint)
        self.pipes, self.threads, self.loops = [], [], []
        for stage in range(config.prefill.stages):
            own, theirs = Pipe()
            spec = StageSpec(member, stage, f"{CLUSTER_ID}.links")
            built = build_prefill_stage(config, stage, Segments(spec.links_id), checkpoint)
            streams = TokenStreams(0, CONFIG.limits)
            self.loops.append(PrefillStageLoop(built, spec, theirs, Segments(CLUSTER_ID), streams))
            self.pipes.append(own)
            reader = threading.Thread(target=self._read, args=(stage, own, loop), daemon=True)
            reader.start()
        for each in self.loops:
            each._built.stage.connect()
            self.threads.append(threading.Thread(target=self._run, args=(each,), daemon=True))
            self.threads[-1].start()

    def send(self, message, stage=None):
        for pipe in self.pipes if stage is None else [self.pipes[stage]]:
            pipe.send(message)

    def close(self):
        self.send(None)
        for thread, loop in zip(self.threads, self.loops, strict=True):
            thread.join(30)
            loop.close()
            loop._built.stage.close()
            loop._streams.close()

    def _read(self, stage, pipe, loop):
        with contextlib.suppress(EOFError, OSError):
            while True:
                loop.report(stage, pipe.recv())

    def _run(self, loop):
        with contextlib.suppress(PrefillEnds):
            loop.run()


def prefill_scheduler(config):
    own = config.of_prefill_stages
    return make_prefill_scheduler(own.cluster, own.scheduler, own.pipeline)


@contextlib.contextmanager
def staged(checkpoint, link, config):
    """The loop of the prefill with its stages, which is asked to shut down at the end."""
    num_stages = config.prefill.stages
    scheduler = prefill_scheduler(config)
    loop = StagedPrefillLoop(scheduler, link, num_stages, 60_000.0, lambda: None)
    if num_stages > 1:
        loop.stages = Threads(checkpoint, loop, config)
    else:
        member = MemberSpec(PREFILL_FACTORY, config, CLUSTER_ID, "", "", checkpoint)
        loop.stages = StageThread(member, loop.report)
    errors = []

    def run():
        try:
            loop.run()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        link.inbox.put(Envelope(Shutdown("enough")))
        thread.join(30)
        loop.stages.close()
    assert [type(error) for error in errors] == [ShutdownRequested], errors


def assert_kv(checkpoint, model, receiver, ids, frame_of, next_ids=(), carry=None):
    """The receiver has these pages of the prompt, as the reference computes them."""
    weights = load_weights(checkpoint, model, torch.float32, range(model.num_experts))
    all_ids = [*ids, *next_ids]
    for page, kv_LSW in prefill_pages(weights, model, all_ids, len(ids), 512, carry=carry):
        if page in frame_of:
            count = min(PAGE_SIZE, len(ids) - page * PAGE_SIZE)
            found = receiver.frames.layers[:, frame_of[page], :count]
            torch.testing.assert_close(found, kv_LSW[:, :count], atol=1e-4, rtol=0)


class Recorder:
    """Stages that do nothing; it records what they are sent."""

    def __init__(self):
        self.sent = []

    def send(self, message, stage=None):
        self.sent.append((stage, message))


def scripted(tiny_checkpoint, *messages, limit_ms=60_000.0):
    """A loop with stages that do nothing; it runs until it would wait."""
    link = Link(*messages)
    loop = StagedPrefillLoop(
        prefill_scheduler(CONFIG), link, 2, limit_ms, lambda: link.send(Beat())
    )
    loop.stages = Recorder()
    return loop, link


def run_to_the_end(loop, link):
    link.inbox.put(Envelope(Shutdown("enough")))
    with pytest.raises(ShutdownRequested):
        loop.run()
