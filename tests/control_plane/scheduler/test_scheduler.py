"""Scheduler: what each call promises, one test a promise."""

from control_plane.scheduler.scheduler import Scheduler
from harness.hash_clusters.followed_tables import FollowedScheduler
from nanocp.config.cluster import ClusterConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.values.plan import Arrival


def test_a_full_queue_costs_a_call_no_more_than_32_tries():
    """One request fills the cluster; of 200 that wait, each may be overtaken by those after it."""
    cluster = ClusterConfig(num_instances=1, num_frames=4)
    scheduler = Scheduler(cluster, SchedulerConfig(max_overtake_us=10**9))
    policy = scheduler._policy
    place, tried = policy.place, []

    def counted(state, prompt_len, window):
        tried.append(prompt_len)
        return place(state, prompt_len, window)

    policy.place = counted
    arrivals = [Arrival(number, 200, 40, needs_prefill=False) for number in range(1, 202)]
    scheduler.plan_window(arrivals, now_us=0)
    assert (scheduler.requests.num_running, scheduler.requests.num_waiting) == (1, 200)
    assert len(tried) == 1 + 32


def test_frames_that_stand_empty_are_bounded_and_a_prompt_that_arrives_makes_room():
    """A request whose KV is there is placed at once; a long prompt alone is placed in any case."""
    cluster = ClusterConfig(num_instances=1, num_frames=100)
    scheduler = FollowedScheduler(cluster, max_unfilled_tokens=1000, prefix_sharing=False)
    arrivals = [Arrival(number, length, 8) for number, length in ((1, 2000), (2, 400), (3, 500))]
    plan = scheduler.plan(*arrivals, Arrival(4, 600, 8), Arrival(5, 600, 8, needs_prefill=False))
    placed = [plan.placements]
    for _ in range(3):
        plan = scheduler.arrived(plan)
        placed.append(plan.placements)
    assert [[each.request_id for each in placements] for placements in placed] == [
        [1, 5], [2, 3], [4], [],
    ]  # fmt: skip
    assert scheduler.scheduler.tickets.num_unfilled_tokens == 0
