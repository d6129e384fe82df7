"""The scheduler of a pipeline as a pure function, and what it promises of passes."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.scheduler.pipeline.invariants import check_pipeline
from control_plane.scheduler.pipeline.pass_rows import PassRow, PromptRows
from control_plane.scheduler.pipeline.pipeline_scheduler import PipelineScheduler
from control_plane.scheduler.state.request import Request
from nanocp.config.cluster import BoundsConfig, ClusterConfig
from nanocp.config.passes import PassCosts
from nanocp.config.pipeline import PipelineConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.values.passes import PassDone, PassPlan, PipelinePlan, SamplerWork, Span, even_split
from nanocp.values.plan import (
    AbortRequested,
    Arrival,
    ClusterLost,
    Finished,
    FinishReason,
    InstanceLost,
    Regrouped,
    Resubmitted,
)
from nanocp.values.table import InstanceTable

CLUSTER = ClusterConfig(
    num_instances=1,
    num_frames=11,
    max_model_len=704,
    bounds=BoundsConfig(max_rows=8, max_attention_rows=8),
)


def scheduler_of(num_stages: int, max_pass_tokens: int = 1000, **config) -> PipelineScheduler:
    pipeline = PipelineConfig(num_stages=num_stages, num_layers=8, max_pass_tokens=max_pass_tokens)
    return PipelineScheduler(CLUSTER, SchedulerConfig(**config), pipeline)


class World:
    """Answers a scheduler's passes as drawn."""

    def __init__(self, scheduler: PipelineScheduler) -> None:
        self.scheduler = scheduler
        self.table = InstanceTable(0, 1)
        self.passes: list[PassPlan] = []
        self.num_calls = 0
        self.num_reported = 0
        self.arrivals: dict[int, Arrival] = {}
        self.away: list[Arrival] = []
        self.preempted: list[int] = []
        self.ended: dict[int, FinishReason] = {}
        self.stopped: set[int] = set()

    def call(self, *events) -> PipelinePlan:
        plan = self.scheduler.plan_pass(events, self.num_calls)
        self.num_calls += 1
        if plan.pass_plan is not None:
            assert plan.pass_plan.number == len(self.passes)
            self.passes.append(plan.pass_plan)
            self.table.apply(plan.pass_plan.table.changes)
            assert self.table.digest == plan.pass_plan.table.result_digest
        check_pipeline(self.scheduler, self.table)
        self.ended |= {ended.request_id: ended.reason for ended in plan.ended}
        for request_id, num_tokens in plan.preempted:
            self.preempted.append(request_id)
            first = self.arrivals[request_id]
            max_tokens = first.max_tokens - (num_tokens - first.prompt_len)
            again = replace(first, prompt_len=num_tokens, max_tokens=max_tokens, resumes=True)
            self.away.append(again)
        return plan

    def arrive(self, prompt_len: int, max_tokens: int, **fields) -> PipelinePlan:
        arrival = Arrival(len(self.arrivals) + 1, prompt_len, max_tokens, **fields)
        self.arrivals[arrival.request_id] = arrival
        return self.call(arrival)

    def report(self, *stopped: int) -> PipelinePlan:
        """The last stage has run the oldest pass, in which these requests stopped."""
        finished = tuple(Finished(request_id, 1, FinishReason.STOP) for request_id in stopped)
        self.stopped |= set(stopped)
        self.num_reported += 1
        return self.call(PassDone(self.num_reported - 1, finished))

    def step(self, name: str, a: int, b: int) -> None:
        if name == "arrive":
            self.arrive(a, b, priority=b % 2)
        elif name == "abort":
            self.call(AbortRequested(a))
        elif self.away:
            self.call(self.away.pop(a % len(self.away)))
        elif self.num_reported < len(self.passes):
            sampled = {
                span.request_id for span in self.passes[self.num_reported].spans if span.samples
            }
            self.report(*(r for r in sampled - self.stopped if r % 5 == a))
        else:
            self.call()


