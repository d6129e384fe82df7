"""The queue: caps that refuse by name, classes, deadlines."""

from hypothesis import given
from hypothesis import strategies as st

from control_plane.scheduler.queue.waiting_queue import WaitingQueue
from control_plane.scheduler.scheduler import Scheduler
from nanocp.config.cluster import ClusterConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.values.plan import Arrival, Regrouped, Resubmitted, TermEnded

arrivals = st.lists(
    st.tuples(st.integers(-2, 2), st.one_of(st.none(), st.integers(0, 50)), st.booleans()),
    max_size=30,
)


@given(arrivals, st.integers(0, 50))
def test_the_order_is_by_class_and_arrival_and_deadlines_are_those_of_the_waiting(drawn, now_us):
    queue = WaitingQueue(SchedulerConfig())
    waiting = {}
    for request_id, (priority, deadline_us, leaves) in enumerate(drawn, start=1):
        arrival = Arrival(
            request_id, 10 * request_id, 1, priority=priority, deadline_us=deadline_us
        )
        queue.append(arrival, 0)
        if leaves:
            queue.remove(request_id)
        else:
            waiting[request_id] = arrival
    assert [entry.arrival for entry in queue] == sorted(
        waiting.values(), key=lambda a: (a.priority, a.request_id)
    )
    assert queue.num_tokens == sum(arrival.prompt_len for arrival in waiting.values())
    deadlines = sorted(a.deadline_us for a in waiting.values() if a.deadline_us is not None)
    assert queue.next_deadline_us == (deadlines[0] if deadlines else None)
    expired = []
    while (entry := queue.expired(now_us)) is not None:
        queue.remove(entry.arrival.request_id)
        expired.append(entry.arrival.deadline_us)
    assert expired == [deadline for deadline in deadlines if deadline <= now_us]


def test_caps_refuse_by_name_and_a_request_that_resumes_is_beyond_them():
    queue = WaitingQueue(SchedulerConfig(max_queued_requests=2, max_queued_tokens=100))
    queue.append(Arrival(1, 60, 10), 0)
    assert (
        "holds 60 prompt tokens and cannot take 41 more: max_queued_tokens is 100"
        in queue.refusal(Arrival(2, 41, 9))
    )
    assert queue.refusal(Arrival(2, 40, 9)) is None
    queue.append(Arrival(2, 40, 9), 0)
    assert queue.refusal(Arrival(3, 1, 1)) == "the waiting queue is full: max_queued_requests is 2"
    queue.append(Arrival(4, 90, 1, resumes=True), 0)
    assert (len(queue), queue.num_tokens) == (3, 190)


def test_a_deadline_from_before_a_preemption_is_forgotten():
    queue = WaitingQueue(SchedulerConfig())
    queue.append(Arrival(1, 10, 9, deadline_us=50), 0)
    queue.remove(1)
    queue.append(Arrival(1, 12, 7, resumes=True), 40)
    assert queue.next_deadline_us is None and queue.expired(60) is None


def test_a_later_attempt_in_the_call_that_refuses_the_earlier_one_goes_on():
    """Once it was told refused and was placed later: nobody had its prompt any more."""
    scheduler = Scheduler(ClusterConfig(num_instances=1), SchedulerConfig(max_queued_requests=1))
    first = [Arrival(number, 10, 10) for number in (1, 2)]
    plan = scheduler.plan_window([TermEnded(), *first, Arrival(2, 10, 10, attempt=1)], 0)
    assert not plan.ended and not plan.placements
    plan = scheduler.plan_window([Regrouped(1), Resubmitted()], 0)
    assert [placement.request_id for placement in plan.placements] == [1, 2]
