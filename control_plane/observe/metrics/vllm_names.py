"""What routers read of vLLM, by vLLM's names: to them the whole service is one engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nanocp.values.plan import PAGE_SIZE, ClusterLoad

_ENGINE = "0"


class VllmMetrics(Collector):
    """Gauges that an endpoint picker scores by, with the labels model_name and engine."""

    def __init__(
        self, registry: CollectorRegistry, load: Callable[[], ClusterLoad], model_name: str
    ) -> None:
        self._load, self._labels = load, {"model_name": model_name, "engine": _ENGINE}
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        load = self._load()
        num_frames = sum(each.num_frames for each in load.instances)
        num_free = sum(each.frames_free for each in load.instances)
        sizes = {"block_size": str(PAGE_SIZE), "num_gpu_blocks": str(num_frames)}
        for name, text, value, more in (
            ("num_requests_running", "Requests that decode.", load.num_running, {}),
            ("num_requests_waiting", "Requests that do not decode yet.", load.num_waiting, {}),
            (
                "kv_cache_usage_perc",
                "Share of all pages that are not free; 1 means 100 percent.",
                1 - num_free / max(num_frames, 1),
                {},
            ),
            ("cache_config_info", "Sizes of a page and of the cache.", 1, sizes),
        ):
            labels = self._labels | more
            family = GaugeMetricFamily(f"vllm:{name}", text, labels=list(labels))
            family.add_metric(list(labels.values()), value)
            yield family
