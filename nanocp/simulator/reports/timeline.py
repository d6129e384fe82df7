"""A run over time, as samples of the cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nanocp.simulator.costs.cost import Loads, StepTime
from nanocp.simulator.outcome import Recorder, Run
from nanocp.values.plan import PAGE_SIZE, InstanceLoad

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


class TimelineRecorder(Recorder):
    """A Recorder that also samples the cluster over time."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.samples: list[Sample] = []
        self._next_sample_us = run.warm_up_us
        self._plan_ns_before = self._num_windows_before = 0

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
