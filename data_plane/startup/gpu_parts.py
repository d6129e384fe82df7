"""A step on a GPU with its parts, from weights and bounds; the exchange is not yet attached."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from data_plane.attention.paged import Attention
from data_plane.graph.pool_gpu import GpuPool
from data_plane.kv.frame_pool import FramePool
from data_plane.model.config import ModelConfig
from data_plane.moe.fused.mixture import FusedMixtures, FusedMoe
from data_plane.moe.gpu.all_to_all_gpu import GpuAllToAll, GpuAlone, GpuExpertExchange, GpuMixtures
from data_plane.moe.gpu.gpu_weights import GpuWeights
from data_plane.moe.mixture import NormedMixture, SlotNames
from data_plane.step.gpu import GpuStep
from data_plane.transport.gpu.cuda_ipc import GpuExchange
from data_plane.transport.gpu.peer_memory import RegionPlaces
from data_plane.transport.regions import step_layout
from nanocp.config.cluster import ClusterConfig
from nanocp.config.data_plane import DataPlaneConfig
from nanocp.values.experts import home_table


class GpuParts(NamedTuple):
    """A step on a GPU, with its memory."""

    step: GpuStep
    frames: FramePool
    pool: GpuPool
    exchange: GpuExchange
    """Attach it before the first step."""
    places: RegionPlaces


def device_of(cluster: ClusterConfig, instance: int) -> torch.device:
    """Return the GPU of an instance: each of a node has its own, or they share."""
    return torch.device("cuda", instance % cluster.instances_per_node % torch.cuda.device_count())


def gpu_parts(
    cluster: ClusterConfig,
    data_plane: DataPlaneConfig,
    model: ModelConfig,
    weights: GpuWeights,
    attention: Attention,
    timeout_ms: float,
    is_fused: bool = False,
    frames: FramePool | None = None,
) -> GpuParts:
    """Build a step and its parts on the device of `weights`.

    timeout_ms: longest wait for a peer. is_fused: a MoE layer is one launch. frames: of another
    lane, to share. New frames have no recurrent states yet (FramePool.carry).
    """
    dtype, device = weights.weights.embedding.dtype, weights.weights.embedding.device
    fp8_rank = model.attention.fp8_rank() if data_plane.kv_dtype == "fp8" else None
    kv_width = model.attention.kv_width
    frames = frames or FramePool(
        model.num_kept_layers, cluster.num_frames, kv_width, dtype, device, fp8_rank
    )
    pool = GpuPool(cluster, device, frames.scratch_slot)
    layout = step_layout(cluster.bounds, data_plane, model)
    places = RegionPlaces(layout, cluster.num_instances, is_packed=data_plane.has_nvshmem)
    exchange = GpuExchange(places, device, timeout_ms)
    mixture: NormedMixture | None = None
    if model.num_experts:
        home = home_table(model.num_experts, cluster.num_instances, cluster.redundant_experts)
        names = SlotNames(home, weights.weights.layers, model.num_experts, device)
        sizes: dict[str, Any] = {
            "num_instances": cluster.num_instances,
            "num_here": home.num_slots,
            "max_rows": cluster.bounds.max_rows,
            "device": device,
        }
        if is_fused:
            fused = FusedMoe(
                exchange,
                model,
                is_fp8=weights.has_fp8_experts,
                dtype=dtype,
                **sizes,
            )
            mixture = FusedMixtures(fused, weights, model.norm_eps, names)
        else:
            all_to_all: GpuAllToAll = GpuAlone()
            if cluster.num_instances > 1:
                all_to_all = GpuExpertExchange(exchange, **sizes)
            mixture = GpuMixtures(all_to_all, model, weights, names, exchange)
    step = GpuStep(
        model,
        weights,
        frames,
        pool,
        exchange,
        attention,
        mixture,
        data_plane.wire_form,
        cluster.bounds,
    )
    return GpuParts(step, frames, pool, exchange, places)
