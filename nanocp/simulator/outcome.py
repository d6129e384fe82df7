"""What a run shows: time per token, attainment, imbalance, queueing, the scheduler's own time.

Enters: what happens, as it happens. Leaves: an Outcome of numbers. Does not know: how any of it
came about.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median

from nanocp.plan import InstanceLoad, Placement, Plan
from nanocp.simulator.cost import LayerTime, Loads, StepTime
from nanocp.simulator.workload_request import WorkloadRequest


@dataclass(frozen=True, slots=True)
class Run:
    """How long a run is, and what it is judged by."""

    warm_up_us: int
    measure_us: int
    slo_us: int = 50_000
    """Most microseconds for an output token (6.1), queueing included."""
    max_misses: int | None = None
    """Stop as soon as more requests than this have missed it: the rest would not change the
    verdict."""

    def __post_init__(self) -> None:
        if self.warm_up_us < 0 or self.measure_us < 1 or self.slo_us < 1:
            raise ValueError(
                f"warm-up is {self.warm_up_us} us, measurement {self.measure_us} us and SLO {self.slo_us} us; the "
                "first must not be negative, the others must be positive"
            )

    @property
    def end_us(self) -> int:
        """When the run ends."""
        return self.warm_up_us + self.measure_us


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run's numbers, all of the time after the warm-up; means are over time."""

    num_judged: int
    """Requests that ended in that time, or are still there and have missed the SLO already."""
    num_missed: int
    num_refused: int
    attainment: float
    """Share of the judged that met the SLO; 0 if none was judged."""
    tpot_ms_p50: float
    tpot_ms_p99: float
    """From arrival to the last token, by output token: queueing and the KV's transfer are in it."""
    queueing_ms_p99: float
    """From arrival to placement."""
    step_ms_mean: float
    step_ms_max: float
    num_rows_mean: float
    """Rows of the cluster."""
    kv_tokens_mean: float
    """KV tokens of the cluster that attention reads."""
    kv_tokens_median: float
    """Of the median instance."""
    num_waiting_mean: float
    num_waiting_max: int
    free_frames_share_while_waiting: float
    """Mean share of all frames that are free while requests wait: memory that cannot be used
    (Figure 14)."""
    kv_imbalance: float
    """(max - mean) / mean of KV tokens over the instances."""
    row_imbalance: float
    cp_share: float
    """Placed requests with a CP degree above 1, as a share of all placed."""
    cp_share_max: float
    layer_us: LayerTime
    """Mean of the slowest instance's layer."""
    layer_us_max: LayerTime
    """The most of each."""
    plan_ms_mean: float
    """Time of the brain a window, on the processor: what else runs on the machine does not count.
    """
    plan_share: float
    """The same as a share of the window's simulated time (Figure 16)."""
    num_windows: int
    is_hopeless: bool
    """Stopped early: max_misses was passed."""
    prefix_hit_rate: float = 0.0
    """Share of the whole run's prompt tokens with page hashes whose pages were there and were
    shared."""


@dataclass(slots=True)
class _Sums:
    """Sums over the windows after the warm-up, weighted by their time."""

    time_us: int = 0
    steps: int = 0
    windows: int = 0
    rows: float = 0.0
    kv_tokens: float = 0.0
    kv_tokens_median: float = 0.0
    waiting: float = 0.0
    waiting_time_us: int = 0
    free_while_waiting: float = 0.0
    kv_imbalance: float = 0.0
    row_imbalance: float = 0.0
    cp_share: float = 0.0
    layer: list[float] = field(default_factory=lambda: [0.0] * len(LayerTime._fields))
    step_us_max: int = 0
    waiting_max: int = 0
    cp_share_max: float = 0.0
    layer_max: list[float] = field(default_factory=lambda: [0.0] * len(LayerTime._fields))
    plan_ns: int = 0


