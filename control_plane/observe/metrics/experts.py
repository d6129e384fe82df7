"""Metrics of experts: how uneven their load is, and the changes that follow it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from control_plane.observe.metrics.families import EXPERTS, Recorded, families


class ExpertMetrics(Collector):
    """Written by the controller's thread, read by scrapes."""

    def __init__(
        self, registry: CollectorRegistry, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._now_s = now_s
        self._imbalances: Sequence[float] = ()
        self._began_s = 0.0
        self.changes = dict.fromkeys(("done", "failed", "lost"), 0)
        """Changes so far, by outcome."""
        self._recorded = Recorded(registry, EXPERTS)
        registry.register(self)

    def reported(self, imbalances: Sequence[float]) -> None:
        """Take the load of the hottest instance over the mean, for each MoE layer."""
        self._imbalances = imbalances

    def load_began(self) -> None:
        """Record that instances load experts."""
        self._began_s = self._now_s()

    def changed(self, outcome: str, num_experts: int) -> None:
        """Record the end of a change; outcome: done, failed or lost."""
        self._recorded.count("expert_changes", outcome)
        self.changes[outcome] += 1
        if num_experts:
            self._recorded.count("experts_loaded", by=num_experts)
            self._recorded.observe("expert_load_seconds", self._now_s() - self._began_s)

    def collect(self) -> Iterable[Metric]:
        """Yield the imbalance of each layer; none before the first reports."""
        layers = {str(layer): value for layer, value in enumerate(self._imbalances)}
        return families({"expert_imbalance": layers}) if layers else []
