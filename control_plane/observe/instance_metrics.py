"""What the instances reported of their windows: step times, tokens, bytes, graphs.

Enters: reports of windows, as they come. Leaves: metrics. Does not know: the scheduler, clients.

A report costs additions to plain numbers. They become metrics when the page is scraped: with the
library's own observations 32 reports took three times as long as the scheduler's call after them
(docs/log.md).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from control_plane.observe.metric_families import ITERATION_TOKENS, PREFIX, counter, histogram
from nanocp.values.plan import WindowDone

# fmt: off
_STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0)
_SPREAD_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0,
             30.0)
# fmt: on


class InstanceMetrics:
    """Written by the controller's thread, read by scrapes."""

    def __init__(
        self, registry: CollectorRegistry, num_instances: int, steps_per_window: int
    ) -> None:
        self._num_steps = steps_per_window
        self._sums = _Sums([_EngineSums() for _ in range(num_instances)])
        self._step = _EngineHistograms(
            "step_seconds", "Mean step of a window.", _STEP_S, num_instances
        )
        self._exchange = _EngineHistograms(
            "step_exchange_seconds",
            "Mean wait for the exchange in a step of a window.",
            _STEP_S,
            num_instances,
        )
        self._masks = _EngineHistograms(
            "grammar_mask_seconds",
            "Mean wait for masks in a step of a window that has structured output.",
            _SPREAD_S,
            num_instances,
        )
        self._iteration = _EngineHistograms(
            "iteration_tokens_total", "Tokens of a step.", ITERATION_TOKENS, num_instances
        )
        for collector in (self._sums, self._step, self._exchange, self._masks, self._iteration):
            registry.register(collector)
        self._spread = histogram(
            registry,
            "step_spread_seconds",
            (
                "Most minus least time that an instance was busy in a window's mean step, without "
                "waits."
            ),
            _SPREAD_S,
        )
        self._resyncs = counter(
            registry, "table_resyncs", "Full tables sent after a digest mismatch."
        )
        self._busy_us: dict[int, tuple[int, int]] = {}
        """By window: (least, most) time that an instance was busy in a step, of those that have
        reported."""

    def stepped(self, done: WindowDone, is_complete: bool) -> None:
        """An instance ran a window. is_complete: it was the last of all instances."""
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
            self._spread.observe((most - least) / 1e6)

    def resynced(self) -> None:
        """An instance asked for a full table."""
        self._resyncs.inc()


class _EngineHistograms(Collector):
    """A histogram for each instance."""

    def __init__(self, name: str, text: str, buckets: Sequence[float], num_engines: int) -> None:
        self._name, self._text, self._buckets = PREFIX + name, text, tuple(buckets)
        self._bounds = [floatToGoString(bound) for bound in (*buckets, float("inf"))]  # type: ignore[no-untyped-call]
        self._counts = [[0] * len(self._bounds) for _ in range(num_engines)]
        self._sums = [0.0] * num_engines

    def observe(self, engine: int, value: float) -> None:
        """Count one value of an instance."""
        self._counts[engine][bisect_left(self._buckets, value)] += 1
        self._sums[engine] += value

    def collect(self) -> Iterable[Metric]:
        """See prometheus_client.registry.Collector."""
        family = HistogramMetricFamily(self._name, self._text, labels=["engine"])
        for engine, (counts, sum_) in enumerate(zip(self._counts, self._sums, strict=True)):
            buckets = list(zip(self._bounds, accumulate(counts), strict=True))
            family.add_metric([str(engine)], buckets, sum_)
        yield family


@dataclass(slots=True)
class _EngineSums:
    """What one instance has reported since the start."""

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
    """Counters of every instance."""

    engines: list[_EngineSums]
    windows: dict[tuple[int, int], int] = field(default_factory=dict)
    """By bucket (rows, received): windows that replayed it."""

    def add(self, done: WindowDone, num_steps: int) -> None:
        """Add one instance's report of a window."""
        engine = self.engines[done.instance]
        engine.hidden_us += done.hidden_us * num_steps
        engine.route_bytes += done.route_bytes
        engine.expert_bytes += done.expert_bytes
        engine.own_slots += done.bucket_rows * num_steps
        engine.own_padding += (done.bucket_rows - done.num_rows) * num_steps
        engine.received_slots += done.bucket_received * num_steps
        engine.received_padding += (done.bucket_received - done.num_received) * num_steps
        bucket = done.bucket_rows, done.bucket_received
        self.windows[bucket] = self.windows.get(bucket, 0) + 1

    def collect(self) -> Iterable[Metric]:
        """See prometheus_client.registry.Collector."""
        for name, text, kinds in (
            (
                "exchange_bytes",
                "Bytes of rows put into others' memory.",
                ("route_bytes", "expert_bytes"),
            ),
            (
                "graph_rows",
                "Rows of the buckets replayed, padding included.",
                ("own_slots", "received_slots"),
            ),
            (
                "graph_padding_rows",
                "Padding rows of the buckets replayed.",
                ("own_padding", "received_padding"),
            ),
        ):
            family = CounterMetricFamily(PREFIX + name, text, labels=["engine", "kind"])
            for engine, sums in enumerate(self.engines):
                for kind in kinds:
                    family.add_metric([str(engine), kind.split("_")[0]], getattr(sums, kind))
            yield family
        family = CounterMetricFamily(
            f"{PREFIX}hidden_exchange_seconds",
            "Time, at most, that one lane of a step computed while the other awaited the exchange.",
            labels=["engine"],
        )
        for engine, sums in enumerate(self.engines):
            family.add_metric([str(engine)], sums.hidden_us / 1e6)
        yield family
        family = CounterMetricFamily(
            f"{PREFIX}graph_windows",
            "Windows by the bucket replayed.",
            labels=["bucket_rows", "bucket_received"],
        )
        for (rows, received), count in sorted(self.windows.copy().items()):
            family.add_metric([str(rows), str(received)], count)
        yield family
