"""Start-up of a stage of a pipeline, on the CPU: from a checkpoint to a stage without ends."""

from __future__ import annotations

from pathlib import Path

import torch

from data_plane.instance.stage_edge import StageEdge
from data_plane.kv.carry_pool import CarryPool
from data_plane.kv.frame_pool import FramePool
from data_plane.kv.peer_rings import PeerRings
from data_plane.kv.stage_rings import RING_FRAMES, RingStageLinks
from data_plane.model.config import ModelConfig
from data_plane.model.sizes import page_bytes
from data_plane.model.stage_weights import StageWeights
from data_plane.model.weights import Progress, say_nothing
from data_plane.startup.cpu_parts import cpu_parts
from data_plane.startup.shared_parts import grammar_masks, torch_dtype
from data_plane.step.cpu_kernels import Arithmetic
from data_plane.step.stage import CpuStageModel
from data_plane.transport.segments import Segments
from nanocp.config.pipeline import PipelineConfig
from nanocp.config.whole import Config
from nanocp.values.passes import layers_of
from nanocp.values.plan import PAGE_SIZE


def build_stage(
    config: Config,
    stage: int,
    segments: Segments,
    checkpoint: Path,
    progress: Progress = say_nothing,
    max_in_flight: int | None = None,
    ring_frames: int = RING_FRAMES,
    has_mtp: bool = False,
) -> StageEdge[CpuStageModel]:
    """Load this stage's first layers, and allocate its frames and its ends of the links.

    ring_frames: frames of one layer in a ring of KV between two stages. has_mtp: the MTP layer is
    the last. Raises ValueError naming the checkpoint's fault, the misfit, or this machine's lack.
    """
    torch.set_num_threads(config.data_plane.threads_per_instance)
    dtype, model = torch_dtype(config.data_plane), ModelConfig.from_folder(checkpoint, has_mtp)
    num_stages, num_layers = config.cluster.num_instances, model.num_stored_layers
    pipeline = PipelineConfig.of(config.pipeline, num_stages, num_layers)
    kernels, attention, sentences = cpu_parts(config.data_plane, model, checkpoint)
    is_last, layers = stage == pipeline.num_stages - 1, layers_of(pipeline.first_split, stage)
    weights = StageWeights(checkpoint, model, dtype, kernels, layers, stage == 0, is_last, progress)
    width, num_frames = model.attention.kv_width, config.cluster.num_frames
    linear = range(model.places_before(layers.start)[1], model.places_before(layers.stop)[1])
    frames = FramePool(pipeline.num_places - len(linear), num_frames, width, dtype)
    if model.delta is not None and linear:
        max_rows, num_linear = config.cluster.bounds.max_rows, len(model.linear_layers)
        size = page_bytes(model, config.data_plane)
        frames.carry = CarryPool(model.delta, num_linear, max_rows, dtype, size, held=linear)
    row = torch.zeros(model.hidden_size, dtype=dtype)
    max_tokens, layer_bytes = pipeline.max_pass_tokens, PAGE_SIZE * width * dtype.itemsize

    def ends() -> tuple[RingStageLinks, PeerRings]:
        return (
            RingStageLinks(
                segments, stage, num_stages, max_tokens, row, config.limits, max_in_flight
            ),
            PeerRings(segments, stage, num_stages, layer_bytes, config.limits, ring_frames),
        )

    masks = grammar_masks(config, checkpoint) if is_last else None
    on_cpu = CpuStageModel(Arithmetic(model, kernels, attention), weights, frames, masks)
    built = StageEdge(stage, pipeline, num_frames, on_cpu, *ends())
    built.make_ends = ends
    built.selected = [
        *sentences,
        f"layers: {layers.start} to {layers.stop - 1} of {model.num_stored_layers}, room for "
        f"{pipeline.num_places}",
    ]
    return built
