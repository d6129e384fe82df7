"""A run over time: samples of the cluster, and the times of every request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nanocp.simulator.costs.cost import Loads, StepTime
from nanocp.simulator.loads.workload_request import WorkloadRequest
from nanocp.simulator.outcome import Recorder, Run
from nanocp.values.plan import PAGE_SIZE, InstanceLoad, Placement

NUM_SAMPLES = 120


@dataclass(frozen=True, slots=True)
class Sample:
    """The cluster while one window runs; lists and tuples are by instance."""

    begins_us: int
    step: StepTime
    num_steps: int
    loads: Loads
    frames_free: tuple[int, ...]
    num_waiting: int
    head_pages: int
    """Pages of the prompt that has waited longest; 0 if none waits."""
    num_placed: int
    num_with_cp: int
    plan_us: float

    @property
    def cp_share(self) -> float:
        """Share of placed requests with CP."""
        return self.num_with_cp / max(self.num_placed, 1)

    @property
    def plan_share(self) -> float:
        """Scheduler CPU time over simulated time."""
        return self.plan_us / (self.step.step_us * self.num_steps)

    def relative(self, load: Literal["kv_tokens", "rows"]) -> list[float]:
        """Each instance's load divided by the mean; all 1 if there is no load."""
        values: list[int] = getattr(self.loads, load)
        total = sum(values)
        return [value * len(values) / total if total else 1.0 for value in values]


@dataclass(slots=True)
class RequestTimes:
    """One request, from arrival to end. A time is None if it is after the run."""

    request: WorkloadRequest
    placed_us: int | None = None
    first_token_us: int | None = None
    ended_us: int | None = None
    cp_degree: int = 0
    is_refused: bool = False


class TimelineRecorder(Recorder):
    """A Recorder that also samples the cluster over time."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.samples: list[Sample] = []
        self.requests: dict[int, RequestTimes] = {}
        self._next_sample_us = run.warm_up_us
        self._plan_ns_before = self._num_windows_before = 0

    def arrived(self, request: WorkloadRequest) -> int:
        request_id = super().arrived(request)
        self.requests[request_id] = RequestTimes(request)
        return request_id

    def refused(self, request_id: int) -> None:
        super().refused(request_id)
        self.requests[request_id].ended_us = self._now_us
        self.requests[request_id].is_refused = True

    def _placed(self, placement: Placement) -> None:
        super()._placed(placement)
        times = self.requests[placement.request_id]
        if times.placed_us is None:
            times.placed_us = self._now_us
        times.cp_degree = max(times.cp_degree, self._degrees[placement.request_id])

    def first_token(self, request_id: int, at_us: int) -> None:
        super().first_token(request_id, at_us)
        self.requests[request_id].first_token_us = at_us

    def finished(self, request_id: int, at_us: int) -> None:
        super().finished(request_id, at_us)
        self.requests[request_id].ended_us = at_us

    def window(
        self,
        begins_us: int,
        step: StepTime,
        num_steps: int,
        loads: Loads,
        loads_now: tuple[InstanceLoad, ...],
        num_waiting: int,
    ) -> None:
        super().window(begins_us, step, num_steps, loads, loads_now, num_waiting)
        if begins_us < self._next_sample_us:
            return
        sums = self._sums
        plan_ns, num_windows = (
            sums.plan_ns - self._plan_ns_before,
            sums.windows - self._num_windows_before,
        )
        self._plan_ns_before, self._num_windows_before = sums.plan_ns, sums.windows
        self._next_sample_us = begins_us + -(-self.run.measure_us // NUM_SAMPLES)
        self.samples.append(
            Sample(
                begins_us=begins_us,
                step=step,
                num_steps=num_steps,
                loads=loads,
                frames_free=tuple(load.frames_free for load in loads_now),
                num_waiting=num_waiting,
                head_pages=self._head_pages() if num_waiting else 0,
                num_placed=len(self._degrees),
                num_with_cp=self._num_multi,
                plan_us=plan_ns / num_windows / 1e3,
            )
        )

    def _head_pages(self) -> int:
        waiting = (
            request
            for request_id, request in self._arrivals.items()
            if request_id not in self._degrees
        )
        head = next(waiting)
        return -(-head.prompt_len // PAGE_SIZE)