steps = st.lists(
    st.one_of(st.tuples(st.just("arrive"), st.integers(1, 400), st.integers(1, 150)),
              st.tuples(st.just("report"), st.integers(0, 9), st.just(0)),
              st.tuples(st.just("report"), st.integers(0, 9), st.just(0)),
              st.tuples(st.just("abort"), st.integers(0, 30), st.just(0))),
    min_size=10, max_size=60,
)  # fmt: skip
schedulers = st.tuples(
    st.integers(1, 4), st.sampled_from([1, 50, 1000]), st.sampled_from(["max_tokens", "tokens:0"])
)


@given(schedulers, steps)
@settings(max_examples=60, deadline=None)
def test_equal_inputs_give_equal_plans(drawn, steps):
    num_stages, max_pass_tokens, promise = drawn
    first, second = (
        World(scheduler_of(num_stages, max_pass_tokens, growth_promise=promise)) for _ in range(2)
    )
    for step in steps:
        first.step(*step)
        second.step(*step)
        assert (first.passes, first.ended) == (second.passes, second.ended)


@given(schedulers, steps)
@settings(max_examples=60, deadline=None)
def test_every_token_is_planned_once_in_order_and_everything_ends(drawn, steps):
    num_stages, max_pass_tokens, promise = drawn
    world = World(scheduler_of(num_stages, max_pass_tokens, growth_promise=promise))
    for step in steps:
        world.step(*step)
    while (
        world.away or world.num_reported < len(world.passes) or world.scheduler.requests.num_waiting
    ):
        world.step("report", 9, 0)
    assert world.scheduler.requests.num_running == 0
    assert world.scheduler.load.frames_free == CLUSTER.num_frames
    spans: dict[int, list[Span]] = {}
    for plan in world.passes:
        assert sum(span.num_tokens for span in plan.spans) <= max_pass_tokens
        for span in plan.spans:
            spans.setdefault(span.request_id, []).append(span)
    for request_id, arrival in world.arrivals.items():
        last = arrival.prompt_len + arrival.max_tokens - 1
        planned = spans.get(request_id, [])
        for before, after in pairwise(planned):
            assert after.first in (before.first + before.num_tokens, 0), "0 if it was preempted"
        if request_id not in world.ended and request_id not in world.stopped:
            assert planned[-1].first + planned[-1].num_tokens == last


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_one_pass_a_stage_is_in_flight_and_one_more_waits_at_the_first(num_stages):
    world = World(scheduler_of(num_stages))
    for _ in range(6):
        world.arrive(20, 40)
    for _ in range(9):
        world.call()
    assert len(world.passes) == num_stages + 1
    for plan in world.passes:
        assert plan.after >= plan.number - num_stages
    world.report()
    assert len(world.passes) == num_stages + 2


def test_rows_are_spread_evenly_over_the_passes_in_flight():
    world = World(scheduler_of(4))
    for _ in range(8):
        world.arrive(1, 60)
    for _ in range(40):
        world.report() if world.num_reported < len(world.passes) else world.call()
    assert {len(plan.spans) for plan in world.passes[-12:]} == {2}
    assert all(plan.after == plan.number - 4 for plan in world.passes[-12:])


def test_no_pass_waits_for_a_token_while_another_request_could_go_on():
    world = World(scheduler_of(4))
    for _ in range(4):
        world.arrive(1, 60)
    assert [plan.after for plan in world.passes] == [-1] * 4
    world.call()
    assert (world.passes[4].after, world.passes[4].spans) == (0, (Span(1, 1, 1, True),))


def test_a_row_alone_waits_for_its_own_token_in_every_pass():
    world = World(scheduler_of(4))
    world.arrive(10, 5)
    for _ in range(12):
        world.report() if world.num_reported < len(world.passes) else world.call()
    assert [plan.after for plan in world.passes] == [-1, 0, 1, 2, 3]
    assert [plan.spans for plan in world.passes] == [
        (Span(1, 0, 10, True),),
        *((Span(1, position, 1, True),) for position in range(10, 14)),
    ]
    assert world.scheduler.load.frames_free == CLUSTER.num_frames


