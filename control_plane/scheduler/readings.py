"""What others read of a scheduler between two calls: loads, placements, how many requests do what.

Enters: the state of a scheduler. Leaves: values. Changes nothing. Does not know: events, plans.
"""

from __future__ import annotations

from collections.abc import Mapping

from control_plane.scheduler.pages.tickets import Tickets
from control_plane.scheduler.queue.admission import Admission
from control_plane.scheduler.queue.waiting_queue import WaitingQueue, earliest
from control_plane.scheduler.state.cluster_state import ClusterState
from control_plane.scheduler.terms.held_requests import HeldRequests
from nanocp.values.plan import InstanceLoad, Placement


class Readings:
    """A scheduler, to look at only."""

    _state: ClusterState
    _admission: Admission
    _held: HeldRequests
    _tickets: Tickets

    @property
    def decided(self) -> tuple[ClusterState, WaitingQueue]:
        """The placed requests with their loads, and the waiting ones: to look at only."""
        return self._state, self._admission.queue

    def loads(self) -> tuple[InstanceLoad, ...]:
        """What is decided for each instance, in the order of instances."""
        return tuple(self._state.load(instance) for instance in range(len(self._state.frames)))

    @property
    def noted(self) -> Mapping[int, str]:
        """Why waiting requests were not placed in the latest call: the bound and a sentence.

        By request id; each request is noted once a second at most.
        """
        return self._admission.noted

    @property
    def num_waiting(self) -> int:
        """Requests in the waiting queue, and preempted ones on their way back to it."""
        return len(self._admission)

    @property
    def num_held(self) -> int:
        """Placed requests without a row that wait for their next attempt."""
        return len(self._held)

    @property
    def next_deadline_us(self) -> int | None:
        """When the next waiting or held request expires, in us: call again by then."""
        return earliest(self._admission.next_deadline_us, self._held.next_deadline_us)

    @property
    def newest_ticket(self) -> int:
        """The last ticket that was issued, 0 before the first: tickets only grow."""
        return self._tickets.num_issued

    @property
    def num_running(self) -> int:
        """Requests that are placed and have not ended: in transfer, runnable, running or parked."""
        return len(self._state.requests)

    def placement(self, request_id: int) -> Placement | None:
        """Where a placed request is; None if it waits, has ended or is unknown."""
        request = self._state.requests.get(request_id)
        return request.placement(self._state.step) if request else None
