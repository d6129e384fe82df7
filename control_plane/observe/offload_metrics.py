"""Pages outside the frames, as metrics: how many there are, come and go, and what that saved.

Enters: a reading of the scheduler's slots. Leaves: metrics; none before the first reading, so that
a cluster without kv_offload shows none. Does not know: pages, slots.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from control_plane.observe.metric_families import PREFIX, total
from control_plane.scheduler.pages.offload import OffloadReading

_TIERS = ("host", "file")


class OffloadMetrics(Collector):
    """Written by the controller's thread, read by scrapes."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._reading: OffloadReading | None = None
        registry.register(self)

    def planned(self, reading: OffloadReading) -> None:
        """The scheduler was called."""
        self._reading = reading

    def collect(self) -> Iterable[Metric]:
        """See prometheus_client.registry.Collector."""
        reading = self._reading
        if reading is None:
            return
        pages = GaugeMetricFamily(
            f"{PREFIX}kv_offload_pages", "Pages outside the frames.", labels=["tier"]
        )
        stowed = CounterMetricFamily(
            f"{PREFIX}kv_offload_stowed_pages", "Pages that went there.", labels=["tier"]
        )
        fetched = CounterMetricFamily(
            f"{PREFIX}kv_offload_fetched_pages", "Pages that came back from there.", labels=["tier"]
        )
        for family, numbers in (
            (pages, reading.num_kept),
            (stowed, reading.num_stowed),
            (fetched, reading.num_fetched),
        ):
            for tier, number in zip(_TIERS, numbers, strict=True):
                family.add_metric([tier], number)
            yield family
        yield total(
            "kv_offload_hits",
            "Prompt tokens of placed requests whose pages came from outside the frames.",
            reading.num_hit_tokens,
        )
