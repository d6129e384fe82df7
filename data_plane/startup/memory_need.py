"""Memory need of an instance or stage, from config.json before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import psutil

from data_plane.kv.stage_rings import RING_FRAMES, places_of
from data_plane.model.config import ModelConfig
from data_plane.model.sizes import (
    carry_bytes,
    carry_pages,
    embedding_shapes,
    head_shapes,
    is_packed,
    item_bytes,
    layer_shapes,
    page_bytes,
    stays_fp8,
    stored_shapes,
)
from data_plane.transport.gpu.peer_memory import RegionPlaces
from data_plane.transport.regions import step_layout
from nanocp.config.choices import require
from nanocp.config.cluster import ClusterConfig
from nanocp.config.data_plane import DataPlaneConfig
from nanocp.config.pipeline import PipelineConfig
from nanocp.values.experts import num_slots
from nanocp.values.passes import layers_of


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes of each instance; the rest of its memory may hold frames."""

    experts: int
    other_weights: int
    """Weights that every instance has."""
    exchange: int
    page: int
    """One frame: a page of all layers."""
    state: int
    """A row's recurrent state, or 0."""
    states: int
    """Recurrent states of all rows, or 0."""

    @property
    def fixed(self) -> int:
        """Bytes of all but the frames."""
        return self.experts + self.other_weights + self.exchange + self.states


def memory_need(
    model: ModelConfig,
    cluster: ClusterConfig,
    data_plane: DataPlaneConfig,
    has_lanes: bool,
    stores_bf16: bool,
) -> MemoryNeed:
    """Compute what each instance of the cluster that `config` describes needs.

    stores_bf16: of the checkpoint, which native kernels keep. Raises ValueError if the model's KV
    cannot be in FP8.
    """
    num_instances, redundant = cluster.num_instances, cluster.redundant_experts
    each = item_bytes(data_plane)
    matrix_bytes = 2 if keeps_bf16(data_plane, stores_bf16) else each
    experts = range(model.num_experts and num_slots(model.num_experts, num_instances, redundant))
    others = stored_shapes(model, range(0))
    other = _bytes(others, each, matrix_bytes)
    of_experts = _bytes(stored_shapes(model, experts), each, matrix_bytes) - other
    if model.tied_embeddings:
        # The head is laid out for its GEMM, apart from the embedding.
        other += model.vocab_size * model.hidden_size * matrix_bytes
    page = page_bytes(model, data_plane)
    state = carry_pages(model, data_plane) * page
    keeps_fp8 = model.fp8_block is not None and data_plane.device == "cuda"
    if keeps_fp8 and data_plane.expert_backend == "deep_gemm":
        dense = {name: shape for name, shape in others.items() if stays_fp8(model, name, shape)}
        other -= _bytes(dense, each, matrix_bytes - 1)
    layout = step_layout(cluster.bounds, data_plane, model)
    region = sum(
        math.prod(field.shape) * np.dtype(field.dtype).itemsize
        for fields in layout.values()
        for field in fields
    )
    regions = 2 * region * (num_instances - 1)
    if data_plane.has_nvshmem:
        # Packed rows are aligned, and those for other nodes wait here until they are put.
        regions = RegionPlaces(layout, num_instances, is_packed=True).num_bytes
    return MemoryNeed(
        experts=of_experts // matrix_bytes if keeps_fp8 else of_experts,
        other_weights=other,
        exchange=regions * (1 + has_lanes),
        page=page,
        state=state,
        # One more may be leaving, and the scratch frame has one.
        states=state * (cluster.bounds.max_rows + 2),
    )


def prefill_bytes(model: ModelConfig, data_plane: DataPlaneConfig, max_rows: int) -> int:
    """Bytes of the weights and states of an embedded prefill: one process with the whole model.

    Of an MTP layer it has no experts. What it computes with comes on top: some hundred MB after
    long prompts.
    """
    each = item_bytes(data_plane)
    shapes = stored_shapes(replace(model, num_mtp_layers=0), range(model.num_experts))
    states = (1 + max_rows) * carry_bytes(model, each)
    return _bytes(shapes | stored_shapes(model, range(0)), each, each) + states


