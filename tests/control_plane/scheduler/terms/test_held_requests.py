"""A term ends: which requests keep their pages, what is void, and where rows go on."""

from dataclasses import replace

import pytest

from control_plane.scheduler.state.request import State
from harness.hash_clusters.followed_tables import TWO_INSTANCES, FollowedScheduler
from nanocp.values.plan import (
    AbortRequested,
    Arrival,
    ClusterLost,
    Finished,
    FinishReason,
    InstanceLost,
    Regrouped,
    Resubmitted,
    TermEnded,
    TransferDone,
)

NUM_FRAMES = TWO_INSTANCES.num_frames
HELD_US = 1000


class Story(FollowedScheduler):
    """Two instances. Requests of up to 255 tokens live on one of them, longer ones on both."""

    def __init__(self, carry_pages=0, **scheduler):
        super().__init__(
            replace(TWO_INSTANCES, carry_pages=carry_pages),
            policy="dual_balanced", cp_degree_buckets=((256, 1),), cp_degree_max=2,
            held_timeout_us=HELD_US, **scheduler,
        )  # fmt: skip
        self.term = 1

    def place(self, request_id, prompt_len=100, max_tokens=50):
        """The request's row is in the windows from here on; returns its KV binding."""
        self.plan(Arrival(request_id, prompt_len, max_tokens, b"first", needs_prefill=False))
        return {instance for _, instance in self.placement(request_id).holders}

    def regroup(self, *lost, seats=(), restarts=()):
        """The term ends by these losses, or by none, and the next begins, with these seats.

        restarts: what instances say of states when they leave.
        """
        ends = [InstanceLost(instance) for instance in lost] or [TermEnded()]
        assert self.plan(*ends).window is None
        assert self.plan().window is None, "no window between two terms"
        self.term += 1
        return self.plan(Regrouped(self.term, seats, restarts=restarts))

    def again(self, request_id, prompt_len, max_tokens, attempt=1, row=b"again"):
        """The front end submits the request's next attempt, and has no other open request."""
        arrival = Arrival(request_id, prompt_len, max_tokens, row, attempt=attempt)
        return self.plan(arrival, Resubmitted())

    def state(self, request_id):
        request = self.scheduler._state.requests.get(request_id)
        return None if request is None else request.state


def placed(**scheduler):
    """A story in which request 1 has its row."""
    story = Story(**scheduler)
    story.place(1)
    return story


def test_a_request_keeps_its_pages_if_all_survived_and_restarts_at_its_last_token():
    story = Story()
    assert story.place(1) == {0}
    assert story.place(2) == {1}
    runs = list(story.request().runs)
    for _ in range(5):
        story.step()
    story.regroup(1)
    assert (story.state(1), story.state(2)) == (State.HELD, None)
    assert story.free()[1] == NUM_FRAMES, "the new process has empty frames"
    # The front end has 3 of the 5 to 7 tokens: a row of its own, over the same pages.
    plan = story.again(1, 103, 47)
    assert plan.transfers == () and plan.window == story.window
    (start,) = plan.instances[0].starts
    assert (start.request_id, start.position, start.max_tokens, start.row_start) == (
        1, 102, 47, b"again",
    )  # fmt: skip
    assert story.request().runs == runs
    assert plan.instances[0].base_digest == 0, "the instance's table is empty"


def test_a_request_that_lost_a_page_is_prefilled_again():
    story = Story()
    assert story.place(1, prompt_len=300) == {0, 1}
    story.step()
    story.regroup(0)
    assert story.state(1) is None and story.free() == [NUM_FRAMES, NUM_FRAMES]
    plan = story.again(1, 302, 48)
    (transfer,) = plan.transfers
    assert (transfer.request_id, transfer.num_tokens) == (1, 301)
    assert story.state(1) is State.TRANSFERRING


def test_a_held_request_may_lose_a_page_in_the_next_loss():
    story = placed()
    story.regroup()
    assert story.state(1) is State.HELD
    story.regroup(0)
    assert story.state(1) is None and story.free() == [NUM_FRAMES] * 2
    assert len(story.again(1, 101, 49, attempt=2).transfers) == 1


def test_a_row_whose_steps_are_planned_beyond_its_end_counts_no_more_than_it_has():
    story = Story(steps_per_window=4)
    story.place(1, prompt_len=63, max_tokens=1)
    story.regroup()
    assert story.state(1) is State.HELD
    assert story.loads("kv_tokens")[0] <= 63


