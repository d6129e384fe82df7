"""Stages of the prefill: their pages are the reference's, and what goes wrong is said by name."""

from dataclasses import replace
from random import Random

import pytest

from data_plane.model.config import ModelConfig
from data_plane.model.make_checkpoint import make_checkpoint
from data_plane.prefill import staged_prefill
from data_plane.prefill.stage_messages import (
    BeginPrompt,
    CancelPrompt,
    JoinTerm,
    StageEnded,
    StageJoined,
    StageLoaded,
    StageRan,
    StageSuspects,
)
from data_plane.startup.shared_parts import model_of, new_carry, with_carry
from harness.exact.states import assert_same_state
from harness.members.member_fakes import Link
from harness.members.staged_prefill import (
    CONFIG,
    TALE,
    Receiver,
    assert_kv,
    join,
    prefill,
    run_to_the_end,
    scripted,
    staged,
)
from harness.waits import until
from nanocp.config.data_plane import DataPlaneConfig
from nanocp.config.prefill import PrefillConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.config.whole import Config
from nanocp.values.commands import CancelPrefill, PagesArrived, PrefillRequest
from nanocp.values.members import Beat, Envelope, Ready, Suspect
from nanocp.values.passes import PassPlan
from nanocp.values.plan import (
    CARRY_PAGE,
    PAGE_SIZE,
    TargetRun,
    TransferDone,
    TransferFailed,
    TransferFenced,
)


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
        until(
            lambda: (
                loop._scheduler.load.frames_free == 16 and loop._scheduler.requests.num_running == 0
            )
        )
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
    assert loop._scheduler.requests.num_running == loop._scheduler.requests.num_waiting == 0
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


def test_prompts_of_two_salts_share_no_pages(tiny_checkpoint):
    loop, link = scripted(tiny_checkpoint, join(1))
    computed, num_ran = [0] * 5, 0
    for ticket, salt in enumerate((b"", b"a", b"b", b"a", b"")):
        transfer = prefill([7] * 90, TargetRun(0, 2, 0, 0), ticket=ticket)[0]
        link.inbox.put(Envelope(PrefillRequest(transfer, [7] * 90, salt=salt)))
        run_to_the_end(loop, link)
        while plans := [
            each for _, each in loop.stages.sent if isinstance(each, PassPlan)
        ][num_ran:]:  # fmt: skip
            for span in (span for plan in plans for span in plan.spans):
                computed[span.request_id] += span.num_tokens
            for _ in plans:
                loop.report(0, StageRan(num_ran))
                loop.report(1, StageRan(num_ran))
                num_ran += 1
            run_to_the_end(loop, link)
    assert computed == [90, 90, 90, 26, 26]


def test_its_queue_has_a_limit(tiny_checkpoint, monkeypatch):
    monkeypatch.setattr(staged_prefill, "MAX_QUEUED_PROMPTS", 1)
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
