"""A scheduler of two seats of 8 frames: seat 1 was drained, seat 0 is full, and a request waits."""

from control_plane.scheduler.scheduler import Scheduler
from nanocp.config.cluster import ClusterConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.values.plan import Arrival, Regrouped, SeatsWanted, TransferDone, WindowDone

CLUSTER = ClusterConfig(num_instances=2, num_frames=8, max_model_len=1000)
BEFORE = (WindowDone(0, 0), WindowDone(1, 0))
"""What the seats had reported."""


def drained_scheduler(now_us: int = 0) -> Scheduler:
    """The scheduler, whose clock stands at now_us."""
    scheduler = Scheduler(CLUSTER, SchedulerConfig())
    (settled := scheduler.plan_window([SeatsWanted((0,))], now_us))
    assert settled.is_settled
    scheduler.plan_window([Regrouped(2, (0,), True)], now_us)
    plan = scheduler.plan_window([Arrival(1, 400, 112), Arrival(2, 200, 10)], now_us)
    scheduler.plan_window([TransferDone(plan.transfers[0].ticket, 0)], now_us)
    assert (scheduler.requests.num_running, scheduler.requests.num_waiting) == (1, 1)
    return scheduler
