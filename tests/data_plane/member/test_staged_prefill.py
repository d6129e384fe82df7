"""Stages of the prefill: their pages are the reference's, and what goes wrong is said by name.

Real stages with real rings between and behind them, in threads instead of processes, which one
stage alone is in a service too. The processes are in
tests/nanocp/serve/test_staged_prefill_service.py.
"""

import contextlib
import threading
from dataclasses import replace
from multiprocessing import Pipe
from random import Random

import pytest
import torch

from control_plane.scheduler.pipeline.pipeline_scheduler import PipelineScheduler
from data_plane.instance.page_transfers import PageTransfers
from data_plane.kv.frame_pool import FramePool
from data_plane.member import ticket_loop
from data_plane.member.lifetime import MemberSpec, ShutdownRequested
from data_plane.member.prefill_stage import PrefillEnds, PrefillStageLoop
from data_plane.member.stage_messages import (
    BeginPrompt,
    CancelPrompt,
    JoinTerm,
    StageEnded,
    StageJoined,
    StageLoaded,
    StageRan,
    StageSpec,
    StageSuspects,
)
from data_plane.member.staged_prefill import StagedPrefillLoop, StageThread
from data_plane.member.token_streams import TokenStreams
from data_plane.model.config import ModelConfig
from data_plane.model.make_checkpoint import make_checkpoint
from data_plane.model.weights import load_weights
from data_plane.startup.prefill import build_prefill_stage
from data_plane.startup.shared_parts import model_of, new_carry, page_ways, with_carry
from data_plane.transport.exchange import Term
from data_plane.transport.segments import Segments
from harness.member_fakes import CLUSTER_ID, LIMITS, Link, until
from harness.paths import ROOT
from harness.reference_prefill import prefill_pages
from harness.states import assert_same_state
from nanocp.config.cluster import ClusterConfig
from nanocp.config.data_plane import DataPlaneConfig
from nanocp.config.prefill import PrefillConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.config.whole import Config
from nanocp.serve.prefill_scheduler import make_prefill_scheduler
from nanocp.serve.served import PREFILL_FACTORY
from nanocp.values.commands import CancelPrefill, Join, PagesArrived, PrefillRequest, Shutdown
from nanocp.values.members import Beat, Envelope, Ready, Suspect
from nanocp.values.passes import PassPlan
from nanocp.values.plan import (
    CARRY_PAGE,
    PAGE_SIZE,
    TargetRun,
    Transfer,
    TransferDone,
    TransferFailed,
    TransferFenced,
)

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
        super().__init__(instance, 2, *page_ways(config, instance, segments, self.frames))

    def _read_page(self, frame):
        raise NotImplementedError

    def _write_page(self, frame, num_tokens, payload, offset):
        if frame < 20:
            self.frames.write_payload(frame, num_tokens, payload, offset)
        else:
            self.frames.carry.page(0, frame - 20)[offset : offset + len(payload)] = payload

    def has(self, event):
        self.copy_arrived_pages()
        return event in self._events


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


@contextlib.contextmanager
def staged(checkpoint, link, config):
    """The loop of the prefill with its stages, which is asked to shut down at the end."""
    num_stages = config.prefill.stages
    scheduler = make_prefill_scheduler(config)
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


@pytest.mark.parametrize("num_stages", [1, 2])
def test_pages_of_several_prompts_are_the_references_in_one_term_and_the_next(
    tiny_checkpoint, num_stages
):
    config = replace(CONFIG, prefill=replace(CONFIG.prefill, stages=num_stages))
    model, random = ModelConfig.from_folder(tiny_checkpoint), Random(1)
    prompts = [[random.randrange(2, 512) for _ in range(n)] for n in (300, 64, 31, 250)]
    link = Link(join(1))
    with staged(tiny_checkpoint, link, config) as loop:
        for term in (1, 2):
            receivers = [Receiver(instance, term, model, config) for instance in range(2)]
            first = 10 * term
            # Page 0 of the first prompt is shared: it is there already.
            transfers = [
                prefill(prompts[0], TargetRun(1, 2, 0, 0), TargetRun(3, 2, 1, 5), ticket=first),
                prefill(prompts[1], TargetRun(0, 1, 0, 7), ticket=first + 1),
                prefill(prompts[2], TargetRun(0, 1, 1, 9), ticket=first + 2),
                prefill(prompts[3], TargetRun(0, 4, 0, 12), ticket=first + 3),
            ]
            if term == 2:
                link.inbox.put(join(2))
            for transfer, message in transfers:
                for instance in transfer.receivers:
                    receivers[instance].expect(transfer)
                link.inbox.put(message)
            until(lambda: link.kinds().count(Ready) == term)  # noqa: B023
            if term == 2:
                link.inbox.put(Envelope(CancelPrefill(first + 3)))
                receivers[0].fence(first + 3)
            done = [
                (receivers[instance], TransferDone(transfer.ticket, instance))
                for transfer, _ in transfers[: 4 if term == 1 else 3]
                for instance in transfer.receivers
            ]
            # Instances take pages between steps, so a ring is full now and then.
            until(lambda: all([receiver.has(event) for receiver, event in done]))  # noqa: B023, C419
            assert_kv(tiny_checkpoint, model, receivers[0], prompts[0], {1: 0, 2: 1})
            assert_kv(tiny_checkpoint, model, receivers[1], prompts[0], {3: 5, 4: 6})
            assert_kv(tiny_checkpoint, model, receivers[0], prompts[1], {0: 7})
            assert_kv(tiny_checkpoint, model, receivers[1], prompts[2], {0: 9})
            if term == 1:
                pages = {page: 12 + page for page in range(4)}
                assert_kv(tiny_checkpoint, model, receivers[0], prompts[3], pages)
            else:
                assert TransferFenced(first + 3, 0) in receivers[0]._events
            for receiver in receivers:
                receiver.leave()
        until(lambda: loop._scheduler.load.frames_free == 16 and loop._scheduler.num_running == 0)
    assert TransferFailed not in link.kinds()


