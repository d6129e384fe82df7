"""What metrics and views read of a scheduler: a protocol.

Enters: nothing. Leaves: a protocol. Does not know: which scheduler it is.
"""

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
        """What is decided for each instance; a pipeline is one instance."""

    @property
    def noted(self) -> Mapping[int, str]:
        """Why waiting requests were not placed in the latest call."""

    @property
    def num_waiting(self) -> int:
        """Requests in the waiting queue."""

    @property
    def num_held(self) -> int:
        """Placed requests that wait for their next attempt."""

    @property
    def num_running(self) -> int:
        """Requests that are placed and have not ended."""

    @property
    def next_deadline_us(self) -> int | None:
        """When to call the scheduler again at the latest."""

    @property
    def newest_ticket(self) -> int:
        """The last ticket that was issued, 0 before the first."""
