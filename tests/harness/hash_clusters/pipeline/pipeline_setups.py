"""Configurations of small pipelines, drawn by chance."""

from dataclasses import fields, replace
from random import Random
from typing import NamedTuple

from nanocp.config.cluster import BoundsConfig, ClusterConfig
from nanocp.config.passes import PassesConfig
from nanocp.config.pipeline import PipelineConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.config.whole import Config


class PipelineSetup(NamedTuple):
    """The configuration of a pipeline."""

    cluster: ClusterConfig
    scheduler: SchedulerConfig
    pipeline: PipelineConfig

    @property
    def config(self) -> Config:
        """The configuration of a service with this pipeline."""
        num_stages = self.pipeline.num_stages
        cluster = replace(self.cluster, num_instances=num_stages, layout="pipeline")
        passes = {each.name: getattr(self.pipeline, each.name) for each in fields(PassesConfig)}
        return Config(cluster=cluster, scheduler=self.scheduler, pipeline=PassesConfig(**passes))


def draw_setup(random: Random) -> PipelineSetup:
    """A small pipeline with few frames, so that rows wait for them."""
    num_stages = random.choice([1, 2, 2, 3, 4])
    max_rows = random.choice([2, 4, 8])
    cluster = ClusterConfig(
        num_instances=1,
        num_frames=random.choice([13, 14, 20, 40]),
        max_model_len=832,
        bounds=BoundsConfig(max_rows=max_rows, max_attention_rows=max_rows),
    )
    scheduler = SchedulerConfig(
        prefix_sharing=random.random() < 0.9,
        growth_promise=random.choice(["max_tokens", "tokens:0", "tokens:20", "tokens:80"]),
        max_overtake_us=random.choice([0, 1000, 100_000]),
        max_queued_requests=random.choice([4, 1024]),
    )
    num_layers = num_stages + random.choice([0, 1, 3])
    pipeline = PipelineConfig(
        num_stages=num_stages,
        num_layers=num_layers,
        max_layers=min(-(-num_layers // num_stages) + random.choice([0, 1, 2, 9]), num_layers),
        max_pass_tokens=random.choice([1, 40, 100, 1000]),
        layer_policy=random.choice(["even", "delta", "level", "chaos_layers", "chaos_layers"]),
        layout_window=random.choice([1, 1, 5]),
        copy_ahead=random.random() < 0.6,
        frame_move_us=random.choice([0, 50]),
        chaos_seed=random.randrange(1 << 32),
    )
    return PipelineSetup(cluster, scheduler, pipeline)


def chaos_setup(seed: int) -> PipelineSetup:
    """Layers move in any way that is legal, up to once a pass."""
    random = Random(seed)
    setup = draw_setup(random)
    num_stages = random.choice([2, 2, 3, 4])
    num_layers = num_stages + random.choice([1, 2, 4])
    pipeline = replace(
        setup.pipeline, num_stages=num_stages, num_layers=num_layers,
        max_layers=min(-(-num_layers // num_stages) + random.choice([1, 2, 9]), num_layers),
        layer_policy="chaos_layers", layout_window=1,
    )  # fmt: skip
    return setup._replace(pipeline=pipeline)


def crowded(setup: PipelineSetup) -> PipelineSetup:
    """Few frames, of which no row is promised any beyond its prompt: together rows outgrow them."""
    bounds = BoundsConfig(max_rows=8, max_attention_rows=8)
    return PipelineSetup(
        replace(setup.cluster, num_frames=5, max_model_len=192, bounds=bounds),
        replace(setup.scheduler, growth_promise="tokens:0", max_queued_requests=1024),
        replace(setup.pipeline, max_pass_tokens=max(setup.pipeline.max_pass_tokens, 40)),
    )
