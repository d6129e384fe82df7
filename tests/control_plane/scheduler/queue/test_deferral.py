"""Deferral: a few long prompts wait while steps are too long, and nobody waits without a target."""

from dataclasses import replace
from itertools import count

import pytest

from control_plane.scheduler.explanation import Explainer
from control_plane.scheduler.scheduler import Scheduler
from nanocp.config.cluster import BoundsConfig, ClusterConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.config.whole import Config
from nanocp.simulator.costs.cluster_file import load_cluster_file
from nanocp.simulator.loads.workload import Workload
from nanocp.simulator.outcome import Run
from nanocp.simulator.simulation import make_simulation
from nanocp.values.plan import Arrival, Finished, FinishReason, TargetRun, TermEnded, WindowDone

CLUSTER = ClusterConfig(
    num_instances=2,
    instances_per_node=2,
    num_frames=2000,
    max_model_len=65536,
    bounds=BoundsConfig(max_rows=128, max_attention_rows=256),
)
CONFIG = SchedulerConfig(policy="dual_balanced", tpot_target_ms=50, prefix_sharing=False)
NUM_SHORT = 110
LONG = 5000
"""Tokens of a long prompt: the short ones have 110 x 100."""


class Steps:
    """A scheduler with 110 short rows; windows end one after the other, as long as is asked."""

    def __init__(self, config=CONFIG, num_short=NUM_SHORT, explainer=None):
        self.scheduler = Scheduler(CLUSTER, config, explainer)
        self.plan_window = self.scheduler.plan_window
        if explainer:
            self.plan_window = explainer.around(self.plan_window)
        self.deferral = self.scheduler._admission.deferral
        self.now_us = self.window = 0
        self.in_flight = 0
        shorts = [Arrival(n, 100, 300, needs_prefill=False) for n in range(1, num_short + 1)]
        self.placed = self.call(shorts)

    def call(self, events):
        """Call until nothing is left to be said; returns the ids of requests that are placed."""
        placed = []
        while True:
            plan = self.plan_window(events, self.now_us)
            placed += [placement.request_id for placement in plan.placements]
            events = []
            self.in_flight += plan.window is not None
            if plan.window is None or self.in_flight == 2:
                return placed

    def run(self, *steps_ms, finished=(), report=None):
        """Let a window end after each of these times. report: more fields of its reports."""
        placed = []
        for ms in steps_ms:
            self.now_us += 1000 * ms
            ends = tuple(Finished(n, 1, FinishReason.STOP) for n in finished)
            # Reports come one by one; those of the first instance end no window.
            more = report or {}
            placed += self.call([WindowDone(0, self.window, ends, **more)])
            self.in_flight -= 1
            placed += self.call([WindowDone(1, self.window, **more)])
            self.window += 1
        return placed

    def serve(self, num_requests, ms):
        """Let that many short requests come and end, 100 in a window of `ms`."""
        new = count(10_000 + self.window * 100)
        for _ in range(num_requests // 100):
            ids = [next(new) for _ in range(100)]
            assert self.call([Arrival(n, 100, 50, needs_prefill=False) for n in ids]) == ids
            # A row runs from the window after next, and is reported by the one that ends then.
            self.run(ms, ms, ms, finished=ids)

    def arrive(self, request_id, length=LONG, **more):
        return self.call([Arrival(request_id, length, 50, **more)])


def long_steps(*config, ms=60, number=4, **more):
    """A scheduler whose first windows took that long."""
    steps = Steps(*config, **more)
    steps.run(*[ms] * number)
    return steps


def test_a_long_prompt_waits_while_steps_are_too_long_and_others_pass_it():
    steps = long_steps()
    assert steps.arrive(201) == []
    assert steps.arrive(202, length=100) == [202]
    assert steps.run(*[60] * 20) == []
    assert steps.run(*[25] * 8) == [201], "by then a step with it would be short"


def test_steps_have_to_be_clearly_shorter_before_it_is_placed():
    steps = long_steps(ms=45, number=12)
    assert steps.arrive(201) == [], "45 ms with almost half as many tokens more is too long"
    assert steps.run(*[34] * 12) == [], "49 ms with it"
    assert steps.run(*[30] * 12) == [201], "44 ms with it"


@pytest.mark.parametrize(
    "arrival",
    [{"length": 100}, {"needs_prefill": False}, {"priority": -1}],
    ids=["short", "already there", "of a class before the default one"],
)
def test_others_do_not_wait(arrival):
    steps = long_steps()
    assert steps.arrive(201, **arrival) == [201]


def test_without_a_target_nobody_waits():
    steps = long_steps(replace(CONFIG, tpot_target_ms=0), ms=600)
    assert steps.arrive(201) == [201]


def test_one_in_110_waits():
    assert Steps(num_short=108).arrive(201) == [201]
    assert long_steps(num_short=108).arrive(201) == [201]
    steps = long_steps()
    assert steps.arrive(201) == []
    assert steps.arrive(202) == [202]


def test_nobody_waits_for_more_than_20_s():
    steps = long_steps(ms=100)
    steps.arrive(201)
    assert steps.run(*[100] * 199) == []
    assert steps.run(100) == [201]


def test_after_a_long_calm_only_a_few_wait_at_once():
    steps = Steps()
    steps.serve(1500, ms=10)
    steps.run(*[60] * 8)
    placed = [n for n in range(201, 221) if steps.arrive(n)]
    assert placed == [*range(209, 221)], "eight wait, and no credit is left for more"
    assert len(steps.deferral) == 8
    assert sorted(steps.run(*[25] * 8)) == [*range(201, 209)]
    steps.run(*[60] * 8)
    assert steps.arrive(301) == [301]


def test_those_that_are_deferred_leave_the_queue_to_others():
    steps = Steps(replace(CONFIG, max_queued_tokens=4 * 2 * LONG))
    steps.serve(500, ms=10)
    steps.run(*[60] * 8)
    assert steps.arrive(201) == steps.arrive(202) == []
    assert steps.arrive(203) == [203], "two of them are a quarter of the tokens that may wait"


def test_they_leave_it_its_places_too():
    steps = Steps(replace(CONFIG, max_queued_requests=4), num_short=1)
    for request_id in range(300, 530):
        steps.arrive(request_id, length=100, needs_prefill=False)
    steps.run(*[60] * 8)
    assert steps.arrive(601) == []
    assert steps.arrive(602) == [602], "one in four may be deferred, though credit is left"


def test_a_request_with_a_deadline_is_not_deferred_until_then():
    steps = long_steps()
    soon_us, late_us = steps.now_us + 39_000_000, steps.now_us + 41_000_000
    assert steps.arrive(201, deadline_us=soon_us) == [201]
    assert steps.arrive(202, deadline_us=late_us) == []


def test_others_may_pass_one_that_was_deferred_for_as_long_as_any_other():
    """It was deferred for 20 s, and then its frames are not free."""
    steps = Steps()
    others = [Arrival(n, 60_000, 4000, needs_prefill=False) for n in (191, 192, 193)]
    assert steps.call(others) == [191, 192, 193]
    steps.run(*[1000] * 4)
    assert steps.arrive(201, length=60_000) == []
    assert steps.arrive(202, length=100) == [202]
    assert steps.run(*[1000] * 20) == []
    assert len(steps.deferral) == 0, "it has no frames, but it waits for nothing else"
    assert steps.arrive(203, length=100) == [203]
    assert steps.run(*[1000] * 9) == []
    assert steps.arrive(204, length=100) == [204]
    assert steps.run(1000) == []
    assert steps.arrive(205, length=100) == [], "max_overtake_us is over"


def test_nobody_is_deferred_twice():
    steps = Steps()
    steps.serve(500, ms=10)
    steps.run(10, 10, 10)
    others = [Arrival(n, 60_000, 4000, needs_prefill=False) for n in (191, 192, 193)]
    assert steps.call(others) == [191, 192, 193]
    steps.run(*[60] * 8)
    assert steps.arrive(201, length=60_000) == []
    steps.run(*[25] * 8)
    assert 201 not in steps.deferral and len(steps.scheduler._admission.queue) == 1
    steps.run(*[60] * 8)
    steps.arrive(202, length=100)
    assert 201 not in steps.deferral and steps.deferral._credit > 110


def test_a_deferred_request_is_placed_in_time_although_no_window_is_reported():
    steps = long_steps()
    arrived_us = steps.now_us
    steps.arrive(201)
    assert steps.scheduler.next_deadline_us == arrived_us + 20_000_000
    steps.now_us = steps.scheduler.next_deadline_us - 1
    assert steps.call([]) == []
    steps.now_us += 1
    assert steps.call([]) == [201]
    assert steps.scheduler.next_deadline_us is None


def test_a_deferred_request_asks_for_no_call_while_nothing_can_be_placed():
    steps = long_steps()
    steps.arrive(201)
    steps.call([TermEnded()])
    steps.now_us = steps.scheduler.next_deadline_us
    assert steps.call([]) == []
    assert steps.scheduler.next_deadline_us is None, "else the controller would call for ever"


def test_refused_requests_earn_nothing():
    steps = long_steps(replace(CONFIG, max_queued_tokens=20_000), num_short=108)
    assert steps.arrive(190, length=20_001) == []
    assert 190 not in steps.scheduler._admission.queue
    assert steps.arrive(201) == [201], "the 109th that was admitted"
    assert steps.arrive(202) == [], "the 110th"


def test_pages_that_move_are_read_where_they_were():
    steps = long_steps(ms=32)
    moved = steps.scheduler._state.requests[1]
    steps.scheduler.tickets.issue(moved, LONG, (TargetRun(0, LONG // 64, 1, 0),), source=0)
    assert steps.arrive(201) == [201], "46 ms with it, of 11,500 tokens that are read"


def test_rows_of_an_instance_that_drains_are_read_too():
    steps = long_steps(ms=32)
    steps.scheduler._state.close(1)
    assert steps.arrive(201) == [201], "46 ms with it, of 11,500 tokens that are read"


def test_kv_that_prefill_still_sends_is_to_come():
    steps = long_steps(ms=32)
    assert steps.arrive(201) == [201]
    assert steps.arrive(202) == [], "60 ms with both of them"


@pytest.mark.parametrize(("ms", "length"), [(60, 1000), (20, LONG)], ids=["short", "idle"])
def test_beside_few_tokens_nobody_waits(ms, length):
    """Steps are long for another reason than the tokens; or a step's fixed part is most of it."""
    steps = Steps()
    steps.run(ms, ms, ms, finished=range(3, NUM_SHORT + 1))
    steps.run(*[ms] * 8)
    assert len(steps.scheduler._state.requests) == 2
    assert steps.arrive(201, length=length) == [201]


def test_nobody_waits_while_nothing_is_read():
    """All rows have ended, windows are in flight still, and only a new prompt is on its way."""
    steps = long_steps()
    steps.call([Arrival(200, 100, 50)])
    ends = tuple(Finished(n, 1, FinishReason.STOP) for n in range(1, NUM_SHORT + 1))
    steps.call([WindowDone(0, steps.window, ends)])
    assert steps.scheduler._state.requests.keys() == {200} and steps.in_flight
    assert steps.arrive(201) == [201]


def test_time_without_a_window_is_no_steps():
    """The cluster is idle for a minute; after that a window is still to show how long steps are."""
    steps = Steps(num_short=2)
    steps.call([Arrival(n, 100, 50, needs_prefill=False) for n in range(3, 112)])
    steps.run(60, 60, 60, 60)
    steps.arrive(201)
    everyone = range(1, 112)
    placed = steps.run(60, finished=everyone)
    placed += steps.run(*[60] * steps.in_flight)
    assert placed == [201], "no window is in flight any more"
    steps.now_us += 60_000_000
    steps.call([Arrival(n, 100, 50, needs_prefill=False) for n in range(301, 412)])
    steps.run(10)
    assert steps.arrive(202) == [202]


def test_a_token_takes_less_time_than_a_step_whose_drafts_are_right():
    steps = Steps(replace(CONFIG, num_drafts=1))
    assert steps.scheduler._rows.advances.slack > 0, "the windows have drafts"
    steps.run(*[60] * 9, report={"num_tokens": 100, "drafts": ((60, 40),)})
    assert steps.deferral.token_us == 36_000
    assert steps.arrive(201, length=4096) == [201], "48 ms a token with it, and 80 ms a step"
    # Windows in which there was no room for drafts count too.
    steps.run(*[60] * 4, report={"num_tokens": 60})
    assert steps.deferral.token_us == 60_000 * 120 // 160
    steps.run(*[60] * 9, report={"num_tokens": 60, "drafts": ((60, 0),)})
    assert steps.deferral.token_us == 60_000
    assert steps.arrive(202) == []


def test_a_term_that_ends_takes_its_windows_along():
    steps = long_steps()
    assert steps.deferral.token_us == 60_000
    steps.call([TermEnded()])
    steps.scheduler._end_term((0, 1), {})
    assert steps.deferral.token_us == 0


def test_an_aborted_request_is_deferred_no_more():
    steps = long_steps()
    steps.arrive(201)
    assert 201 in steps.deferral
    steps.scheduler._end_by_id(201, FinishReason.ABORTED, "aborted")
    steps.run(60)
    assert len(steps.deferral) == 0


def test_an_explanation_says_so():
    explainer = Explainer(["201"])
    steps = long_steps(explainer=explainer)
    steps.arrive(201)
    steps.arrive(202, length=100)
    texts = [note.text for note in explainer.stories[201].notes]
    assert any("deferred: its prompt is long" in text for text in texts)


def test_equal_inputs_give_equal_plans():
    def plans():
        steps = Steps()
        plans, plan_window = [], steps.plan_window
        steps.plan_window = lambda *inputs: plans.append(plan_window(*inputs)) or plans[-1]
        steps.run(*[60] * 4)
        steps.arrive(201)
        steps.run(*[20] * 9)
        return plans

    assert plans() == plans()


def test_a_cluster_file_sets_the_target_of_simulated_requests():
    def most_waiting(target_ms):
        file = replace(load_cluster_file("h200x32-deepseek-v3"), tpot_target_ms=target_ms)
        simulation = make_simulation(file, "fitted", "cost_aware", Run(1_000_000, 7_000_000))
        return simulation.run(Workload("issue-5", 40.0, seed=1).requests(1 << 20)).num_waiting_max

    assert most_waiting(0) == 0
    assert most_waiting(10) >= 1


def test_a_pipeline_defers_nobody():
    cluster = ClusterConfig(num_instances=2, layout="pipeline")
    with pytest.raises(ValueError, match="tpot_target_ms 50: its prompts are not deferred"):
        Config(cluster=cluster, scheduler=SchedulerConfig(tpot_target_ms=50))