def test_a_prompt_under_way_begins_anew_under_another_ticket():
    story = Story()
    (old,) = story.plan(Arrival(1, 100, 50, b"first")).transfers
    plan = story.regroup()
    assert [(fence.ticket, fence.instances) for fence in plan.fences] == [(old.ticket, ())], (
        "the prefill is to stop"
    )
    assert story.scheduler.tickets.num_issued == old.ticket, "receivers refuse all up to this one"
    (new,) = story.again(1, 100, 50).transfers
    assert new.ticket > old.ticket
    story.plan(TransferDone(old.ticket, old.receivers[0]))
    assert story.state(1) is State.TRANSFERRING, "an old ticket's confirmation starts no row"
    assert story.plan(TransferDone(new.ticket, new.receivers[0])).window is not None


def test_what_arrives_between_two_terms_waits_and_nothing_is_placed():
    story = Story()
    story.plan(InstanceLost(0))
    plan = story.plan(Arrival(1, 100, 50))
    assert (
        plan.placements == () and plan.transfers == () and story.scheduler.requests.num_waiting == 1
    )
    assert story.plan(Regrouped(2)).placements == (), "requests of the last term come first"
    assert len(story.plan(Resubmitted()).placements) == 1


def test_a_cluster_that_has_shrunk_does_not_promise_all_of_max_tokens():
    """A preempted request would need all frames of the instance for that, and others have some."""
    story = Story(growth_promise="tokens:0")
    story.regroup(1, seats=(0,))
    story.plan(Resubmitted())
    story.place(1)
    again = Arrival(2, 100, NUM_FRAMES * 64 - 100, b"again", resumes=True)
    assert story.plan(again).transfers


def test_a_late_submission_of_an_earlier_attempt_is_ignored():
    story = placed()
    story.regroup()
    story.again(1, 103, 47, attempt=2)
    story.again(1, 101, 49, attempt=1, row=b"late")
    arrival = story.request().arrival
    assert (arrival.attempt, arrival.row_start, arrival.prompt_len) == (2, b"again", 103)


def test_a_later_attempt_replaces_a_row_that_runs():
    """Tokens were lost on the way to the front end: the row starts anew, in the same term."""
    story = placed()
    for _ in range(3):
        story.step()
    plan = story.again(1, 102, 48)
    assert len(plan.placements) == 1 and story.state(1) is State.TRANSFERRING
    assert not plan.ended, "the request goes on"


def test_the_end_of_an_earlier_attempts_row_is_not_that_of_the_present_one():
    """The row stops in a window in flight, after its tokens were lost on their way."""
    story = placed()
    story.step()
    story.again(1, 102, 48)
    story.step(finished=(Finished(1, 3, FinishReason.STOP),))
    assert story.state(1) is State.TRANSFERRING


def test_a_later_attempt_replaces_a_waiting_one_with_its_deadline():
    story = Story()
    story.plan(InstanceLost(0), Arrival(1, 100, 50, b"first", deadline_us=500))
    story.plan(Arrival(1, 100, 50, b"again", attempt=1))
    (waiting,) = story.scheduler.requests.decided[1]
    assert (waiting.arrival.row_start, waiting.arrival.deadline_us) == (b"again", 500)


def test_a_held_request_that_its_front_end_does_not_submit_is_over():
    story = placed()
    story.regroup()
    plan = story.plan(Resubmitted())
    assert story.state(1) is None and not plan.ended and story.free() == [NUM_FRAMES] * 2
    assert len(story.again(1, 101, 49).transfers) == 1, "it is taken in again if it comes after all"


def test_front_ends_are_waited_for_a_bounded_time():
    story = placed()
    story.regroup()
    story.plan(Arrival(2, 100, 50, needs_prefill=False))
    assert story.scheduler.next_deadline_us == story.now_us + HELD_US
    story.now_us += HELD_US - 1
    assert story.plan().placements == () and story.state(1) is State.HELD
    story.now_us += 1
    assert len(story.plan().placements) == 1 and story.state(1) is None


def test_requests_of_the_last_term_are_placed_before_new_ones():
    story = Story()
    story.place(2)
    story.regroup(0, 1)
    story.plan(Arrival(3, 64 * NUM_FRAMES - 100, 100))
    plan = story.plan(Arrival(2, 100, 50, attempt=1), Resubmitted())
    assert plan.placements[0].request_id == 2


def test_a_held_request_can_be_aborted():
    story = placed()
    story.regroup()
    (ended,) = story.plan(AbortRequested(1)).ended
    assert (ended.request_id, ended.reason) == (1, FinishReason.ABORTED)


def test_a_request_that_can_never_be_served_is_refused_in_a_later_attempt_too():
    story = Story()
    (ended,) = story.again(1, 64 * 2 * NUM_FRAMES, 50).ended
    assert ended.reason is FinishReason.INVALID


@pytest.mark.parametrize("is_between_terms", [False, True])
def test_a_cluster_that_cannot_go_on_ends_every_request(is_between_terms):
    story = placed()
    if is_between_terms:
        story.plan(InstanceLost(0))
    plan = story.plan(ClusterLost("no instance could be started"), Arrival(2, 10, 10))
    assert [(each.request_id, each.reason, each.message) for each in plan.ended] == [
        (1, FinishReason.FAILED, "no instance could be started"),
        (2, FinishReason.FAILED, "no instance could be started"),
    ]
    assert plan.window is None and story.free() == [NUM_FRAMES] * 2


