"""Page moves in the scheduler: what is sent when, what is held how long, how a move may end."""

from dataclasses import replace

import pytest

from control_plane.scheduler.state.request import State
from harness.hash_clusters.followed_tables import TWO_INSTANCES, FollowedScheduler
from nanocp.config.cluster import BoundsConfig
from nanocp.values.plan import (
    AbortRequested,
    Arrival,
    SeatsWanted,
    TransferDone,
    TransferFenced,
    WindowDone,
)
from nanocp.values.table_changes import PageClear, PageRun, RouteChange

NUM_FRAMES = TWO_INSTANCES.num_frames


class Story(FollowedScheduler):
    """Two instances, and request 1 with ten full pages on instance 0."""

    def __init__(self, max_moving_pages=256, cluster=TWO_INSTANCES, max_tokens=100):
        super().__init__(
            cluster, cp_degree_buckets=((10_000, 1),), max_moving_pages=max_moving_pages
        )
        self.wishes = []
        self.scheduler._policy.moves = lambda state, window: [
            (state.requests[1], *wish) for wish in self.wishes
        ]
        self.arrive(645, max_tokens)
        self.plan()
        for _ in range(3):
            self.step()

    def start(self, pages=range(2, 5)):
        self.wishes = [(pages, 1)]
        before = self.loads("kv_tokens")
        plan = self.step()
        self.wishes = []
        (transfer,) = plan.transfers
        assert transfer.source == 0 and transfer.instances() == dict.fromkeys(pages, 1)
        assert self.loads("kv_tokens")[1] == before[1] + 64 * len(pages), (
            "the load is where it was decided to be"
        )
        return transfer


def test_pages_change_place_in_one_window_once_they_have_arrived():
    story = Story()
    transfer = story.start()
    quiet = story.step()
    assert not any(plan.changes.pages for plan in quiet.instances), (
        "nothing is told before the receiver's word"
    )
    plan = story.step(TransferDone(transfer.ticket, 1))
    source, destination = plan.instances
    assert source.changes.cleared == (PageClear(1, 2, 3),)
    assert destination.changes.pages == (PageRun(1, 2, 3, transfer.targets[0].frame),)
    assert source.changes.q_route == (RouteChange(1, 0, 1),) and destination.changes.res_route == (
        RouteChange(0, 0, 1),
    )
    assert plan.placements[0].kv_split(640) == ((0, 7), (1, 3))


def test_the_old_frames_are_held_until_every_window_that_reads_them_was_reported():
    story = Story()
    transfer = story.start()
    story.step(TransferDone(transfer.ticket, 1))
    assert story.quarantined() == [3, 0], "windows in flight read the pages at their old place"
    story.plan(WindowDone(0, story.window))
    assert story.quarantined() == [3, 0], "the other instance of the binding has not reported it"
    story.plan(WindowDone(1, story.window))
    assert story.quarantined() == [0, 0]


def test_the_last_pages_that_leave_an_instance_take_its_link_with_them():
    story = Story()
    transfer = story.start()
    story.step(TransferDone(transfer.ticket, 1))
    for _ in range(3):
        story.step()
    request = story.request()
    story.wishes = [(range(2, 5), 0)]
    (back,) = story.step().transfers
    story.wishes = []
    plan = story.step(TransferDone(back.ticket, 0))
    assert plan.instances[0].changes.q_route == (RouteChange(1, 0, None),)
    assert request.pages_on.keys() == {0} and back.source == 1


@pytest.mark.parametrize("has_arrived", [False, True])
def test_a_request_that_ends_gives_the_frames_of_both_places_back(has_arrived):
    story = Story()
    transfer = story.start()
    events = [TransferDone(transfer.ticket, 1)] if has_arrived else []
    plan = story.plan(*events, AbortRequested(1))
    assert [fence.ticket for fence in plan.fences] == ([] if has_arrived else [transfer.ticket])
    story.step()
    story.step()
    if not has_arrived:
        assert story.quarantined()[1] == 3, "the receiver may still copy"
        story.plan(TransferFenced(transfer.ticket, 1))
    assert story.free() == [NUM_FRAMES] * 2