@pytest.mark.parametrize("num_stages", [1, 2])
def test_with_drafts_pages_have_kv_of_the_mtp_layer_too(num_stages):
    """It needs the token after each position, also after the last one of a chunk and of the KV."""
    prefill_config = replace(CONFIG.prefill, stages=num_stages)
    config = replace(CONFIG, prefill=prefill_config, scheduler=SchedulerConfig(num_drafts=1))
    model, random = model_of(config, TALE), Random(1)
    assert model.num_kept_layers == 5
    ids = [random.randrange(2, 512) for _ in range(231)]
    link = Link(join(1))
    with staged(TALE, link, config):
        receivers = [Receiver(instance, 1, model, config) for instance in range(2)]
        transfer, _ = prefill(ids[:230], TargetRun(0, 2, 0, 3), TargetRun(2, 2, 1, 5), ticket=4)
        for receiver in receivers:
            receiver.expect(transfer)
        link.inbox.put(Envelope(PrefillRequest(transfer, ids)))
        done = [(receivers[instance], TransferDone(4, instance)) for instance in range(2)]
        until(lambda: all([receiver.has(event) for receiver, event in done]))  # noqa: C419
        assert_kv(TALE, model, receivers[0], ids[:230], {0: 3, 1: 4}, ids[230:])
        assert_kv(TALE, model, receivers[1], ids[:230], {2: 5, 3: 6}, ids[230:])
        for receiver in receivers:
            receiver.leave()


