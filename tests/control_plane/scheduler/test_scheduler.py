"""Scheduler: what each call promises, one test a promise."""

from control_plane.scheduler.scheduler import Scheduler
from nanocp.config import ClusterConfig, SchedulerConfig
from nanocp.plan import Arrival


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
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 200)
    assert len(tried) == 1 + 32