@pytest.mark.parametrize("wish", [(range(9, 11), 1), (range(2, 5), 0), (range(2, 2), 1)], ids=[
    "a page that is not full", "where it is", "no page"
])  # fmt: skip
def test_what_cannot_move_stays(wish):
    story = Story()
    story.wishes = [wish]
    assert not story.step().transfers


def test_a_move_needs_frames_links_and_room_under_the_cap():
    story = Story(max_moving_pages=2)
    story.wishes = [(range(2, 8), 1)]
    (transfer,) = story.step().transfers
    assert list(transfer.instances()) == [2, 3], "as many as may be under way"
    bounds = BoundsConfig(max_attention_rows=1, max_rows=1)
    story = Story(cluster=replace(TWO_INSTANCES, bounds=bounds))
    story.arrive(64, 50)
    story.wishes = [(range(2, 5), 1)]
    assert not story.step().transfers, "instance 1 has an attention row already: its own"


def test_a_row_moves_once_at_a_time_and_does_not_re_bind_meanwhile():
    story = Story()
    story.start()
    story.wishes = [(range(6, 8), 1)]
    story.scheduler._policy.rebindings = lambda state, window: iter([(state.requests[1], 1)])
    plan = story.step()
    assert not plan.transfers and not any(one.hand_offs_out for one in plan.instances)
    assert story.request().state is State.RUNNING


def test_a_row_that_has_just_started_moves_later():
    """The order to send must not overtake the plan that says where the pages are."""
    story = Story()

    def wish(state, window):
        request = state.requests.get(2)
        return [(request, range(2), 1 - request.moe_binding)] if request else []

    story.scheduler._policy.moves = wish
    plans = [story.step(Arrival(2, 300, 50, needs_prefill=False)), story.step(), story.step()]
    assert [len(plan.transfers) for plan in plans] == [0, 0, 1]


def test_a_stopped_row_does_not_wait_for_all_pages_of_others_that_leave_too():
    """Two pages move at a time, ten of request 1 among them; the last request has one page."""
    story = Story(max_moving_pages=2)
    requests, stopped = story.scheduler._state.requests, story.scheduler._rows.stopped
    leaving, last = requests[1].moe_binding, 1
    while last == 1 or requests[last].moe_binding != leaving:
        last += 1
        story.step(Arrival(last, 20, 40, needs_prefill=False))
    for _ in range(3):
        story.step()
    plan, was_stopped = story.step(SeatsWanted((1 - leaving,))), False
    for _ in range(12):
        was_stopped |= last in stopped
        plan = story.step(*(TransferDone(each.ticket, 1 - leaving) for each in plan.transfers))
        if was_stopped and last not in stopped:
            break
    assert was_stopped and requests[last].pages_on.keys() == {1 - leaving}
    assert requests[1].pages_on[leaving] > 2, "its pages still leave"


def test_nothing_is_placed_on_an_instance_that_is_to_leave():
    story = Story()
    requests = story.scheduler._state.requests
    leaving = requests[1].moe_binding
    story.step(Arrival(2, 700, 50, needs_prefill=False))
    assert requests[2].moe_binding != leaving, "the instance that leaves has less to do"
    story.step(SeatsWanted((1 - leaving,)), Arrival(3, 20, 50, needs_prefill=False))
    assert requests[3].moe_binding != leaving


def test_a_row_that_stopped_to_move_and_has_no_room_comes_back_later():
    """It has more pages than the seat that stays has frames: once it waited for ever."""
    story = Story(max_tokens=1000)
    (row,) = story.scheduler._state.requests.values()
    assert sum(row.pages_on.values()) > NUM_FRAMES
    plan, was_stopped = story.step(SeatsWanted((1,))), False
    for _ in range(50):
        if not story.scheduler.requests.num_running:
            break
        was_stopped |= row.request_id in story.scheduler._rows.stopped
        plan = story.step(*(TransferDone(each.ticket, 1) for each in plan.transfers))
    assert not story.scheduler.requests.num_running, "the row waits"
    assert was_stopped and story.scheduler.requests.num_waiting == 1
