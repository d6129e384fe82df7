"""The view of a scheduler that metrics and pages read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from control_plane.scheduler.pages.prefix_sharing import PrefixSharing
from control_plane.scheduler.queue.fair_share import FairShare
from control_plane.scheduler.queue.waiting_queue import WaitingQueue
from control_plane.scheduler.state.cluster_state import ClusterState
from nanocp.values.plan import InstanceLoad


class ObservedScheduler(Protocol):
    """A scheduler between two calls, to look at only; see scheduler.scheduler.Scheduler."""

    prefix_sharing: PrefixSharing
    fair_share: FairShare

    @property
    def decided(self) -> tuple[ClusterState, WaitingQueue]:
        """The placed requests with their loads, and the waiting ones."""

    def loads(self) -> tuple[InstanceLoad, ...]:
        """Return the decided load of each instance; a pipeline is one instance."""

    @property
    def noted(self) -> Mapping[int, str]:
        """The reasons why requests were not placed in the latest call."""

    @property
    def num_waiting(self) -> int:
        """The number of requests in the waiting queue."""

    @property
    def num_held(self) -> int:
        """The number of placed requests that wait for their next attempt."""

    @property
    def num_running(self) -> int:
        """The number of placed requests that have not ended."""

    @property
    def next_deadline_us(self) -> int | None:
        """The latest time for the next call of the scheduler."""

    @property
    def newest_ticket(self) -> int:
        """The last ticket that was issued, 0 before the first."""
