"""What the scheduler decided: loads, balance, admissions and refusals, and its own time.

Enters: the scheduler after each of its calls, and what a call did. Leaves: metrics. Does not know:
clients, what instances report.

Gauges are made when the page is scraped, so that a call costs one assignment.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from control_plane.observe.metric_families import (
    PREFIX,
    counter,
    gauge,
    histogram,
    per_engine,
    total,
)
from control_plane.observe.observed import ObservedScheduler
from nanocp.config.cluster import ClusterConfig
from nanocp.values.plan import PAGE_SIZE, ClusterLoad, Ended, FinishReason, InstanceLoad

_SCHEDULER_S = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.5)
_RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.99, 1.0)
_CP_DEGREES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256)
_CAPS = ("max_queued_requests", "max_queued_tokens")
"""Refusals name the cap, which becomes the label `reason`."""


@dataclass(frozen=True, slots=True)
class _Decided:
    """The scheduler's state after its latest call, as one value: a scrape sees all or nothing."""

    num_placed: int = 0
    num_prefilling: int = 0
    num_queued: int = 0
    num_tenants: int = 0
    spread: int = 0
    """See FairShare.spread."""
    head_arrived_us: int | None = None
    """When the first request of the queue arrived; None if the queue is empty."""
    loads: Sequence[InstanceLoad] = ()
    attention_rows: Sequence[int] = ()
    rows_committed: Sequence[int] = ()
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0


class SchedulingMetrics(Collector):
    """Written by the controller's thread, read by scrapes."""

    def __init__(self, registry: CollectorRegistry, cluster: ClusterConfig) -> None:
        self._num_frames = cluster.num_frames
        # Before the first call every frame is free.
        empty = [0] * cluster.num_instances
        loads = [InstanceLoad(0, 0, cluster.num_frames, 0, 0) for _ in empty]
        self._decided = _Decided(loads=loads, attention_rows=empty, rows_committed=empty)
        registry.register(self)
        self._kv_ratio = histogram(
            registry, "step_kv_balance_ratio", "kv_balance_ratio of each window planned.", _RATIOS
        )
        self._rows_ratio = histogram(
            registry,
            "step_rows_balance_ratio",
            "rows_balance_ratio of each window planned.",
            _RATIOS,
        )
        self._scheduler_s = histogram(
            registry, "scheduler_seconds", "One call of the scheduler.", _SCHEDULER_S
        )
        self._cp_degree = histogram(
            registry, "cp_degree", "Instances that hold KV of a request, when placed.", _CP_DEGREES
        )
        self._pages_moved = counter(
            registry, "pages_moved", "Pages sent from one instance to another while their row runs."
        )
        self._binding_changes = counter(
            registry,
            "binding_changes",
            "Placed requests that were re-bound, or whose KV binding changed.",
        )
        self._rejections = counter(
            registry, "admission_rejections", "Requests refused, by the cap.", "reason"
        )
        for reason in (*_CAPS, FinishReason.INVALID.value):
            self._rejections.labels(reason)
        self._preemptions = counter(
            registry, "num_preemptions", "Requests that were preempted for their frames."
        )

    @property
    def load(self) -> ClusterLoad:
        """What is decided after the scheduler's latest call; from any thread."""
        now = self._decided
        return ClusterLoad(
            now.num_placed - now.num_prefilling,
            now.num_queued + now.num_prefilling,
            tuple(now.loads),
            now.num_prefilling,
        )

    def planned(
        self,
        seconds: float,
        scheduler: ObservedScheduler,
        has_window: bool,
        num_prefilling: int = 0,
    ) -> None:
        """The scheduler was called: how long it took, and whether it issued a window.

        num_prefilling: placed requests whose KV is not there yet.
        """
        self._scheduler_s.observe(seconds)
        state, queue = scheduler.decided
        head = next(iter(queue), None)
        loads = scheduler.loads()
        self._decided = _Decided(
            num_placed=scheduler.num_running,
            # A ticket that is fenced counts until its receivers have answered.
            num_prefilling=min(num_prefilling, scheduler.num_running),
            num_queued=scheduler.num_waiting,
            num_tenants=scheduler.fair_share.num_waiting,
            spread=scheduler.fair_share.spread,
            head_arrived_us=None if head is None else head.arrived_us,
            loads=loads,
            attention_rows=tuple(state.committed.attention_rows),
            rows_committed=tuple(state.committed.rows),
            num_queried_tokens=scheduler.prefix_sharing.num_queried_tokens,
            num_hit_tokens=scheduler.prefix_sharing.num_hit_tokens,
        )
        if has_window:
            serving = [load for load in loads if load.num_frames]
            self._kv_ratio.observe(_balance([load.kv_tokens for load in serving]))
            self._rows_ratio.observe(_balance([load.num_rows for load in serving]))

    def ended(self, ended: Ended) -> None:
        """Count a refusal, by its cap. May be called from any thread."""
        if ended.reason in (FinishReason.REFUSED, FinishReason.INVALID):
            cap = next((cap for cap in _CAPS if cap in ended.message), ended.reason.value)
            self._rejections.labels(cap).inc()

    def placed(self, cp_degree: int) -> None:
        """A request got its frames: at first, or after it was preempted."""
        self._cp_degree.observe(cp_degree)

    def binding_changed(self) -> None:
        """A placed request was re-bound, or its KV binding changed."""
        self._binding_changes.inc()

    def moving(self, num_pages: int) -> None:
        """This number of pages is on its way to another instance."""
        self._pages_moved.inc(num_pages)

    def preempted(self) -> None:
        """A request must wait for frames again."""
        self._preemptions.inc()

    def collect(self) -> Iterable[Metric]:
        """See prometheus_client.registry.Collector."""
        yield from _queue(self._decided)
        yield from self._instances(self._decided)
        config = GaugeMetricFamily(
            f"{PREFIX}cache_config_info",
            "Pages and frames.",
            labels=["engine", "block_size", "num_gpu_blocks"],
        )
        for engine in _serving(self._decided):
            config.add_metric([str(engine), str(PAGE_SIZE), str(self._num_frames)], 1)
        yield config

    def _instances(self, now: _Decided) -> Iterable[Metric]:
        loads = _serving(now)
        kv_tokens = {i: load.kv_tokens for i, load in loads.items()}
        rows = {i: load.num_rows for i, load in loads.items()}
        yield per_engine("kv_tokens", "KV tokens resident or in transfer.", kv_tokens)
        yield per_engine("rows", "Rows: requests whose MoE binding it is.", rows)
        parked = {i: now.rows_committed[i] - running for i, running in rows.items()}
        yield per_engine("rows_parked", "Rows that wait for a frame during their output.", parked)
        yield per_engine(
            "attention_rows",
            "Attention rows: its own and those received.",
            {i: now.attention_rows[i] for i in loads},
        )
        for state in ("free", "quarantined", "committed"):
            frames = {i: getattr(load, f"frames_{state}") for i, load in loads.items()}
            yield per_engine(f"frames_{state}", f"Frames {state}.", frames)
        stranded = {i: load.frames_free if now.num_queued else 0 for i, load in loads.items()}
        yield per_engine("frames_stranded", "Frames free while requests wait.", stranded)
        usage = {i: 1 - load.frames_free / load.num_frames for i, load in loads.items()}
        yield per_engine(
            "kv_cache_usage_perc", "Share of frames that are not free; 1 means 100 percent.", usage
        )
        yield gauge(
            "kv_balance_ratio",
            "Mean / max of kv_tokens over the instances; 1 is even.",
            _balance(kv_tokens.values()),
        )
        yield gauge(
            "rows_balance_ratio",
            "Mean / max of rows over the instances; 1 is even.",
            _balance(rows.values()),
        )


