"""A line of the log with the cluster's load, now and then."""

from __future__ import annotations

import logging

from control_plane.observe.observed import ObservedScheduler
from control_plane.scheduler.state.request import State
from nanocp.logs import fields

logger = logging.getLogger("nanocp.load")

PERIOD_S = 10.0
"""Time between two lines."""


def num_prefilling(scheduler: ObservedScheduler) -> int:
    """Count placed requests without their KV. Visits every placed request."""
    requests = scheduler.requests.decided[0].requests.values()
    return sum(request.state is State.TRANSFERRING for request in requests)


class LoadLog:
    """Called from the controller's thread."""

    def __init__(self, now_s: float) -> None:
        self._last_s = now_s
        self._last_tokens = 0

    def tick(self, now_s: float, scheduler: ObservedScheduler, num_tokens: int) -> None:
        """Log the load once a period while requests are open."""
        lasted_s = now_s - self._last_s
        if lasted_s < PERIOD_S:
            return
        new_tokens = num_tokens - self._last_tokens
        self._last_s, self._last_tokens = now_s, num_tokens
        if not (scheduler.requests.num_running or scheduler.requests.num_waiting or new_tokens):
            return
        prefilling, loads = num_prefilling(scheduler), scheduler.requests.loads()
        free = sum(load.frames_free for load in loads)
        frames = sum(load.num_frames for load in loads) or 1
        logger.info(
            "load",
            extra=fields(
                running=scheduler.requests.num_running - prefilling,
                prefilling=prefilling,
                queued=scheduler.requests.num_waiting,
                tokens_per_s=round(new_tokens / lasted_s, 1),
                frames_free=free,
                kv_usage=round(1 - free / frames, 3),
            ),
        )