def test_prompts_are_spread_over_the_passes_and_their_chunks_follow_each_other():
    world = World(scheduler_of(4))
    world.arrive(400, 5)
    for _ in range(4):
        world.call()
    spans = [plan.spans for plan in world.passes]
    assert spans[0] == (Span(1, 0, 100, False),), "a fourth of what is left"
    assert spans[1] == (Span(1, 100, 75, False),)
    assert spans[2] == (Span(1, 175, 64, False),), "not less than a page"
    assert [plan.after for plan in world.passes] == [-1, -1, -1, -1, 0], "none waits for a token"


def test_another_attempt_takes_the_place_of_a_row_whose_tokens_were_lost():
    world = World(scheduler_of(2))
    world.arrive(10, 3)
    again = replace(world.arrivals[1], prompt_len=11, max_tokens=2, attempt=1)
    for _ in range(2):  # a message that comes twice changes nothing
        world.call(again)
    while world.num_reported < len(world.passes):
        world.report()
    starts = [start.max_tokens for plan in world.passes for start in plan.table.starts]
    assert starts == [3, 2]
    assert world.scheduler.load.frames_free == CLUSTER.num_frames


def test_after_a_loss_requests_that_were_interrupted_go_before_new_ones():
    world = World(scheduler_of(2))
    world.arrive(10, 3)
    assert world.call(InstanceLost(1)).pass_plan is None
    assert world.arrive(5, 3).pass_plan is None, "nothing is planned between two terms"
    world.passes.clear()
    world.table = InstanceTable(0, 1)
    assert world.call(Regrouped(2)).pass_plan is None
    assert world.scheduler.next_deadline_us is not None, "a front end may be gone"
    world.call(replace(world.arrivals[1], attempt=1))
    world.call(Resubmitted())
    assert world.passes[0].number == 0
    assert [start.request_id for start in world.passes[0].table.starts] == [1, 2]


def test_prompts_that_sample_nothing_go_in_equal_chunks_of_whole_pages():
    rows = PromptRows(4, 128)
    rows.by_id[1] = PassRow(Request.from_arrival(Arrival(1, 600, 1), 0), 0)
    counts = []
    while rows.num_prompt_left:
        ((row, count),) = rows.chunks(0)
        counts.append(rows.plan(row, 0, count).num_tokens)
    assert counts == [128, 128, 128, 128, 88]
    rows.by_id[1] = PassRow(Request.from_arrival(Arrival(1, 250, 1), 0), 0)
    assert [count for _, count in rows.chunks(0)] == [64], "one for each stage"


def test_a_prompt_in_a_full_pass_waits_for_the_next():
    world = World(scheduler_of(1, max_pass_tokens=2))
    for _ in range(3):
        world.arrive(2, 9)
    assert [span.request_id for span in world.passes[0].spans] == [1]
    assert all(sum(span.num_tokens for span in plan.spans) <= 2 for plan in world.passes)


def test_a_shared_prefix_is_not_computed_again_from_the_pass_on_that_writes_it():
    world = World(scheduler_of(2))
    hashes = (b"a", b"b")
    world.arrive(150, 5, page_hashes=hashes)
    world.arrive(150, 5, page_hashes=hashes)
    second = [span for plan in world.passes for span in plan.spans if span.request_id == 2]
    assert second[0].first == 64, "the first chunk of request 1 has one full page"


def test_the_newest_row_is_preempted_when_none_has_a_frame():
    world = World(scheduler_of(2, growth_promise="tokens:0"))
    for _ in range(6):
        world.arrive(60, 200)
    for _ in range(3000):
        world.step("report", 9, 0)
    assert world.scheduler.requests.num_running == 0 and not world.ended
    assert world.preempted[:3] == [6, 5, 4]


def test_a_row_that_stopped_is_in_no_pass_from_then_on():
    world = World(scheduler_of(2))
    world.arrive(10, 50)
    world.call()
    assert world.report(1).pass_plan is None
    assert world.scheduler.load.frames_quarantined == 1, "the pass in flight still contains it"
    world.report()
    assert world.scheduler.load.frames_free == CLUSTER.num_frames
    assert world.arrive(10, 1).pass_plan.table.ends == (1,)


