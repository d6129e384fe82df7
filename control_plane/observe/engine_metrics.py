"""Metrics of the prefill's engines, from the prefill's latest report.

Enters: reports, on the controller's thread. Leaves: samples for scrapes, rows for the cluster page.
Does not know: engines, which report nothing themselves. The names are explained in
docs/use/operate.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from control_plane.observe.metric_families import PREFIX
from nanocp.values.members import EngineNow


class EngineMetrics(Collector):
    """What engines do, and the frames that wait for them; nothing without engines."""

    def __init__(self, registry: CollectorRegistry, urls: tuple[str, ...]) -> None:
        self._engines: Sequence[EngineNow] = [EngineNow(url) for url in urls]
        self._num_awaited = 0
        if urls:
            registry.register(self)

    def reported(self, engines: Sequence[EngineNow]) -> None:
        """The prefill has reported the state of every engine."""
        self._engines = engines

    def awaited(self, num_frames: int) -> None:
        """Take the number of frames that are placed and wait for pages of the prefill."""
        self._num_awaited = num_frames

    def rows(self) -> list[dict[str, Any]]:
        """Each engine's state, for the cluster page and `nanocp top`."""
        return [
            {
                "url": engine.url,
                "is_up": engine.is_up,
                "problem": engine.problem,
                "tokens_in_flight": engine.tokens_in_flight,
                "done": engine.num_done,
                "failed": engine.num_failed,
            }
            for engine in self._engines
        ]

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """One sample of each metric for each engine."""
        yield GaugeMetricFamily(
            f"{PREFIX}frames_awaiting_prefill",
            "Frames of placed requests whose pages the prefill has yet to write.",
            self._num_awaited,
        )
        up = _by_url("prefill_engine_up", "1 if the engine has passed its latest probe.")
        tokens = _by_url("prefill_engine_tokens_in_flight", "Prompt tokens that it is asked for.")
        requests = CounterMetricFamily(
            f"{PREFIX}prefill_engine_requests",
            "Prompts that the engine was asked for, by outcome.",
            labels=["url", "outcome"],
        )
        pages = CounterMetricFamily(
            f"{PREFIX}prefill_pages", "Pages that the engine has sent.", labels=["url"]
        )
        seconds = CounterMetricFamily(
            f"{PREFIX}prefill_seconds",
            "Seconds of prompts that are done: until the answer, and until all pages arrived.",
            labels=["url", "phase"],
        )
        for engine in self._engines:
            up.add_metric([engine.url], float(engine.is_up))
            tokens.add_metric([engine.url], engine.tokens_in_flight)
            requests.add_metric([engine.url, "done"], engine.num_done)
            requests.add_metric([engine.url, "failed"], engine.num_failed)
            requests.add_metric([engine.url, "cancelled"], engine.num_cancelled)
            pages.add_metric([engine.url], engine.num_pages)
            seconds.add_metric([engine.url, "answer"], engine.answer_s)
            seconds.add_metric([engine.url, "arrive"], engine.arrive_s)
        yield from (up, tokens, requests, pages, seconds)


def _by_url(name: str, explanation: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, explanation, labels=["url"])
