"""Metrics of the scheduler: loads, balance, admissions and refusals, and its own time."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from control_plane.observe.metrics.families import CAPS, SCHEDULING, Recorded, families
from control_plane.observe.observed import ObservedScheduler
from nanocp.config.cluster import ClusterConfig
from nanocp.values.group_load import GroupLoad
from nanocp.values.plan import PAGE_SIZE, ClusterLoad, Ended, FinishReason, InstanceLoad

_VERSION = version("nanocp")


@dataclass(frozen=True, slots=True)
class _Decided:
    """The state after the latest call, as one value: a scrape sees all or nothing."""

    num_placed: int = 0
    num_prefilling: int = 0
    num_queued: int = 0
    num_tenants: int = 0
    spread: int = 0
    """Served tokens of the most served waiting tenant, less those of the least served."""
    head_arrived_us: int | None = None
    """Arrival of the first request in the queue; None if it is empty."""
    loads: Sequence[InstanceLoad] = ()
    attention_rows: Sequence[int] = ()
    rows_committed: Sequence[int] = ()
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0


class SchedulingMetrics(Collector):
    """Written by the controller's thread, read by scrapes."""

    def __init__(
        self, registry: CollectorRegistry, cluster: ClusterConfig, row_tokens: int
    ) -> None:
        """row_tokens: the cost of a row, in KV tokens (scheduler.costs)."""
        self._cluster, self._row_tokens = cluster, row_tokens
        # Before the first call every frame is free.
        empty = [0] * cluster.num_instances
        loads = [InstanceLoad(0, 0, cluster.num_frames, 0, 0) for _ in empty]
        self._decided = _Decided(loads=loads, attention_rows=empty, rows_committed=empty)
        registry.register(self)
        self._recorded = Recorded(registry, SCHEDULING)

    @property
    def load(self) -> ClusterLoad:
        """The load after the scheduler's latest call; from any thread."""
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
        """Record a call of the scheduler with its time and result.

        num_prefilling: placed requests without their KV.
        """
        self._recorded.observe("scheduler_seconds", seconds)
        state, queue = scheduler.requests.decided
        head = next(iter(queue), None)
        loads = scheduler.requests.loads()
        self._decided = _Decided(
            num_placed=scheduler.requests.num_running,
            # A ticket that is fenced counts until its receivers have answered.
            num_prefilling=min(num_prefilling, scheduler.requests.num_running),
            num_queued=scheduler.requests.num_waiting,
            num_tenants=scheduler.requests.fair_share.num_waiting,
            spread=scheduler.requests.fair_share.spread,
            head_arrived_us=None if head is None else head.arrived_us,
            loads=loads,
            attention_rows=tuple(state.committed.attention_rows),
            rows_committed=tuple(state.committed.rows),
            num_queried_tokens=scheduler.prefix_sharing.num_queried_tokens,
            num_hit_tokens=scheduler.prefix_sharing.num_hit_tokens,
        )
        if has_window:
            serving = [load for load in loads if load.num_frames]
            kv_ratio = _balance([load.kv_tokens for load in serving])
            self._recorded.observe("step_kv_balance_ratio", kv_ratio)
            rows_ratio = _balance([load.num_rows for load in serving])
            self._recorded.observe("step_rows_balance_ratio", rows_ratio)

    def ended(self, ended: Ended) -> None:
        """Count a refusal, by its cap. May be called from any thread."""
        if ended.reason in (FinishReason.REFUSED, FinishReason.INVALID):
            cap = next((cap for cap in CAPS if cap in ended.message), ended.reason.value)
            self._recorded.count("admission_rejections", cap)

    def placed(self, cp_degree: int) -> None:
        """Record that a request got its frames, at first or after a preemption."""
        self._recorded.observe("cp_degree", cp_degree)

    def binding_changed(self) -> None:
        self._recorded.count("binding_changes")

    def moving(self, num_pages: int) -> None:
        """Record this number of pages on their way to another instance."""
        self._recorded.count("pages_moved", by=num_pages)

    def preempted(self) -> None:
        self._recorded.count("num_preemptions")

    def collect(self) -> Iterable[Metric]:
        now = self._decided
        head_us = now.head_arrived_us
        loads = {i: load for i, load in enumerate(now.loads) if load.num_frames}
        kv_tokens = {i: load.kv_tokens for i, load in loads.items()}
        rows = {i: load.num_rows for i, load in loads.items()}
        free = {i: load.frames_free for i, load in loads.items()}
        group = GroupLoad.of(now.loads, self._cluster.bounds.max_rows, self._row_tokens)
        return families(
            {
                "num_requests_running": now.num_placed - now.num_prefilling,
                "num_requests_prefilling": now.num_prefilling,
                "num_requests_waiting": now.num_queued + now.num_prefilling,
                "head_of_line_age_seconds": (
                    0.0 if head_us is None else time.monotonic() - head_us / 1e6
                ),
                "tenants_waiting": now.num_tenants,
                "tenant_service_spread_tokens": now.spread,
                "prefix_cache_queries": now.num_queried_tokens,
                "prefix_cache_hits": now.num_hit_tokens,
                "kv_tokens": kv_tokens,
                "rows": rows,
                "rows_parked": {i: now.rows_committed[i] - rows[i] for i in loads},
                "attention_rows": {i: now.attention_rows[i] for i in loads},
                "frames_free": free,
                "frames_quarantined": {i: load.frames_quarantined for i, load in loads.items()},
                "frames_committed": {i: load.frames_committed for i, load in loads.items()},
                "frames_stranded": free if now.num_queued else dict.fromkeys(loads, 0),
                "kv_cache_usage_perc": {i: 1 - free[i] / loads[i].num_frames for i in loads},
                "kv_tokens_free": group.kv_tokens_free,
                "rows_free": group.rows_free,
                "longest_prompt_tokens": group.longest_prompt(self._cluster.max_model_len),
                "load_tokens": group.load_tokens,
                "kv_balance_ratio": _balance(kv_tokens.values()),
                "rows_balance_ratio": _balance(rows.values()),
                "build_info": {_VERSION: 1},
                "cache_config_info": {(i, PAGE_SIZE, self._cluster.num_frames): 1 for i in loads},
            }
        )


def _balance(values: Collection[int]) -> float:
    return sum(values) / len(values) / max(values) if any(values) else 1.0
