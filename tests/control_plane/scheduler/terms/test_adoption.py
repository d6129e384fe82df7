"""A controller takes the place of a lost one: whose pages go on, and whose frames come back."""

from dataclasses import replace

import pytest

from control_plane.scheduler.state.request import State
from harness.hash_clusters.followed_tables import TWO_INSTANCES, FollowedScheduler
from nanocp.values.plan import (
    CARRY_PAGE,
    Arrival,
    InstanceLost,
    Regrouped,
    TargetRun,
    TookOver,
    TransferDone,
)

NUM_FRAMES = 12
HELD_US = 1000
NEWEST = 5_000_000
HASHES = (b"first page", b"second page")
PAGES = (TargetRun(0, 1, 0, 3), TargetRun(1, 2, 1, 7))
"""Two full pages and the third, on both instances."""


class Story(FollowedScheduler):
    """The scheduler of a controller that is not the first, over two instances."""

    def __init__(self, *kept, restarts=(), carry_pages=0):
        super().__init__(
            replace(TWO_INSTANCES, num_frames=NUM_FRAMES, carry_pages=carry_pages),
            policy="dual_balanced", cp_degree_buckets=((256, 1),), held_timeout_us=HELD_US,
        )  # fmt: skip
        self.plan(TookOver(NEWEST, kept, restarts))

    def back(self, request_id, prompt_len=150, **fields):
        return self.plan(Arrival(request_id, prompt_len, 20, b"again", attempt=1, **fields))


def test_a_request_of_an_earlier_controller_goes_on_over_its_pages():
    story = Story((7, PAGES))
    assert story.free() == [NUM_FRAMES - 1, NUM_FRAMES - 2]
    plan = story.back(7)
    assert not plan.transfers and plan.window == 0, "it needs no prefill"
    (start,) = plan.instances[0].starts + plan.instances[1].starts
    assert (start.position, start.row_start) == (149, b"again")
    pages = [run for instance in plan.instances for run in instance.changes.pages]
    assert sorted((run.first_page, run.num_pages, run.frame) for run in pages) == [
        (0, 1, 3),
        (1, 2, 7),
    ]
    story.now_us = HELD_US
    story.plan()
    assert story.free() == [NUM_FRAMES - 1, NUM_FRAMES - 2]


@pytest.mark.parametrize(
    ("runs", "fields"),
    [(PAGES[:1], {}),
     (PAGES[1:], {}),
     ((PAGES[0], TargetRun(0, 1, 1, 4), PAGES[1]), {}),
     (PAGES, {"prompt_len": 194}),
     (PAGES, {"is_recomputed": True})],
    ids=["the end is missing", "the start is missing", "twice", "it has more tokens", "asked for"],
)  # fmt: skip
def test_a_request_without_all_its_pages_is_prefilled_again(runs, fields):
    story = Story((7, runs))
    (transfer,) = story.back(7, **fields).transfers
    assert transfer.ticket == NEWEST + 1, "no ticket of an earlier controller is used again"
    assert sum(story.free()) == 2 * NUM_FRAMES - sum(run.num_pages for run in transfer.targets) - (
        transfer.targets[-1].num_pages == 0
    )


def test_frames_of_requests_that_do_not_come_back_are_free_after_a_while():
    story = Story((7, PAGES), (8, (TargetRun(0, 1, 0, 4),)))
    story.back(7)
    assert story.free() == [NUM_FRAMES - 2, NUM_FRAMES - 2]
    assert story.scheduler.next_deadline_us == HELD_US
    story.now_us = HELD_US
    story.plan()
    assert story.free() == [NUM_FRAMES - 1, NUM_FRAMES - 2]
    assert story.scheduler.next_deadline_us is None
    assert story.back(8, 60).transfers, "its frame may have been another's meanwhile"


def test_a_request_that_waits_for_kept_frames_is_placed_when_nobody_came_back_for_them():
    story = Story(*[(number, (TargetRun(0, NUM_FRAMES, number, 0),)) for number in (0, 1)])
    assert not story.plan(Arrival(9, 100, 5)).transfers
    story.now_us = HELD_US
    assert story.plan().transfers


