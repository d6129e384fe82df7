"""Front ends of a hash cluster as processes, and their clients."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from control_plane.frontend.client_stream import ClientStream
from control_plane.observe.observer import EndedRequest
from control_plane.ports.controller_interface import Submission
from harness.hash_clusters.hash_parts import Unobserved
from harness.hash_clusters.hash_recovery import ReseedingStreams
from nanocp.values.plan import Ended, FinishReason, Placement, Preempted
from nanocp.values.sampling import SamplingParams

NUM_FRONT_ENDS = 2


@dataclass(eq=False)
class Caller:
    """A client with one request, and what it was given."""

    client_id: str
    prompt_ids: list[int]
    params: SamplingParams
    given: list[int] = field(default_factory=list)
    attempt: int = 0
    process: FrontEndProcess | None = None
    """Where it reads; None before its first call, and after a call that broke."""
    stream: ClientStream | None = None
    is_over: bool = False


class FrontEndProcess(Unobserved):
    """One process of a front end, and what is under way between it and the controller."""

    def __init__(self, index: int, cluster: Any) -> None:
        self.index = index
        self.up: deque[Callable[[], None]] = deque()
        self.down: deque[Callable[[], None]] = deque()
        self.is_open = False
        """Whether it takes requests: some controller has opened it."""
        self.is_attached = False
        self.newest_id = 0
        """The newest number that it has used; 0: none."""
        self.num_owed = 0
        """Terms for which the controller awaits its open requests."""
        self._cluster = cluster
        steps = cluster.config.scheduler.steps_per_window
        self.streams = ReseedingStreams(
            f"front-end:{index}", 1 << 30, self, id_step=NUM_FRONT_ENDS, steps_per_window=steps,
            is_remote=True, hashes_output=cluster.config.scheduler.offload_host_pages > 0,
        )  # fmt: skip

    def opened(self, first_id: int) -> None:
        """A controller takes requests from it."""
        self.streams.connect(self, first_id)
        self.streams.interrupted()
        self.is_open = True

    def on_finished(self, reason: FinishReason, times: EndedRequest) -> None:
        """See Observer."""
        self.up.append(partial(self._cluster.attendance.ended, times.request_id))

    # --- controller_interface.ControllerInterface

    def submit(self, submission: Submission) -> None:
        """See ControllerInterface."""
        self.newest_id = max(self.newest_id, submission.request_id)
        self._cluster.expect(submission)
        self.up.append(partial(self._cluster.submitted, submission))

    def resubmitted(self) -> None:
        """See ControllerInterface."""
        self.up.append(partial(self._cluster.answered, self))

    def abort(self, request_id: int) -> None:
        """See ControllerInterface."""
        self.up.append(partial(self._cluster.abort, request_id))


class PortOfAll:
    """The front ends, as the controller knows them (ControllerEvents)."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster

    def placed(self, placement: Placement, num_cached: int | None = None) -> None:
        """See ControllerEvents."""
        self._send(placement.request_id, "placed", placement, num_cached)

    def preempted(self, preempted: Preempted) -> None:
        """See ControllerEvents."""
        self._send(preempted.request_id, "preempted", preempted)

    def ended(self, ended: Ended) -> None:
        """See ControllerEvents."""
        self._send(ended.request_id, "ended", ended)

    def tokens_lost(self, request_id: int, sentence: str) -> None:
        """See ControllerEvents."""
        self._send(request_id, "tokens_lost", request_id, sentence)

    def interrupted(self) -> int:
        """See ControllerEvents."""
        attached = [each for each in self._cluster.attached if each is not None]
        for process in attached:
            process.num_owed += 1
            process.down.append(process.streams.interrupted)
        return len(attached)

    def _send(self, request_id: int, name: str, *message: object) -> None:
        process = self._cluster.attached[self._cluster.attendance.owner(request_id)]
        if process is not None:
            process.down.append(partial(getattr(process.streams, name), *message))
