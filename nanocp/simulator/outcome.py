"""Metrics of a simulated run: TTFT, TPOT, SLO attainment, balance, queueing, scheduler time."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from nanocp.simulator.costs.cost import LayerTime, Loads, StepTime
from nanocp.simulator.loads.workload_request import WorkloadRequest
from nanocp.values.plan import InstanceLoad, Placement, Plan

ATTAINMENT = 0.99
"""Share of the requests that must meet the SLO (6.1)."""
LEAST_ALLOWED_MISSES = 20
"""Fewer allowed misses make a verdict depend on a handful of requests."""
JUDGED_FOR_A_VERDICT = 2_200
"""Arrivals in a run of default length, with a tenth to spare."""


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency targets of a request; it misses if either is exceeded."""

    tpot_us: int = 50_000
    """Mean microseconds per token after the first, at most (6.1)."""
    ttft_us: int = 500_000
    """Microseconds from arrival to the first token, at most."""

    def __post_init__(self) -> None:
        if min(self.tpot_us, self.ttft_us) < 1:
            raise ValueError(
                f"the SLO is {self.tpot_us} us for a token and {self.ttft_us} us to the first; "
                "both must be positive"
            )


@dataclass(frozen=True, slots=True)
class Run:
    """Length and SLO of a run."""

    warm_up_us: int
    measure_us: int
    slo: Slo = field(default_factory=Slo)
    max_misses: int | None = None
    """Stop when more requests than this have missed the SLO: the verdict is settled."""

    def __post_init__(self) -> None:
        if self.warm_up_us < 0 or self.measure_us < 1:
            raise ValueError(
                f"warm-up is {self.warm_up_us} us and measurement {self.measure_us} us; the first "
                "must not be negative, the second must be positive"
            )

    @property
    def end_us(self) -> int:
        """Microseconds at the end of the run."""
        return self.warm_up_us + self.measure_us


def measure_us_at(rate_per_s: float) -> int:
    """Microseconds to measure at a rate for 20 allowed misses, at least 60 s."""
    return round(1e6 * max(60.0, JUDGED_FOR_A_VERDICT / rate_per_s))


class Latency(NamedTuple):
    """Microseconds of one judged request; a late one has lower bounds."""

    ttft_us: float
    tpot_us: float | None
    """(last token - first token) / (tokens - 1). None: it has one token, or has not begun."""
    normalized_us: float
    """(last token - arrival) / tokens: the paper's normalized latency."""

    def meets(self, slo: Slo) -> bool:
        return self.ttft_us <= slo.ttft_us and (self.tpot_us or 0) <= slo.tpot_us


@dataclass(frozen=True, slots=True)
class Outcome:
    """Metrics of a run after the warm-up; means are over time."""

    num_judged: int
    """Requests that ended after the warm-up, or have missed the SLO already."""
    num_missed: int
    num_refused: int
    num_not_judged: int
    """Requests that began before the run, or still run and are not late."""
    attainment: float
    """Share of the judged that met the SLO; 0 if none was judged."""
    ttft_ms_p50: float
    ttft_ms_p99: float
    tpot_ms_p50: float
    tpot_ms_p99: float
    normalized_ms_p50: float
    normalized_ms_p99: float
    normalized_attainment: float
    """Share of the judged with normalized latency within the TPOT target (Figure 12)."""
    queueing_ms_p99: float
    step_ms_mean: float
    step_ms_max: float
    num_rows_mean: float
    kv_tokens_mean: float
    """KV tokens of the cluster."""
    kv_tokens_median: float
    """KV tokens of the median instance."""
    num_waiting_mean: float
    num_waiting_max: int
    free_frames_share_while_waiting: float
    """Mean share of all frames that are free while requests wait (Figure 14)."""
    frames_used_share: float
    """Share of all frames that hold or are reserved for pages."""
    kv_imbalance: float
    """(max - mean) / mean of KV tokens over the instances."""
    row_imbalance: float
    cp_share: float
    cp_share_max: float
    layer_us: LayerTime
    layer_us_max: LayerTime
    plan_ms_mean: float
    """Scheduler CPU time per window."""
    plan_share: float
    """Scheduler CPU time over simulated time (Figure 16)."""
    num_windows: int
    is_hopeless: bool
    drift: float
    """Mean number of requests in the second half over the first, less 1, corrected for arrivals."""
    is_drifting: bool
    """The drift is significant: the run is in no steady state."""
    two_lanes_share: float = 0.0
    scheduled_share: float = 0.0
    """Share of the windows that ran a searched schedule."""
    prefix_hit_rate: float = 0.0
    """Share of the run's prompt tokens with page hashes whose pages were shared."""
    host_hit_rate: float = 0.0
    """Share of those tokens whose pages came from host memory."""

    @property
    def num_allowed_misses(self) -> int:
        """Misses that 99% of the judged allow."""
        return int((1 - ATTAINMENT) * self.num_judged + 1e-9)

    @property
    def is_sustained(self) -> bool:
        """Whether 99% met the SLO, and the cluster does not fill up."""
        grows = self.is_drifting and self.drift > 0
        return self.attainment >= ATTAINMENT and not self.is_hopeless and not grows


