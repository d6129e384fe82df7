"""Metrics under the service's prefix, made in one place.

Enters: a name without prefix, a help text, values. Leaves: metrics for prometheus_client. Does not
know: what any metric means.

An instance's number is the label `engine`, as in vLLM: Prometheus itself owns `instance`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

PREFIX = "nanocp:"

# The same as vLLM's (vllm/v1/metrics/loggers.py), so that panels made for vLLM show the same.
# fmt: off
TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
          10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
INTER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
                 10.0, 20.0, 40.0, 80.0)
REQUEST_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 35.0, 40.0, 50.0,
             60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
# fmt: on
PAUSE_S = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0)
ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def lengths_up_to(high: int) -> list[int]:
    """Buckets 1, 2, 5, 10, ... up to `high` tokens, as vLLM's for lengths."""
    return [
        m * 10**power for power in range(len(str(high))) for m in (1, 2, 5) if m * 10**power <= high
    ]


def counter(registry: CollectorRegistry, name: str, text: str, *labels: str) -> Counter:
    """A counter that is incremented as things happen."""
    return Counter(PREFIX + name, text, labels, registry=registry)


def histogram(
    registry: CollectorRegistry, name: str, text: str, buckets: Sequence[float], *labels: str
) -> Histogram:
    """A histogram that observes values as they come."""
    return Histogram(PREFIX + name, text, labels, buckets=buckets, registry=registry)


def gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    """One value for the page that is being made."""
    return GaugeMetricFamily(PREFIX + name, text, value=value)


def total(name: str, text: str, value: float) -> CounterMetricFamily:
    """A count for the page that is being made."""
    return CounterMetricFamily(PREFIX + name, text, value=value)


def per_engine(name: str, text: str, values: Mapping[int, float]) -> GaugeMetricFamily:
    """A value of each of these instances, for the page that is being made."""
    family = GaugeMetricFamily(PREFIX + name, text, labels=["engine"])
    for engine, value in values.items():
        family.add_metric([str(engine)], value)
    return family