def check_memory(cluster: ClusterConfig, need: MemoryNeed) -> None:
    """Check what the instances of this machine need, before anything is allocated.

    stores_bf16: see memory_need. Raises ValueError, naming the field and the sizes, if it is more
    than the machine has.
    """
    num_instances = min(cluster.num_instances, cluster.instances_per_node)
    frames, gb = cluster.num_frames * need.page, 1e9
    total = psutil.virtual_memory().total
    require(
        num_instances * (need.fixed + frames) <= total,
        f"each of {num_instances} instances needs {need.fixed / gb:.1f} GB for weights and "
        f"exchange, and {frames / gb:.1f} GB for frames (cluster.num_frames is "
        f"{cluster.num_frames}, of {need.page / 1e6:.2f} MB); the machine has {total / gb:.1f} GB",
    )


@dataclass(frozen=True, slots=True)
class StageNeed:
    """Bytes of a stage of a pipeline at its start; the rest may hold frames."""

    weights: int
    """All experts of the stage's layers, and the embedding or head."""
    rings: int
    """Rings of hidden rows or tokens, and of KV of layers that move."""
    page: int
    """One frame: a page of its layers."""


def stage_needs(
    model: ModelConfig, pipeline: PipelineConfig, data_plane: DataPlaneConfig, stores_bf16: bool
) -> list[StageNeed]:
    """Compute what each stage of the pipeline that `config` describes needs.

    stores_bf16: see memory_need. Raises ValueError if stages and layers do not fit.
    """
    each = item_bytes(data_plane)
    matrix_bytes = 2 if keeps_bf16(data_plane, stores_bf16) else each
    pass_bytes = pipeline.max_pass_tokens * model.hidden_size * each
    frame_bytes = page_bytes(model, data_plane) // model.num_kept_layers
    needs, last = [], pipeline.num_stages - 1
    for stage, count in enumerate(pipeline.first_split):
        shapes = embedding_shapes(model) if stage == 0 else {}
        for layer in layers_of(pipeline.first_split, stage):
            shapes |= layer_shapes(model, layer, range(model.num_experts))
        weights = _bytes(shapes, each, matrix_bytes)
        if stage == last:
            weights += _bytes(head_shapes(model), each, matrix_bytes)
        rings = last * RING_FRAMES * frame_bytes
        if stage:
            rings += places_of(pipeline.num_stages) * pass_bytes
        needs.append(StageNeed(weights, rings, count * frame_bytes))
    return needs


def keeps_bf16(data_plane: DataPlaneConfig, stores_bf16: bool) -> bool:
    """Whether instances keep a checkpoint's bf16 matrices, though they compute in fp32."""
    is_native = data_plane.device == "cpu" and data_plane.cpu_kernels != "torch"
    return stores_bf16 and is_native and data_plane.dtype == "float32"


def smallest_cluster(
    model: ModelConfig,
    cluster: ClusterConfig,
    data_plane: DataPlaneConfig,
    has_lanes: bool,
    stores_bf16: bool,
    room: float,
) -> int | None:
    """Find the fewest instances, from those of `config` on, that leave room for some frames.

    stores_bf16: see memory_need. usable, reserve: bytes of an instance's memory, and of what frames
    and weights may not take. Returns None if more instances do not help.
    """
    fewest = cluster.num_instances
    for number in range(fewest, max(model.num_experts, fewest) + 1):
        cluster = replace(cluster, num_instances=number, instances_per_node=number)
        need = memory_need(model, cluster, data_plane, has_lanes, stores_bf16)
        if need.fixed + need.page <= room:
            return number
    return None


def _bytes(shapes: Mapping[str, tuple[int, ...]], item_bytes: int, matrix_bytes: int) -> int:
    return sum(
        math.prod(shape) * (matrix_bytes if is_packed(name, shape) else item_bytes)
        for name, shape in shapes.items()
    )