def test_a_request_whose_first_window_is_the_last_of_three_terms_is_ended():
    story = placed()
    for _ in range(3):
        story.step()
    story.place(2)  # It begins with a window in which an instance is lost.
    for attempt in (1, 2, 3):
        story.regroup(0, 1)
        plan = story.plan(
            Arrival(2, 100, 50, b"again", attempt=attempt, needs_prefill=False),
            Arrival(1, 103, 47, b"again", attempt=attempt, needs_prefill=False),
            Resubmitted(),
        )
        assert [ended.request_id for ended in plan.ended] == ([2] if attempt == 3 else [])
    (ended,) = plan.ended
    assert ended.reason is FinishReason.FATAL and "3 times in a row" in ended.message
    assert story.state(1) is State.RUNNING, "it had run before the first of the losses"
    assert story.state(2) is None and not story.scheduler.held


def test_losses_with_whole_windows_between_blame_no_request():
    story = placed()
    for attempt in range(1, 7):
        story.regroup(0, 1)
        plan = story.plan(
            Arrival(1, 100, 50, b"again", attempt=attempt, needs_prefill=False), Resubmitted()
        )
        if attempt % 2 == 0:
            story.step()
            story.step()
        assert not plan.ended


def test_a_held_request_is_prefilled_again_for_its_missing_log_probabilities():
    story = placed()
    story.step()
    story.regroup()
    assert story.state(1) is State.HELD
    arrival = Arrival(1, 101, 49, b"again", attempt=1, is_recomputed=True)
    plan = story.plan(arrival, Resubmitted())
    assert [each.request_id for each in plan.transfers] == [1]
    assert story.state(1) is State.TRANSFERRING


def test_of_two_attempts_that_come_together_only_the_last_is_told_of_its_place():
    """The first goes on over its pages, the second gives them up: its prompt is yet to be placed.

    Who carries plans out would take the place of the first for that of the second, and have no
    prompt for it later.
    """
    story = placed()
    story.regroup()
    first = Arrival(1, 101, 49, b"again", attempt=1)
    second = Arrival(1, 102, 48, b"again", attempt=2, is_recomputed=True)
    assert story.plan(first, second).placements == ()
    assert [each.request_id for each in story.plan(Resubmitted()).placements] == [1]


def test_a_row_goes_on_with_a_state_that_has_survived():
    story = placed(carry_pages=2)
    carry = story.request().carry
    for _ in range(5):
        story.step()
    story.regroup(1, restarts=((1, 102, 103),))
    plan = story.again(1, 103, 47)
    assert plan.transfers == () and plan.instances[0].starts[0].position == 102
    assert story.request().carry == carry


@pytest.mark.parametrize("restarts", [(), ((1, 103, 104),), ((1, 100, 101),)])
def test_a_state_of_another_position_is_made_again_and_pages_stay(restarts):
    story = placed(carry_pages=2)
    runs = list(story.request().runs)
    for _ in range(5):
        story.step()
    story.regroup(1, restarts=restarts)
    plan = story.again(1, 103, 47)
    (transfer,) = plan.transfers
    assert (transfer.num_tokens, transfer.source) == (102, None)
    assert transfer.targets == (story.request().carry,), "no page of KV"
    plan = story.plan(TransferDone(transfer.ticket, 0))
    assert plan.instances[0].starts[0].position == 102
    assert story.request().runs == runs


def test_no_ticket_for_a_state_is_issued_between_two_terms():
    story = placed(carry_pages=2)
    for _ in range(5):
        story.step()
    story.regroup(1)
    story.plan(InstanceLost(1))
    assert story.plan(Arrival(1, 103, 47, b"again", attempt=1)).transfers == ()


def test_a_state_is_made_again_where_the_row_goes_if_its_instance_leaves():
    story = Story(carry_pages=2)
    story.place(1, prompt_len=100)
    story.place(2, prompt_len=300)
    request = story.request(2)
    old, ledgers = request.moe_binding, story.scheduler.requests.decided[0].frames
    for run in list(request.runs):
        assert run.instance in (0, 1)
    story.step()
    story.regroup(seats=(1 - old,), restarts=((2, 300, 301),))
    assert story.state(2) is None, "it has pages on the instance that left"
    assert ledgers[old].carries.num_taken == 0


def test_a_request_of_one_token_begins_again_with_an_empty_state():
    story = Story(carry_pages=1)
    story.place(1, prompt_len=1)
    story.step()
    story.regroup(1)
    plan = story.again(1, 1, 50)
    assert plan.transfers == () and plan.instances[0].starts[0].position == 0
