"""A row with a state is re-bound: it stands still, and its state travels under a ticket."""

from dataclasses import replace

import pytest

from control_plane.scheduler.state.request import State
from harness.hash_clusters.followed_tables import TWO_INSTANCES, FollowedScheduler
from nanocp.config.cluster import BoundsConfig, ClusterConfig
from nanocp.values.plan import (
    CARRY_PAGE,
    AbortRequested,
    FinishReason,
    HandOff,
    SeatsWanted,
    TargetRun,
    TransferDone,
    TransferFenced,
)
from nanocp.values.table_changes import PageClear

CARRY_PAGES, MAX_ROWS = 2, 3
CLUSTER = replace(TWO_INSTANCES, carry_pages=CARRY_PAGES, bounds=BoundsConfig(max_rows=MAX_ROWS))


class Story(FollowedScheduler):
    """Two instances that hold requests together; rows have states. A test wishes re-bindings."""

    def __init__(self, num_requests=1):
        super().__init__(CLUSTER, policy="fixed_degree:2", growth_promise="tokens:0")
        self.wishes = []
        self.scheduler._policy.rebindings = lambda state, window: [
            (state.requests[request_id], new) for request_id, new in self.wishes
        ]
        for _ in range(num_requests):
            self.arrive(300, 100)
        self.plan()
        for _ in range(3):
            self.step()

    def wish(self, *wishes):
        self.wishes = wishes
        plan = self.step()
        self.wishes = []
        return plan

    def is_in_tables(self):
        """Whether the window's tables have the row of request 1."""
        return any(1 in table.rows for table in self.tables)


def test_the_row_stands_still_until_its_state_has_come():
    story = Story(num_requests=2)
    old = story.request().moe_binding
    new, carry = 1 - old, story.request().carry
    plan = story.wish((1, new))
    assert not story.is_in_tables(), "no window has the row from its re-binding on"
    assert HandOff(1, new) in plan.instances[old].hand_offs_out
    assert not plan.transfers, "a window in flight still has the row"
    (transfer,) = story.step().transfers
    arriving = story.request().carry
    assert (transfer.source, transfer.targets) == (old, (arriving,))
    assert arriving == TargetRun(CARRY_PAGE, CARRY_PAGES, new, arriving.frame)
    assert transfer.num_tokens == story.request().position
    story.step()
    assert not story.is_in_tables()
    plan = story.step(TransferDone(transfer.ticket, new))
    assert 1 in story.tables[new].rows and 1 not in story.tables[old].rows
    assert PageClear(1, CARRY_PAGE, CARRY_PAGES) in plan.instances[old].changes.cleared
    (placement,) = [each for each in plan.placements if each.request_id == 1]
    assert placement.moe_binding == new
    free = story.scheduler._state.frames[old].free_frames()
    assert carry.frame not in free, "windows that were sent before still name the frame"
    for _ in range(2):
        story.step()
    assert carry.frame in story.scheduler._state.frames[old].free_frames()


def test_a_placement_names_the_instance_that_runs_the_row():
    story = Story(num_requests=2)
    old = story.request().moe_binding
    plan = story.wish((1, 1 - old))
    assert all(each.moe_binding == old for each in plan.placements if each.request_id == 1)


def test_one_state_at_a_time_leaves_an_instance_and_comes_to_one():
    story = Story(num_requests=2)
    first, second = story.request(1), story.request(2)
    story.wish((1, 1 - first.moe_binding), (2, 1 - second.moe_binding))
    assert first.state is State.PARKED and second.state is State.RUNNING


def test_a_request_that_ends_before_its_hand_off_ends_where_its_row_is():
    """No other row runs, so no window has handed it over."""
    story = Story()
    old = story.request().moe_binding
    story.wish((1, 1 - old))
    story.step()
    plan = story.plan(AbortRequested(1))
    assert plan.ended[0].reason is FinishReason.ABORTED
    plan = story.arrive(300, 100)
    assert plan.instances[old].ends == (1,) and not plan.instances[1 - old].ends
    assert not any(each.hand_offs_in or each.hand_offs_out for each in plan.instances)


@pytest.mark.parametrize("answer", [TransferDone, TransferFenced])
def test_a_request_that_ends_while_its_state_travels_gives_back_both_frames(answer):
    story = Story(num_requests=2)
    old = story.request().moe_binding
    story.wish((1, 1 - old))
    (transfer,) = story.step().transfers
    both = {story.request().carry.frame, story.request().carry_source.frame}
    plan = story.plan(AbortRequested(1))
    assert [fence.ticket for fence in plan.fences] == [transfer.ticket]
    for _ in range(3):
        story.step()
    ledgers = story.scheduler._state.frames
    assert not both <= {*ledgers[0].free_frames(), *ledgers[1].free_frames()}
    story.step(answer(transfer.ticket, 1 - old))
    free = [ledgers[old].free_frames(), ledgers[1 - old].free_frames()]
    assert all(frame in free[0] or frame in free[1] for frame in both)
    assert [ledger.carries.num_taken for ledger in ledgers].count(0) == 1, (
        "that of request 2 is left"
    )


def test_an_instance_leaves_once_no_state_is_there():
    story = Story()
    old = story.request().moe_binding
    plan = story.step(SeatsWanted((1 - old,)))
    for _ in range(10):
        arrived = [TransferDone(each.ticket, 1 - old) for each in plan.transfers]
        plan = story.step(*arrived)
        if plan.is_settled:
            break
    assert plan.is_settled
    assert story.request().carry.instance == 1 - old
    assert not story.scheduler._state.frames[old].carries.num_taken


def test_a_prompt_whose_pages_are_all_there_still_gets_a_state():
    story = FollowedScheduler(ClusterConfig(num_instances=1, carry_pages=CARRY_PAGES))
    prompt = {"needs_prefill": True, "page_hashes": (b"a" * 16, b"b" * 16)}
    (first,) = story.arrive(129, 1, **prompt).transfers
    story.plan(TransferDone(first.ticket, 0))
    (second,) = story.arrive(129, 1, **prompt).transfers
    assert [run.first_page for run in first.targets] == [0, CARRY_PAGE]
    assert [run.first_page for run in second.targets] == [CARRY_PAGE]
    assert second.receivers == (0,) and second.num_tokens == 128
    assert second.tokens_in(CARRY_PAGE) == 0 and second.tokens_in(1) == 64


def test_a_place_under_max_rows_waits_for_the_frame_of_its_state():
    story = Story(num_requests=2 * MAX_ROWS)
    frames = story.scheduler._state.frames
    assert [ledger.carries.num_taken for ledger in frames] == [MAX_ROWS] * 2
    free = [len(ledger.free_frames()) for ledger in frames]
    # One more than rows: a state may leave while another comes.
    assert all(number % CARRY_PAGES == 0 or number for number in free)
    assert all(ledger.carries.has_free for ledger in frames)