def test_a_lost_cluster_ends_every_request_and_takes_no_more():
    world = World(scheduler_of(2))
    world.arrive(10, 50)
    world.call(ClusterLost("stage 1 was lost"))
    world.arrive(10, 50)
    assert set(world.ended.values()) == {FinishReason.FAILED} and len(world.ended) == 2
    assert world.call().pass_plan is None


def test_a_cluster_of_two_instances_is_no_pipeline():
    with pytest.raises(ValueError, match="num_instances is 2; a pipeline has one page table"):
        PipelineScheduler(replace(CLUSTER, num_instances=2), SchedulerConfig(), PipelineConfig())


def test_layers_are_split_evenly_and_the_first_stages_take_the_remainder():
    assert even_split(8, 4) == (2, 2, 2, 2)
    assert even_split(7, 3) == (3, 2, 2)
    with pytest.raises(ValueError, match="num_layers is 3; each of the 4 stages needs a layer"):
        PipelineConfig(num_stages=4, num_layers=3)


def test_a_tenant_is_charged_its_prompt_and_twice_each_token():
    world = World(scheduler_of(2))
    world.arrive(100, 9, tenant="a")
    world.arrive(30, 4, tenant="b")
    while world.num_reported < len(world.passes):
        world.report()
    counters = world.scheduler.requests.fair_share.counters
    # A tenant begins where the one that was placed last stood: at the prompt of "a".
    assert counters == {"a": 100 + 2 * 9, "b": 100 + 30 + 2 * 4}


def test_the_end_of_an_earlier_attempts_row_is_not_that_of_the_present_one():
    world = World(scheduler_of(2, 1000))
    world.arrive(10, 20)
    world.call(Arrival(1, 10, 20, attempt=1))
    world.report(1)
    assert world.scheduler.requests.num_running == 1 and not world.ended


def test_a_request_of_one_token_in_each_pass_that_was_lost_is_ended():
    """All its tokens are planned when the stage is lost, so that it has no row any more."""
    scheduler = scheduler_of(2, 1000)
    for attempt in range(4):
        plan = scheduler.plan_pass([Arrival(1, 10, 1, attempt=attempt), Resubmitted()], 0)
        if attempt < 3:
            assert plan.pass_plan is not None and not plan.ended
            scheduler.plan_pass([InstanceLost(1)], 0)
            scheduler.plan_pass([Regrouped(attempt + 2, (0, 1))], 0)
    assert [ended.reason for ended in plan.ended] == [FinishReason.FATAL]


def test_of_a_request_that_is_ended_as_it_arrives_no_earlier_attempt_is_placed():
    """The attempt before came between two terms, when the third loss was not counted yet."""
    scheduler = scheduler_of(2, 1000)
    for attempt in range(3):
        scheduler.plan_pass([Arrival(1, 10, 9, attempt=attempt), Resubmitted()], 0)
        scheduler.plan_pass([InstanceLost(1)], 0)
        if attempt == 2:
            scheduler.plan_pass([Arrival(1, 10, 9, attempt=3)], 0)
        scheduler.plan_pass([Regrouped(attempt + 2, (0, 1))], 0)
    plan = scheduler.plan_pass([Arrival(1, 10, 9, attempt=4)], 0)
    assert [ended.reason for ended in plan.ended] == [FinishReason.FATAL]
    assert not scheduler.requests.num_waiting
    assert scheduler.plan_pass([Resubmitted()], 0).pass_plan is None


@pytest.mark.parametrize("work", [SamplerWork(0), SamplerWork.DRAWN | SamplerWork.NUCLEUS])
def test_layers_leave_a_last_stage_where_requests_sample_slowly(work):
    costs = PassCosts(token_us=10.0, nucleus_us=80.0)
    policy = {"layer_policy": "level", "layout_window": 1, "frame_move_us": 0.0, "costs": costs}
    pipeline = PipelineConfig(num_stages=2, num_layers=8, **policy)
    world = World(PipelineScheduler(CLUSTER, SchedulerConfig(), pipeline))
    world.arrive(2, 50, sampler_work=int(work))
    world.report()
    world.report()
    assert world.scheduler.layouts.is_moving == (work > 0)
