"""The scheduler of the prefill's stages: that of pipelines, for prompts alone."""

from __future__ import annotations

from dataclasses import replace

from control_plane.scheduler.pipeline.pass_rows import PromptRows
from control_plane.scheduler.pipeline.pipeline_scheduler import PipelineScheduler
from nanocp.config.cluster import ClusterConfig
from nanocp.config.passes import PassesConfig
from nanocp.config.pipeline import PipelineConfig
from nanocp.config.scheduler import SchedulerConfig


def make_prefill_scheduler(
    cluster: ClusterConfig, scheduler: SchedulerConfig, passes: PassesConfig
) -> PipelineScheduler:
    """Make the scheduler of `prefill.stages` from sections of Config.of_prefill_stages."""
    num_stages = cluster.num_instances
    # It plans no layers: what their number is does not matter.
    pipeline = PipelineConfig.of(passes, num_stages, num_layers=num_stages)
    rows = PromptRows(num_stages, pipeline.max_pass_tokens)
    return PipelineScheduler(replace(cluster, num_instances=1), scheduler, pipeline, rows)