@dataclass(slots=True)
class Half:
    """One half of the measured time."""

    time_us: int = 0
    steps: int = 0
    requests: float = 0.0

    @property
    def mean(self) -> float:
        """Mean requests in the cluster; 0 if no window began in this half."""
        return self.requests / max(self.time_us, 1)


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
    frames_used: float = 0.0
    kv_imbalance: float = 0.0
    row_imbalance: float = 0.0
    cp_share: float = 0.0
    layer: list[float] = field(default_factory=lambda: [0.0] * len(LayerTime._fields))
    step_us_max: int = 0
    waiting_max: int = 0
    cp_share_max: float = 0.0
    two_lanes: int = 0
    scheduled: int = 0
    layer_max: list[float] = field(default_factory=lambda: [0.0] * len(LayerTime._fields))
    plan_ns: int = 0
    halves: list[Half] = field(default_factory=lambda: [Half(), Half()])


class Recorder:
    """Collects a run's events and computes its Outcome."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._num_requests = 0
        self._arrivals: dict[int, WorkloadRequest] = {}
        self._asked: list[tuple[int, int]] = []  # when each arrived, its output tokens
        self._first_token_us: dict[int, int] = {}
        self._degrees: dict[int, int] = {}
        self._num_multi = 0
        self._latencies: list[Latency] = []
        self._queueing_us: list[int] = []
        self._num_missed = 0
        self._num_refused = 0
        self._num_not_judged = 0
        self._sums = _Sums()
        self._num_frames = 0
        self._now_us = 0

    @property
    def is_hopeless(self) -> bool:
        """Whether more requests have missed the SLO than the run allows."""
        return self.run.max_misses is not None and self._num_missed > self.run.max_misses

    def arrived(self, request: WorkloadRequest) -> int:
        """Record an arrival; returns the request's id."""
        self._num_requests += 1
        self._arrivals[self._num_requests] = request
        self._asked.append((request.arrival_us, request.output_len))
        return self._num_requests

    def refused(self, request_id: int) -> None:
        """Record a request that the scheduler ended."""
        del self._arrivals[request_id]
        self._num_multi -= self._degrees.pop(request_id, 1) > 1
        self._num_refused += 1
        self._num_missed += 1

    def planned(self, plan_ns: int, plan: Plan) -> None:
        """Record the scheduler's answer."""
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
        """Advance the time."""
        self._now_us = now_us

    def first_token(self, request_id: int, at_us: int) -> None:
        """Record the first token, at at_us."""
        self._first_token_us[request_id] = at_us

    def finished(self, request_id: int, at_us: int) -> None:
        """Record the last token, at at_us."""
        request = self._arrivals.pop(request_id)
        first_us = self._first_token_us.pop(request_id)
        self._num_multi -= self._degrees.pop(request_id) > 1
        if at_us < self.run.warm_up_us:
            return
        if request.is_running:
            self._num_not_judged += 1
            return
        latency = latency_of(request, first_us, at_us)
        self._latencies.append(latency)
        self._num_missed += not latency.meets(self.run.slo)

    def window(
        self,
        begins_us: int,
        step: StepTime,
        num_steps: int,
        loads: Loads,
        loads_now: tuple[InstanceLoad, ...],
        num_waiting: int,
    ) -> None:
        """Record a window that was sent."""
        sums = self._sums
        if begins_us < self.run.warm_up_us:
            sums.plan_ns = 0
            return
        time_us = step.step_us * num_steps
        num_rows = sum(loads.rows)
        sums.time_us += time_us
        sums.steps += num_steps
        sums.windows += 1
        sums.two_lanes += step.two_lanes
        sums.scheduled += step.by_schedule
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
        half = sums.halves[begins_us >= self.run.warm_up_us + self.run.measure_us // 2]
        half.time_us += time_us
        half.steps += num_steps
        half.requests += len(self._arrivals) * time_us
        free = sum(load.frames_free for load in loads_now)
        total = self._num_frames = self._num_frames or _num_frames(loads_now)
        sums.frames_used += (1 - free / total) * time_us
        if num_waiting:
            sums.waiting += num_waiting * time_us
            sums.waiting_max = max(sums.waiting_max, num_waiting)
            sums.waiting_time_us += time_us
            sums.free_while_waiting += free / total * time_us

    def latencies(self) -> list[Latency]:
        """Latencies of the judged that were not refused; a late one has lower bounds."""
        return [*self._latencies, *self._late()]

    def _late(self) -> Iterator[Latency]:
        now_us = self._now_us
        for request_id, request in self._arrivals.items():
            # The first token may be of a window that has been sent and has not ended.
            first_us = min(self._first_token_us.get(request_id, now_us), now_us)
            latency = latency_of(request, first_us, now_us)
            if first_us == now_us:
                latency = latency._replace(tpot_us=None)
            if not request.is_running and not latency.meets(self.run.slo):
                yield latency

    def _drift_of_arrivals(self) -> float:
        run, first = self.run, self._sums.halves[0]
        tpot_us = first.time_us / max(first.steps, 1)
        edges = run.warm_up_us, run.warm_up_us + run.measure_us // 2, run.end_us
        began = [(at, n) for at, n in self._asked if not at]
        later = [n for at, n in self._asked if at]
        even = [(run.end_us * i // len(later), n) for i, n in enumerate(later)]
        came, evenly = (
            [
                sum(max(0, min(at + n * tpot_us, high) - max(at, low)) for at, n in asked)
                for low, high in pairwise(edges)
            ]
            for asked in (self._asked, began + even)
        )
        return came[1] * evenly[0] / (came[0] * evenly[1]) - 1 if all(came + evenly) else 0.0

    def outcome(self) -> Outcome:
        """The metrics so far."""
        sums = self._sums
        latencies, slo = self.latencies(), self.run.slo
        num_late = len(latencies) - len(self._latencies)
        num_judged = len(latencies) + self._num_refused
        num_missed = self._num_missed + num_late
        ttfts = sorted(latency.ttft_us for latency in latencies)
        tpots = sorted(latency.tpot_us for latency in latencies if latency.tpot_us is not None)
        normalized = sorted(latency.normalized_us for latency in latencies)
        before, after = (half.mean for half in sums.halves)
        of_arrivals = self._drift_of_arrivals()
        drift = after / before / (1 + of_arrivals) - 1 if before and after else 0.0
        # 5%, three standard deviations of a Poisson number, and longer steps while more run.
        chance = 0.05 + 3 / math.sqrt(max(before, 1.0)) + abs(of_arrivals) / 2
        time_us = max(sums.time_us, 1)
        return Outcome(
            num_judged=num_judged,
            num_missed=num_missed,
            num_refused=self._num_refused,
            num_not_judged=self._num_not_judged + len(self._arrivals) - num_late,
            attainment=1 - num_missed / num_judged if num_judged else 0.0,
            ttft_ms_p50=percentile(ttfts, 50) / 1e3,
            ttft_ms_p99=percentile(ttfts, 99) / 1e3,
            tpot_ms_p50=percentile(tpots, 50) / 1e3,
            tpot_ms_p99=percentile(tpots, 99) / 1e3,
            normalized_ms_p50=percentile(normalized, 50) / 1e3,
            normalized_ms_p99=percentile(normalized, 99) / 1e3,
            normalized_attainment=bisect_right(normalized, slo.tpot_us) / max(num_judged, 1),
            queueing_ms_p99=percentile(sorted(self._queueing_us), 99) / 1e3,
            step_ms_mean=sums.time_us / max(sums.steps, 1) / 1e3,
            step_ms_max=sums.step_us_max / 1e3,
            num_rows_mean=sums.rows / time_us,
            kv_tokens_mean=sums.kv_tokens / time_us,
            kv_tokens_median=sums.kv_tokens_median / time_us,
            num_waiting_mean=sums.waiting / time_us,
            num_waiting_max=sums.waiting_max,
            free_frames_share_while_waiting=sums.free_while_waiting / max(sums.waiting_time_us, 1),
            frames_used_share=sums.frames_used / time_us,
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
            two_lanes_share=sums.two_lanes / max(sums.windows, 1),
            scheduled_share=sums.scheduled / max(sums.windows, 1),
            drift=drift,
            is_drifting=abs(drift) > chance,
        )


def latency_of(request: WorkloadRequest, first_us: float, last_us: float) -> Latency:
    """Latency of a request with its last token at last_us or later."""
    num_later = request.output_len - 1
    return Latency(
        first_us - request.arrival_us,
        (last_us - first_us) / num_later if num_later else None,
        (last_us - request.arrival_us) / request.output_len,
    )


def _num_frames(loads: tuple[InstanceLoad, ...]) -> int:
    return sum(one.frames_free + one.frames_committed + one.frames_quarantined for one in loads)


def percentile(ascending: list[float] | list[int], percent: float) -> float:
    """The nearest-rank percentile; 0 of nothing."""
    if not ascending:
        return 0.0
    return ascending[max(0, math.ceil(len(ascending) * percent / 100) - 1)]


def _imbalance(values: list[int]) -> float:
    total = sum(values)
    return max(values) * len(values) / total - 1 if total > 0 else 0.0