class Recorder:
    """Takes notes."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._num_requests = 0
        self._arrivals: dict[int, WorkloadRequest] = {}
        self._degrees: dict[int, int] = {}
        self._num_multi = 0
        self._tpots_us: list[float] = []
        self._queueing_us: list[int] = []
        self._num_missed = 0
        self._num_refused = 0
        self._sums = _Sums()
        self._now_us = 0

    @property
    def is_hopeless(self) -> bool:
        """More requests have missed the SLO than the run allows."""
        return self.run.max_misses is not None and self._num_missed > self.run.max_misses

    def arrived(self, request: WorkloadRequest) -> int:
        """A request enters; returns its id."""
        self._num_requests += 1
        self._arrivals[self._num_requests] = request
        return self._num_requests

    def refused(self, request_id: int) -> None:
        """The brain ended it."""
        del self._arrivals[request_id]
        self._num_multi -= self._degrees.pop(request_id, 1) > 1
        self._num_refused += 1
        self._num_missed += 1

    def planned(self, plan_ns: int, plan: Plan) -> None:
        """The brain answered."""
        self._sums.plan_ns += plan_ns
        for placement in plan.placements:
            self._placed(placement)

    def _placed(self, placement: Placement) -> None:
        request_id, degree = placement.request_id, placement.cp_degree
        before = self._degrees.get(request_id)
        self._degrees[request_id] = degree
        self._num_multi += (degree > 1) - (before is not None and before > 1)
        if before is None and self._now_us >= self.run.warm_up_us:
            self._queueing_us.append(max(0, self._now_us - self._arrivals[request_id].arrival_us))

    def at(self, now_us: int) -> None:
        """Time goes on."""
        self._now_us = now_us

    def finished(self, request_id: int, at_us: int) -> None:
        """Its last token is there."""
        request = self._arrivals.pop(request_id)
        self._num_multi -= self._degrees.pop(request_id) > 1
        if at_us >= self.run.warm_up_us:
            tpot_us = (at_us - request.arrival_us) / request.output_len
            self._tpots_us.append(tpot_us)
            self._num_missed += tpot_us > self.run.slo_us

    def window(
        self,
        begins_us: int,
        step: StepTime,
        num_steps: int,
        loads: Loads,
        brain: tuple[InstanceLoad, ...],
        num_waiting: int,
    ) -> None:
        """A window was sent."""
        sums = self._sums
        if begins_us < self.run.warm_up_us:
            sums.plan_ns = 0
            return
        time_us = step.step_us * num_steps
        num_rows = sum(loads.rows)
        sums.time_us += time_us
        sums.steps += num_steps
        sums.windows += 1
        sums.rows += num_rows * time_us
        sums.kv_tokens += sum(loads.kv_tokens) * time_us
        sums.kv_tokens_median += median(loads.kv_tokens) * time_us
        sums.kv_imbalance += _imbalance(loads.kv_tokens) * time_us
        sums.row_imbalance += _imbalance(loads.rows) * time_us
        for index, us in enumerate(step.layer):
            sums.layer[index] += us * time_us
            sums.layer_max[index] = max(sums.layer_max[index], us)
        sums.step_us_max = max(sums.step_us_max, step.step_us)
        share = self._num_multi / max(len(self._degrees), 1)
        sums.cp_share += share * time_us
        sums.cp_share_max = max(sums.cp_share_max, share)
        if num_waiting:
            sums.waiting += num_waiting * time_us
            sums.waiting_max = max(sums.waiting_max, num_waiting)
            sums.waiting_time_us += time_us
            free = sum(load.frames_free for load in brain)
            total = sum(
                load.frames_free + load.frames_committed + load.frames_quarantined for load in brain
            )
            sums.free_while_waiting += free / total * time_us

    def tpots_us(self) -> list[float]:
        """Microseconds per token of the judged that were not refused, ascending.

        A request that is late already will end later still: the least that its time per token can
        be stands for it.
        """
        late = (
            (self._now_us - request.arrival_us) / request.output_len
            for request in self._arrivals.values()
            if self._now_us - request.arrival_us > self.run.slo_us * request.output_len
        )
        return sorted([*self._tpots_us, *late])

    def outcome(self) -> Outcome:
        """The numbers so far."""
        sums = self._sums
        tpots_us = self.tpots_us()
        num_judged = len(tpots_us) + self._num_refused
        num_missed = self._num_missed + len(tpots_us) - len(self._tpots_us)
        time_us = max(sums.time_us, 1)
        return Outcome(
            num_judged=num_judged,
            num_missed=num_missed,
            num_refused=self._num_refused,
            attainment=1 - num_missed / num_judged if num_judged else 0.0,
            tpot_ms_p50=percentile(tpots_us, 50) / 1e3,
            tpot_ms_p99=percentile(tpots_us, 99) / 1e3,
            queueing_ms_p99=percentile(sorted(self._queueing_us), 99) / 1e3,
            step_ms_mean=sums.time_us / max(sums.steps, 1) / 1e3,
            step_ms_max=sums.step_us_max / 1e3,
            num_rows_mean=sums.rows / time_us,
            kv_tokens_mean=sums.kv_tokens / time_us,
            kv_tokens_median=sums.kv_tokens_median / time_us,
            num_waiting_mean=sums.waiting / time_us,
            num_waiting_max=sums.waiting_max,
            free_frames_share_while_waiting=sums.free_while_waiting / max(sums.waiting_time_us, 1),
            kv_imbalance=sums.kv_imbalance / time_us,
            row_imbalance=sums.row_imbalance / time_us,
            cp_share=sums.cp_share / time_us,
            cp_share_max=sums.cp_share_max,
            layer_us=LayerTime(*(us / time_us for us in sums.layer)),
            layer_us_max=LayerTime(*sums.layer_max),
            plan_ms_mean=sums.plan_ns / max(sums.windows, 1) / 1e6,
            plan_share=sums.plan_ns / 1e3 / time_us,
            num_windows=sums.windows,
            is_hopeless=self.is_hopeless,
        )


def percentile(ascending: list[float] | list[int], percent: float) -> float:
    """Nearest rank; 0 of nothing."""
    if not ascending:
        return 0.0
    return ascending[max(0, math.ceil(len(ascending) * percent / 100) - 1)]


def _imbalance(values: list[int]) -> float:
    total = sum(values)
    return max(values) * len(values) / total - 1 if total > 0 else 0.0
