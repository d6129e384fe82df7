"""All requests of a scheduler: those that wait, and those that are placed."""

from __future__ import annotations

from control_plane.scheduler.pages.quarantine import Quarantine
from control_plane.scheduler.queue.admission import Admission
from control_plane.scheduler.queue.waiting_queue import WaitingQueue
from control_plane.scheduler.state.cluster_state import ClusterState
from control_plane.scheduler.state.frame_ledger import FrameRun
from nanocp.values.plan import InstanceLoad, Placement


class KnownRequests:
    """What others read between two calls, and frames that go from ended requests to new ones."""

    def __init__(self, state: ClusterState, admission: Admission, quarantine: Quarantine) -> None:
        self._state = state
        self._admission = admission
        self._quarantine = quarantine
        self.fair_share = admission.fair_share

    @property
    def decided(self) -> tuple[ClusterState, WaitingQueue]:
        """The placed requests with their loads, and the waiting ones: to look at only."""
        return self._state, self._admission.queue

    def loads(self) -> tuple[InstanceLoad, ...]:
        """What is decided for each instance, in the order of instances; a pipeline is one."""
        return tuple(self._state.load(instance) for instance in range(len(self._state.frames)))

    @property
    def num_waiting(self) -> int:
        """Requests in the waiting queue, and preempted ones on their way back to it."""
        return len(self._admission)

    @property
    def num_running(self) -> int:
        """Requests that are placed and have not ended: in transfer, runnable, running or parked."""
        return len(self._state.requests)

    def placement(self, request_id: int) -> Placement | None:
        """Where a placed request is; None if it waits, has ended or is unknown."""
        request = self._state.requests.get(request_id)
        return request.placement(self._state.step) if request else None

    def free(self, *released: dict[int, list[FrameRun]]) -> None:
        """Free frames, by instance, that nothing writes to any more."""
        for held in released:
            for instance, runs in held.items():
                self._state.frames[instance].free(runs)
            self._admission.should_walk = True

    def give_up(self) -> None:
        """Free the frames in quarantine: no answer will come, and nothing will be placed."""
        self.free(*self._quarantine.give_up())