@pytest.mark.parametrize("order", [(7, 8), (8, 7)])
def test_a_page_that_two_requests_read_is_shared_again(order):
    pages = {7: PAGES, 8: (*PAGES[:1], TargetRun(1, 1, 1, 7), TargetRun(2, 1, 0, 9))}
    story = Story(*pages.items())
    for request_id in order:
        assert not story.back(request_id, page_hashes=HASHES).transfers
    assert story.free() == [NUM_FRAMES - 2, NUM_FRAMES - 2]
    (transfer,) = story.back(9, 200, page_hashes=(*HASHES, b"third page")).transfers
    assert transfer.targets[0].first_page == 1, "others find the page too"


def test_a_page_that_two_requests_claim_is_not_shared_without_its_hash():
    story = Story((7, PAGES), (8, PAGES))
    assert not story.back(7).transfers
    assert story.back(8).transfers


def test_a_loss_before_they_come_back_takes_all_pages():
    story = Story((7, PAGES))
    story.plan(InstanceLost(1))
    story.plan(Regrouped(2))
    assert story.free() == [NUM_FRAMES] * 2
    assert not story.back(7).transfers, "front ends are waited for first"


def test_what_a_later_first_term_keeps_takes_the_place_of_what_was_kept():
    story = Story((7, PAGES))
    story.plan(TookOver(2 * NEWEST))
    assert story.free() == [NUM_FRAMES] * 2
    assert story.back(7).transfers[0].ticket == 2 * NEWEST + 1


def test_a_bound_that_has_no_room_leaves_a_request_to_the_prefill():
    story = Story((7, PAGES))
    state = story.scheduler._state
    state.committed.rows[:] = [state.bounds.max_rows] * 2
    assert story.scheduler.held.begin_attempt(None, Arrival(7, 150, 20, attempt=1)) is None
    state.committed.rows[:] = [0, 0]
    assert story.free() == [NUM_FRAMES] * 2


def test_an_adopted_request_is_parked_until_its_next_page_is_free():
    """It has written two pages to their end, and every other frame is taken."""
    story = Story((7, (TargetRun(0, 1, 0, 3), TargetRun(1, 1, 1, 7))))
    for request_id in (1, 2):
        plan = story.plan(Arrival(request_id, 64 * (NUM_FRAMES - 1), 1, needs_prefill=False))
    assert plan.window is None or not sum(story.free())
    story.back(7, 129)
    request = story.request(7)
    assert request.state in (State.PARKED, State.RUNNING)
    assert request.position == 128


def test_tickets_are_answered_as_ever():
    story = Story()
    (transfer,) = story.plan(Arrival(1, 100, 5)).transfers
    assert transfer.ticket == NEWEST + 1 and story.scheduler.tickets.num_issued == NEWEST + 1
    plan = story.plan(TransferDone(transfer.ticket, transfer.receivers[0]))
    assert plan.window == 0


STATE = TargetRun(CARRY_PAGE, 2, 1, NUM_FRAMES + 4)


def test_a_request_of_an_earlier_controller_goes_on_with_its_state_where_that_lies():
    story = Story((7, (*PAGES, STATE)), restarts=((7, 148, 149),), carry_pages=2)
    assert STATE.frame not in story.scheduler._state.frames[1].free_frames(), "it waits"
    plan = story.back(7)
    assert not plan.transfers and plan.instances[1].starts[0].position == 149
    request = story.request(7)
    assert (request.carry, request.moe_binding) == (STATE, 1)


@pytest.mark.parametrize(
    ("runs", "restarts"),
    [((*PAGES, STATE), ((7, 148, 148),)),
     ((*PAGES, STATE), ()),
     (PAGES, ((7, 149, 149),)),
     ((*PAGES, STATE, STATE._replace(instance=0)), ((7, 149, 149),))],
    ids=["of another position", "of none", "gone", "in two places"],
)  # fmt: skip
def test_a_state_that_is_of_no_use_is_made_again_and_pages_stay(runs, restarts):
    story = Story((7, runs), restarts=restarts, carry_pages=2)
    (transfer,) = story.back(7).transfers
    request = story.request(7)
    assert transfer.targets == (request.carry,) and transfer.num_tokens == 149
    plan = story.plan(TransferDone(transfer.ticket, request.moe_binding))
    assert plan.instances[request.moe_binding].starts[0].position == 149


def test_a_state_that_nobody_comes_back_for_is_free_again():
    story = Story((7, (*PAGES, STATE)), restarts=((7, 148, 149),), carry_pages=2)
    story.now_us = HELD_US
    story.plan()
    assert STATE.frame in story.scheduler._state.frames[1].free_frames()
    assert story.free() == [NUM_FRAMES] * 2
