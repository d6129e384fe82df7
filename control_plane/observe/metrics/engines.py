"""Metrics of engines, from the latest reports of the prefill and of the puller."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from control_plane.observe.metrics.families import families
from nanocp.config.prefill import PrefillConfig
from nanocp.values.members import PREFILL, EngineNow, Member


class EngineMetrics(Collector):
    """The state of engines, and the frames that wait for them."""

    def __init__(self, registry: CollectorRegistry, prefill: PrefillConfig) -> None:
        self._engines: dict[Member, Sequence[EngineNow]] = {
            PREFILL: [EngineNow(url) for url in prefill.engines]
        }
        self._num_awaited = 0
        if prefill.engines or prefill.pull.allowed:
            registry.register(self)

    def reported(self, member: Member, engines: Sequence[EngineNow]) -> None:
        """Take the engines of the prefill, or those that the puller has met."""
        self._engines[member] = engines

    @property
    def _all(self) -> list[EngineNow]:
        return [engine for engines in self._engines.values() for engine in engines]

    def awaited(self, num_frames: int) -> None:
        """Take the number of frames that wait for pages of the prefill."""
        self._num_awaited = num_frames

    def rows(self) -> list[dict[str, Any]]:
        """Return each engine's state, for the cluster page and `nanocp top`."""
        return [
            {
                "url": engine.url,
                "is_up": engine.is_up,
                "problem": engine.problem,
                "tokens_in_flight": engine.tokens_in_flight,
                "done": engine.num_done,
                "failed": engine.num_failed,
            }
            for engine in self._all
        ]

    def collect(self) -> Iterable[Metric]:
        engines = self._all
        return families(
            {
                "frames_awaiting_prefill": self._num_awaited,
                "prefill_engine_up": {each.url: each.is_up for each in engines},
                "prefill_engine_tokens_in_flight": {
                    each.url: each.tokens_in_flight for each in engines
                },
                "prefill_engine_requests": {
                    (each.url, outcome): getattr(each, f"num_{outcome}")
                    for each in engines
                    for outcome in ("done", "failed", "cancelled")
                },
                "prefill_pages": {each.url: each.num_pages for each in engines},
                "prefill_seconds": {
                    (each.url, phase): getattr(each, f"{phase}_s")
                    for each in engines
                    for phase in ("answer", "arrive")
                },
            }
        )
