"""What plans the passes of the prefill's stages: the scheduler of pipelines, over prompts alone.

Enters: a Config, a checkpoint folder. Leaves: a PipelineScheduler. Does not know: stages, pages.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from control_plane.scheduler.pipeline.pass_rows import PromptRows
from control_plane.scheduler.pipeline.pipeline_scheduler import PipelineScheduler
from data_plane.model.config import ModelConfig
from nanocp.config import Config
from nanocp.passes import PipelineConfig


def make_prefill_scheduler(config: Config, checkpoint: Path) -> PipelineScheduler:
    """Make the scheduler of `prefill.stages`; a MemberSpec names this factory.

    Raises ValueError if the model has fewer layers.
    """
    own = config.of_prefill_stages
    pipeline = PipelineConfig.of(own, ModelConfig.from_folder(checkpoint).num_layers)
    cluster = replace(own.cluster, num_instances=1)
    rows = PromptRows(pipeline.num_stages, pipeline.max_pass_tokens)
    return PipelineScheduler(cluster, own.scheduler, pipeline, rows)
