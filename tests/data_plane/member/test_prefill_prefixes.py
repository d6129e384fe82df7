"""Stages of the prefill keep the pages of earlier prompts: what begins alike is computed once."""

from dataclasses import replace
from random import Random

import pytest

from control_plane.scheduler.pipeline.pipeline_scheduler import PipelineScheduler
from data_plane.model.config import ModelConfig
from data_plane.prefill.stage_messages import StageRan
from harness.members.member_fakes import Link
from harness.members.staged_prefill import (
    CONFIG,
    Receiver,
    assert_kv,
    join,
    prefill,
    run_to_the_end,
    scripted,
    staged,
)
from harness.waits import until
from nanocp.values.members import Envelope
from nanocp.values.passes import PassPlan
from nanocp.values.plan import TargetRun, TransferDone


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
