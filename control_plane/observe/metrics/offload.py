"""Metrics of KV offload: pages in slots, their copies, and the saved prompt tokens."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from control_plane.observe.metrics.families import families
from control_plane.scheduler.pages.offload import OffloadReading

_TIERS = ("host", "file")


class OffloadMetrics(Collector):
    """Written by the controller's thread, read by scrapes."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._reading: OffloadReading | None = None
        registry.register(self)

    def planned(self, reading: OffloadReading) -> None:
        self._reading = reading

    def collect(self) -> Iterable[Metric]:
        """Yield each metric for each tier; none before the first reading (kv_offload only)."""
        reading = self._reading
        if reading is None:
            return []
        return families(
            {
                "kv_offload_pages": dict(zip(_TIERS, reading.num_kept, strict=True)),
                "kv_offload_stowed_pages": dict(zip(_TIERS, reading.num_stowed, strict=True)),
                "kv_offload_fetched_pages": dict(zip(_TIERS, reading.num_fetched, strict=True)),
                "kv_offload_hits": reading.num_hit_tokens,
            }
        )