@pytest.mark.parametrize("num_stages", [2, 6])
@pytest.mark.parametrize("preset", ["tiny-qwen3-next", "tiny-kimi-linear"])
def test_stages_send_the_states_of_their_layers(preset, num_stages, tmp_path):
    """A stage has linear attention layers alone; with six another has none of them."""
    make_checkpoint(tmp_path, preset)
    model, random = ModelConfig.from_folder(tmp_path), Random(1)
    config = replace(CONFIG, prefill=replace(CONFIG.prefill, stages=num_stages))
    config = with_carry(config, tmp_path)
    is_linear, size = [index in model.linear_layers for index in range(6)], 6 // num_stages
    stages = [is_linear[first : first + size] for first in range(0, 6, size)]
    assert any(map(all, stages)) and all(map(any, stages)) == (num_stages == 2)
    link, num_state_pages = Link(join(1)), config.cluster.carry_pages
    with staged(tmp_path, link, config):
        # A stage joins once it is attached to the rings of all instances.
        receiver, other = (Receiver(instance, 1, model, config) for instance in range(2))
        try:
            for ticket, length in enumerate((230, 1), start=4):
                ids = [random.randrange(2, 512) for _ in range(length)]
                kv = TargetRun(0, -(-length // PAGE_SIZE), 0, 3)
                state = TargetRun(CARRY_PAGE, num_state_pages, 0, 20)
                transfer, message = prefill(ids, kv, state, ticket=ticket)
                receiver.frames.carry._bytes.fill_(255)
                receiver.expect(transfer)
                link.inbox.put(message)
                until(lambda: receiver.has(TransferDone(ticket, 0)))  # noqa: B023
                expected, pages = new_carry(config, model, 1), {n: 3 + n for n in range(4)}
                assert_kv(tmp_path, model, receiver, ids, pages, carry=expected)
                assert_same_state(receiver.frames.carry, expected, length)
        finally:
            receiver.leave()
            other.leave()


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
        make_prefill_scheduler(CONFIG), link, 2, limit_ms, lambda: link.send(Beat())
    )
    loop.stages = Recorder()
    return loop, link


def run_to_the_end(loop, link):
    link.inbox.put(Envelope(Shutdown("enough")))
    with pytest.raises(ShutdownRequested):
        loop.run()


def test_two_passes_a_stage_are_in_flight_and_one_waits_and_prompts_go_first(tiny_checkpoint):
    target = TargetRun(0, 5, 0, 0)
    both = [prefill([ticket] * 300, target, ticket=ticket)[1] for ticket in (3, 4)]
    loop, link = scripted(tiny_checkpoint, join(1), *both)
    run_to_the_end(loop, link)
    sent = loop.stages.sent
    assert isinstance(sent[0][1], JoinTerm)
    assert [(stage, len(begin.token_ids)) for stage, begin in sent[1:3]] == [(0, 300), (1, 0)]
    passes = [message for _, message in sent if isinstance(message, PassPlan)]
    assert [(plan.number, plan.after) for plan in passes] == [(n, max(n - 4, -1)) for n in range(5)]
    assert [span[:3] for plan in passes for span in plan.spans] == [
        (3, 0, 100),
        (3, 100, 100),
        (3, 200, 100),
        (4, 0, 100),
        (4, 100, 100),
    ]
    assert not any(span.samples for plan in passes for span in plan.spans)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_prompt_that_begins_as_an_earlier_one_is_computed_from_there(
    tiny_checkpoint, num_stages, monkeypatch
):
    """Also in the next term, and pages that only the prefill still has are sent again."""
    config = replace(CONFIG, prefill=replace(CONFIG.prefill, stages=num_stages))
    model, random, spans = ModelConfig.from_folder(tiny_checkpoint), Random(1), []
    first = [random.randrange(2, 512) for _ in range(300)]
    later = [*first[:270], *(random.randrange(2, 512) for _ in range(40))]
    plan_pass = PipelineScheduler.plan_pass

    def watched(self, events, now_us):
        plan = plan_pass(self, events, now_us)
        spans.extend(span[:3] for span in (plan.pass_plan.spans if plan.pass_plan else ()))
        return plan

    monkeypatch.setattr(PipelineScheduler, "plan_pass", watched)
    link = Link(join(1))
    with staged(tiny_checkpoint, link, config):
        for term, ids, pages in ((1, first, 5), (1, later, 5), (2, first[:256], 4)):
            receivers = [Receiver(instance, term, model, config) for instance in range(2)]
            link.inbox.put(join(term))
            transfer, message = prefill(ids, TargetRun(0, pages, 0, 3), ticket=len(ids))
            receivers[0].expect(transfer)
            link.inbox.put(message)
            until(lambda: receivers[0].has(TransferDone(transfer.ticket, 0)))  # noqa: B023
            places = {page: 3 + page for page in range(pages)}
            assert_kv(tiny_checkpoint, model, receivers[0], ids, places)
            for receiver in receivers:
                receiver.leave()
    assert sum(count for ticket, _, count in spans if ticket == 300) == 300
    assert [span for span in spans if span[0] != 300] == [(310, 256, 54), (256, 192, 64)]


def test_a_prompt_whose_log_probabilities_are_asked_for_is_computed_whole(tiny_checkpoint):
    target = TargetRun(0, 5, 0, 0)
    both = [prefill([7] * 300, target, ticket=ticket)[1].message for ticket in (3, 4)]
    asked = [Envelope(replace(each, prompt_logprobs=2)) for each in both]
    loop, link = scripted(tiny_checkpoint, join(1), *asked)
    run_to_the_end(loop, link)
    passes = [message for _, message in loop.stages.sent if isinstance(message, PassPlan)]
    assert sum(span.num_tokens for plan in passes for span in plan.spans) == 500  # 5 passes


def test_pages_of_a_pass_that_failed_are_not_found(tiny_checkpoint):
    """Neither by a prompt that waits nor by a later one."""
    target = TargetRun(0, 5, 0, 0)
    loop, link = scripted(
        tiny_checkpoint, *[join(1)], *(prefill([7] * 300, target, ticket=n)[1] for n in range(3, 9))
    )
    run_to_the_end(loop, link)
    num_begun = len(
        {begun.transfer.ticket for _, begun in loop.stages.sent if hasattr(begun, "transfer")}
    )
    loop.stages.sent.clear()
    for stage in (0, 1):
        loop.report(stage, StageRan(0, has_failed=stage == 1))
    for number in range(1, 40):
        loop.report(1, StageRan(number))
        run_to_the_end(loop, link)
        if not loop._waiting:
            break
    starts = {}
    for _, plan in loop.stages.sent:
        for span in plan.spans if isinstance(plan, PassPlan) else ():
            starts.setdefault(span.request_id, span.first)
    later = [starts[ticket] for ticket in range(3 + num_begun, 9)]
    assert later[0] == 0, "it shares a page that was not written"
    assert min(later[1:]) > 0, "pages that were written since are shared"


def test_a_ticket_that_was_cancelled_in_the_queue_reaches_no_stage(tiny_checkpoint):
    target = TargetRun(0, 8, 0, 0)
    both = [prefill([7] * 500, target, ticket=ticket)[1] for ticket in (3, 4)]
    cancels = [Envelope(CancelPrefill(ticket)) for ticket in (4, 3, 99)]
    loop, link = scripted(tiny_checkpoint, join(1), *both, *cancels)
    run_to_the_end(loop, link)
    kinds = [type(message) for _, message in loop.stages.sent]
    assert kinds.count(BeginPrompt) == 2 and CancelPrompt(3) in [m for _, m in loop.stages.sent]
    for number in range(5):
        loop.report(1, StageRan(number))
    run_to_the_end(loop, link)
    assert loop._scheduler.num_running == loop._scheduler.num_waiting == 0
    assert loop._scheduler.load.frames_free == 16 and not loop._open and not loop._waiting


def test_a_ticket_that_has_arrived_is_forgotten_and_a_new_term_cancels_none(tiny_checkpoint):
    message = prefill([7] * 60, TargetRun(0, 1, 0, 0), ticket=3)[1]
    loop, link = scripted(tiny_checkpoint, join(1), message, Envelope(PagesArrived(3)), join(2))
    run_to_the_end(loop, link)
    assert not loop._open
    assert not [each for _, each in loop.stages.sent if isinstance(each, CancelPrompt)]


def test_a_lost_stage_ends_the_prefill_by_name(tiny_checkpoint):
    loop, _ = scripted(tiny_checkpoint, join(1))
    loop.report(1, StageEnded("its process ended with status -9"))
    with pytest.raises(RuntimeError, match=r"stage 1 of the prefill: its process .* status -9"):
        loop.run()


def test_a_stage_that_hangs_ends_the_prefill_by_name(tiny_checkpoint):
    message = prefill([7] * 300, TargetRun(0, 5, 0, 0), ticket=3)[1]
    loop, _ = scripted(tiny_checkpoint, join(1), message, limit_ms=200.0)
    loop.report(0, StageRan(0))
    with pytest.raises(RuntimeError, match=r"stage 1 of the prefill did not run pass 0 in 0 s"):
        loop.run()


def test_it_beats_once_every_stage_has_loaded(tiny_checkpoint):
    loop, link = scripted(tiny_checkpoint, join(1))
    loop.report(1, StageLoaded())
    run_to_the_end(loop, link)
    assert link.kinds() == []
    loop.report(0, StageLoaded())
    run_to_the_end(loop, link)
    assert link.kinds() == [Beat]


def test_it_is_ready_when_every_stage_has_joined_the_present_term(tiny_checkpoint):
    loop, link = scripted(tiny_checkpoint, join(1), join(2))
    run_to_the_end(loop, link)
    for stage, term in ((0, 2), (1, 1)):
        loop.report(stage, StageJoined(term))
    run_to_the_end(loop, link)
    assert link.kinds() == []
    loop.report(1, StageJoined(2))
    loop.report(0, StageSuspects(1, 0, True, "old"))
    loop.report(0, StageSuspects(2, 1, False, "full"))
    run_to_the_end(loop, link)
    assert link.kinds() == [Ready, Suspect]
    assert link.sent[1] == Envelope(Suspect(1, False, "full"), 2)


def test_its_queue_has_a_limit(tiny_checkpoint, monkeypatch):
    monkeypatch.setattr(ticket_loop, "MAX_QUEUED_PROMPTS", 1)
    target = TargetRun(0, 8, 0, 0)
    three = [prefill([7] * 500, target, ticket=ticket)[1] for ticket in (1, 2, 3, 4)]
    loop, link = scripted(tiny_checkpoint, join(1), *three)
    run_to_the_end(loop, link)
    failed = [envelope.message for envelope in link.sent]
    assert [each.ticket for each in failed] == [3, 4]
    assert "1 prompts wait for the prefill" in failed[0].message


def test_a_prompt_that_no_stage_could_hold_is_given_up(tiny_checkpoint):
    message = prefill([7] * 600, TargetRun(0, 10, 0, 0), ticket=3)[1]
    loop, link = scripted(tiny_checkpoint, join(1), message)
    run_to_the_end(loop, link)
    assert "max_model_len is 512" in link.sent[0].message.message


def test_what_stages_cannot_do_is_refused_by_name():
    with pytest.raises(ValueError, match=r"prefill\.stages is 2 and data_plane\.page_backend nixl"):
        Config(prefill=PrefillConfig(stages=2), data_plane=DataPlaneConfig(page_backend="nixl"))
    with pytest.raises(ValueError, match="stages is 2, and engines or synthetic_kv is set too"):
        PrefillConfig(stages=2, synthetic_kv=True)
