"""Metrics of the bubbles of a pipeline's stages: their waits by cause."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from control_plane.observe.metrics.families import families
from nanocp.values.passes import WAIT_CAUSES
from nanocp.values.plan import WindowDone

_NUM_PASSES = 64
"""Latest passes over which shares are taken."""


class StageMetrics(Collector):
    """Idle time of each stage while a pass was in flight; nothing without stages."""

    def __init__(self, registry: CollectorRegistry, num_stages: int) -> None:
        self._sums_us = [[0] * len(WAIT_CAUSES) for _ in range(num_stages)]
        self._latest: list[deque[tuple[int, ...]]] = [
            deque(maxlen=_NUM_PASSES) for _ in range(num_stages)
        ]
        """For each stage and pass: busy us, then waits by cause."""
        if num_stages:
            registry.register(self)

    def ran(self, done: WindowDone, was_at_rest: bool) -> None:
        """Record a stage's pass.

        was_at_rest: none was in flight before it, so the wait is no bubble.
        """
        waits_us = [
            0 if was_at_rest and cause == "work" else us
            for cause, us in zip(WAIT_CAUSES, done.waits_us, strict=True)
        ]
        sums_us = self._sums_us[done.instance]
        for index, us in enumerate(waits_us):
            sums_us[index] += us
        self._latest[done.instance].append((done.step_us - done.exchange_us, *waits_us))

    def shares(self, stage: int) -> dict[str, float]:
        """Return a stage's idle share by cause, over its latest passes."""
        latest = self._latest[stage]
        if not latest:
            return {}
        _, *waits_us = sums_us = [sum(us) for us in zip(*latest, strict=True)]
        total_us = max(sum(sums_us), 1)
        return {cause: us / total_us for cause, us in zip(WAIT_CAUSES, waits_us, strict=True)}

    def collect(self) -> Iterable[Metric]:
        waits_s = {
            (stage, cause): us / 1e6
            for stage, sums_us in enumerate(self._sums_us)
            for cause, us in zip(WAIT_CAUSES, sums_us, strict=True)
        }
        return families({"stage_wait_seconds": waits_s})
