"""Metrics of windows from the instances' reports: step times, tokens, bytes, graphs.

Reports become metrics only at a scrape, since the library's observations are slow (docs/log.md).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from control_plane.observe.metrics.families import (
    INSTANCES,
    READ,
    Recorded,
    families,
    histogram_family,
)
from nanocp.config.scheduler import SchedulerConfig
from nanocp.values.plan import WindowDone


class InstanceMetrics:
    """Written by the controller's thread, read by scrapes."""

    def __init__(
        self, registry: CollectorRegistry, num_instances: int, scheduler: SchedulerConfig
    ) -> None:
        self._num_steps, num_drafts = scheduler.steps_per_window, scheduler.num_drafts
        self._sums = _Sums(
            [_EngineSums([0] * num_drafts) for _ in range(num_instances)],
            dict.fromkeys(("one_lane", *scheduler.lane_orders), 0) if scheduler.has_lanes else {},
        )
        self._step, self._exchange, self._masks, self._iteration = histograms = [
            _EngineHistograms(name, num_instances)
            for name in (
                "step_seconds",
                "step_exchange_seconds",
                "grammar_mask_seconds",
                "iteration_tokens_total",
            )
        ]
        for collector in (self._sums, *histograms):
            registry.register(collector)
        self._recorded = Recorded(registry, INSTANCES)
        self._busy_us: dict[int, tuple[int, int]] = {}
        """By window: (least, most) busy time of a reported instance in a step."""

    def stepped(self, done: WindowDone, is_complete: bool) -> None:
        """Record an instance's window. is_complete: it was the last of all instances."""
        engine = done.instance
        self._step.observe(engine, done.step_us / 1e6)
        self._exchange.observe(engine, done.exchange_us / 1e6)
        if done.mask_us:
            self._masks.observe(engine, done.mask_us / 1e6)
        self._iteration.observe(engine, done.num_tokens / self._num_steps)
        self._sums.add(done, self._num_steps)
        busy_us = done.step_us - done.exchange_us
        least, most = self._busy_us.get(done.window, (busy_us, busy_us))
        self._busy_us[done.window] = min(least, busy_us), max(most, busy_us)
        if is_complete:
            least, most = self._busy_us.pop(done.window)
            self._recorded.observe("step_spread_seconds", (most - least) / 1e6)

    def sent(self, two_lanes: int) -> None:
        """Count a window by its order."""
        if orders := self._sums.orders:
            orders[list(orders)[two_lanes]] += 1

    def resynced(self) -> None:
        """Record that an instance asked for a full table."""
        self._recorded.count("table_resyncs")


class _EngineHistograms(Collector):
    def __init__(self, name: str, num_engines: int) -> None:
        self._name, self._buckets = name, READ[name].buckets
        self._bounds = [floatToGoString(bound) for bound in (*self._buckets, float("inf"))]  # type: ignore[no-untyped-call]
        self._counts = [[0] * len(self._bounds) for _ in range(num_engines)]
        self._sums = [0.0] * num_engines

    def observe(self, engine: int, value: float) -> None:
        self._counts[engine][bisect_left(self._buckets, value)] += 1
        self._sums[engine] += value

    def collect(self) -> Iterable[Metric]:
        family = histogram_family(self._name)
        for engine, (counts, sum_) in enumerate(zip(self._counts, self._sums, strict=True)):
            buckets = list(zip(self._bounds, accumulate(counts), strict=True))
            family.add_metric([str(engine)], buckets, sum_)
        yield family


@dataclass(slots=True)
class _EngineSums:
    accepted: list[int]
    """Accepted drafts by their offset; empty without drafts."""
    num_drafts: int = 0
    num_draft_tokens: int = 0
    hidden_us: int = 0
    route_bytes: int = 0
    expert_bytes: int = 0
    own_slots: int = 0
    """Rows of the buckets replayed, padding included, in each step."""
    own_padding: int = 0
    received_slots: int = 0
    received_padding: int = 0


@dataclass(slots=True, eq=False)
class _Sums(Collector):
    engines: list[_EngineSums]
    orders: dict[str, int]
    """Windows by order; empty without lanes."""
    windows: dict[tuple[int, int], int] = field(default_factory=dict)
    """By bucket (rows, received): windows that replayed it."""

    def add(self, done: WindowDone, num_steps: int) -> None:
        engine = self.engines[done.instance]
        engine.hidden_us += done.hidden_us * num_steps
        engine.route_bytes += done.route_bytes
        engine.expert_bytes += done.expert_bytes
        # A row has a step row for each draft that it may have.
        width = 1 + len(done.drafts)
        engine.own_slots += done.bucket_rows * num_steps
        engine.own_padding += (done.bucket_rows - width * done.num_rows) * num_steps
        engine.received_slots += done.bucket_received * num_steps
        engine.received_padding += (done.bucket_received - width * done.num_received) * num_steps
        bucket = done.bucket_rows, done.bucket_received
        self.windows[bucket] = self.windows.get(bucket, 0) + 1
        for offset, (num_checked, num_accepted) in enumerate(done.drafts):
            engine.num_drafts += num_checked if offset == 0 else 0
            engine.num_draft_tokens += num_checked
            engine.accepted[offset] += num_accepted

    def collect(self) -> Iterable[Metric]:
        engines = list(enumerate(self.engines))
        drafting = [(engine, sums) for engine, sums in engines if sums.accepted]
        return families(
            {
                "exchange_bytes": {
                    (engine, kind): getattr(sums, f"{kind}_bytes")
                    for engine, sums in engines
                    for kind in ("route", "expert")
                },
                **{
                    f"graph_{what}rows": {
                        (engine, kind): getattr(sums, f"{kind}_{attribute}")
                        for engine, sums in engines
                        for kind in ("own", "received")
                    }
                    for what, attribute in (("", "slots"), ("padding_", "padding"))
                },
                "hidden_exchange_seconds": {e: sums.hidden_us / 1e6 for e, sums in engines},
                "lane_windows": self.orders,
                "graph_windows": dict(sorted(self.windows.copy().items())),
                "spec_decode_num_drafts": {e: sums.num_drafts for e, sums in drafting},
                "spec_decode_num_draft_tokens": {e: sums.num_draft_tokens for e, sums in drafting},
                "spec_decode_num_accepted_tokens": {e: sum(s.accepted) for e, s in drafting},
                "spec_decode_num_accepted_tokens_per_pos": {
                    (engine, offset): num_accepted
                    for engine, sums in drafting
                    for offset, num_accepted in enumerate(sums.accepted)
                },
            }
        )