def _queue(now: _Decided) -> Iterable[Metric]:
    yield gauge(
        "num_requests_running",
        "Requests that decode: their KV is there, and they have not ended.",
        now.num_placed - now.num_prefilling,
    )
    yield gauge(
        "num_requests_prefilling",
        "Requests that are placed and whose KV is not there yet.",
        now.num_prefilling,
    )
    yield gauge(
        "num_requests_waiting",
        "Requests that do not decode yet: in the waiting queue or prefilling.",
        now.num_queued + now.num_prefilling,
    )
    age_s = 0.0 if now.head_arrived_us is None else time.monotonic() - now.head_arrived_us / 1e6
    yield gauge(
        "head_of_line_age_seconds",
        "How long the first request of the queue has waited; 0 if the queue is empty.",
        age_s,
    )
    yield gauge("tenants_waiting", "Tenants with a request in the waiting queue.", now.num_tenants)
    yield gauge(
        "tenant_service_spread_tokens",
        "Served tokens of the waiting tenant that was served most, less those of the least.",
        now.spread,
    )
    yield total(
        "prefix_cache_queries",
        "Prompt tokens of placed requests, looked up in the prefix cache.",
        now.num_queried_tokens,
    )
    yield total(
        "prefix_cache_hits",
        "Looked-up tokens whose pages were there and are shared.",
        now.num_hit_tokens,
    )


def _serving(now: _Decided) -> dict[int, InstanceLoad]:
    """The loads of seats that serve something."""
    return {i: load for i, load in enumerate(now.loads) if load.num_frames}


def _balance(values: Collection[int]) -> float:
    """Mean / max; 1 for no load at all, which is even."""
    return sum(values) / len(values) / max(values) if any(values) else 1.0
