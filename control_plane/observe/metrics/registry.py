"""All metrics of the service in their own registry, one part for each source.

docs/use/operate.md explains the names.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics

from control_plane.observe.metrics.engines import EngineMetrics
from control_plane.observe.metrics.experts import ExpertMetrics
from control_plane.observe.metrics.instances import InstanceMetrics
from control_plane.observe.metrics.offload import OffloadMetrics
from control_plane.observe.metrics.recovery import RecoveryMetrics
from control_plane.observe.metrics.requests import RequestMetrics
from control_plane.observe.metrics.scheduling import SchedulingMetrics
from control_plane.observe.metrics.stages import StageMetrics
from control_plane.observe.metrics.vllm_names import VllmMetrics
from nanocp.config.cluster import ClusterConfig
from nanocp.config.prefill import PrefillConfig
from nanocp.config.scheduler import SchedulerConfig


class Metrics:
    """The parts of the service's metrics."""

    def __init__(
        self,
        cluster: ClusterConfig,
        scheduler: SchedulerConfig,
        prefill: PrefillConfig | None = None,
        vllm_model: str | None = None,
    ) -> None:
        """vllm_model: the model's name beside vLLM's names of metrics; None: without them."""
        # A _created series beside each counter and histogram would double them; nothing reads it.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        registry = self.registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        dispatch_tokens = scheduler.costs.dispatch_tokens_per_row
        self.scheduling = SchedulingMetrics(registry, cluster, dispatch_tokens)
        self.offload = OffloadMetrics(registry)
        self.instances = InstanceMetrics(registry, cluster.num_instances, scheduler)
        num_stages = cluster.num_instances if cluster.layout == "pipeline" else 0
        self.stages = StageMetrics(registry, num_stages)
        self.experts = ExpertMetrics(registry)
        self.engines = EngineMetrics(registry, prefill or PrefillConfig())
        self.recovery = RecoveryMetrics(registry)
        self.requests = RequestMetrics(registry, cluster.max_model_len)
        if vllm_model is not None:
            VllmMetrics(registry, lambda: self.scheduling.load, vllm_model)
