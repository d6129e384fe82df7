"""What plans the passes of the prefill's stages: the scheduler of pipelines, over prompts alone.

Enters: a Config. Leaves: a PipelineScheduler. Does not know: stages, pages.
"""

from __future__ import annotations

from dataclasses import replace

from control_plane.scheduler.pipeline.pass_rows import PromptRows
from control_plane.scheduler.pipeline.pipeline_scheduler import PipelineScheduler
from nanocp.config.pipeline import PipelineConfig
from nanocp.config.whole import Config


def make_prefill_scheduler(config: Config) -> PipelineScheduler:
    """Make the scheduler of `prefill.stages`; a MemberSpec names this factory."""
    own = config.of_prefill_stages
    # It plans no layers: what their number is does not matter.
    pipeline = PipelineConfig.of(own, num_layers=config.prefill.stages)
    cluster = replace(own.cluster, num_instances=1)
    rows = PromptRows(pipeline.num_stages, pipeline.max_pass_tokens)
    return PipelineScheduler(cluster, own.scheduler, pipeline, rows)
