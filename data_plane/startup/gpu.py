"""Start-up of an instance on a GPU, with a step that is captured.

Enters: Config, checkpoint folder, which instance of which cluster. Leaves: a DecodeInstance, not
yet connected. Does not know: what starts it, gRPC, Ray.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from data_plane.attention.backend import AttentionSite, attention_backend
from data_plane.graph.cuda_graphs import CudaGraphs, eager
from data_plane.graph.engine import GraphEngine
from data_plane.instance.decode import DecodeInstance
from data_plane.model.config import ModelConfig
from data_plane.model.linear import PlainPacking
from data_plane.model.weights import Progress, expert_range, load_weights
from data_plane.moe.all_to_all_gpu import GpuMixtures
from data_plane.moe.backend import fp8_experts
from data_plane.moe.deep_ep import DeepEpExchange
from data_plane.moe.fused import fused_obstacle
from data_plane.moe.gpu_weights import GpuWeights, place_weights
from data_plane.startup.gpu_parts import GpuParts, device_of, gpu_parts
from data_plane.startup.shared_parts import (
    bucket_table,
    moe_backends,
    page_choice,
    page_ways,
    torch_dtype,
)
from data_plane.transport.cuda_ipc import PeerMemory, cuda_ipc_obstacle
from data_plane.transport.mailbox import mailbox_layout
from data_plane.transport.regions import TensorExchange
from data_plane.transport.segments import Segments
from data_plane.transport.shm import ShmExchange
from nanocp.config import Config

_NOT_TIMED = "no GPU has timed its kernel yet, so it is taken by name only"
_NVSHMEM = (
    "exchange_backend is nvshmem: puts between nodes from the device are not there yet "
    "(docs/decisions/0018); cuda_ipc serves the GPUs of one node"
)


def build_gpu_instance(
    config: Config, instance: int, segments: Segments, checkpoint: Path, progress: Progress
) -> DecodeInstance:
    """Build an instance on this machine's GPU; see startup.instance.build_instance.

    Raises ValueError also for a backend of the configuration that cannot run here.
    """
    cluster, data_plane, dtype = config.cluster, config.data_plane, torch_dtype(config)
    if data_plane.exchange_backend == "nvshmem":
        raise ValueError(_NVSHMEM)
    obstacle = cuda_ipc_obstacle(torch.device("cuda"))
    if obstacle:
        raise ValueError(f"device is cuda: {obstacle}")
    device = device_of(cluster, instance)
    torch.cuda.set_device(device)
    model = ModelConfig.from_folder(checkpoint)
    experts = expert_range(model, instance, cluster.num_instances)
    kv_dtype = torch.uint8 if data_plane.kv_dtype == "fp8" else dtype
    attention, attention_choice = attention_backend(
        data_plane.attention_backend, AttentionSite.of(model, device, dtype, kv_dtype)
    )
    moe = moe_backends(config, model, experts, device, _fused_obstacle(config, device))
    assert moe.gemm is not None, "a GPU has no loop"
    keeps_fp8, weights_choice = fp8_experts(model, moe.gemm, data_plane.dtype)
    weights = load_weights(checkpoint, model, dtype, experts, progress, PlainPacking(keeps_fp8))
    is_fused = moe.schedule is not None
    placed = place_weights(weights, device, moe.gemm, cluster.max_model_len, is_fused)
    parts = gpu_parts(
        cluster,
        data_plane,
        model,
        placed,
        attention,
        config.limits.exchange_timeout_ms,
        is_fused=is_fused,
    )
    mailbox = mailbox_layout(cluster)
    exchange = ShmExchange.create(segments, instance, cluster.num_instances, mailbox, config.limits)
    rings, moves = page_ways(config, instance, segments, parts.frames)
    capture: Any = (eager if data_plane.eager else CudaGraphs)(parts.pool, parts.step.run)
    selected = [
        f"attention: {attention_choice}",
        "exchange: cuda_ipc, peers' memory on one node",
        page_choice(config),
        f"wire form: {data_plane.wire_form}",
        *moe.sentences,
        f"KV: {'FP8' if kv_dtype == torch.uint8 else data_plane.dtype}",
    ]
    if model.fp8_block is not None:
        selected.append(f"weights: {weights_choice}")
    meet = _meeting(config, instance, segments.cluster_id, parts, model, placed, moe.has_deep_ep)
    engine = GraphEngine(parts.pool, bucket_table(config), capture)
    tensors = TensorExchange(exchange, mailbox)

    def graphs_report() -> list[str]:
        if data_plane.eager:
            return ["graphs: none, every step is launched (eager)"]
        return [capture.report]

    return DecodeInstance(
        config,
        parts.step,
        parts.frames,
        engine,
        tensors,
        rings,
        moves,
        selected,
        meet,
        graphs_report=graphs_report,
    )


def _fused_obstacle(config: Config, device: torch.device) -> str:
    """Say why a mixture cannot be one launch here; an empty string if it can."""
    if config.data_plane.dispatch_backend != "fused":
        return _NOT_TIMED
    return fused_obstacle(
        torch.cuda.get_device_properties(device),
        torch_dtype(config),
        config.data_plane.expert_backend,
        num_nodes=-(-config.cluster.num_instances // config.cluster.instances_per_node),
    )


def _meeting(
    config: Config,
    instance: int,
    cluster_id: str,
    parts: GpuParts,
    model: ModelConfig,
    weights: GpuWeights,
    has_deep_ep: bool,
) -> Callable[[], None]:
    """Make what maps the peers' memory, called once together with all of them."""
    cluster, device = config.cluster, parts.step.logits.device

    def meet() -> None:
        if cluster.num_instances == 1:
            (memory,) = PeerMemory.create_all(parts.places, device)
            parts.exchange.attach(memory)
            return
        import torch.distributed as dist

        # A file, not a port, since cuda_ipc is for one node: no port has to be found free.
        path = f"{tempfile.gettempdir()}/nanocp-{cluster_id}-group"
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(path, cluster.num_instances),  # type: ignore[attr-defined]
            rank=instance,
            world_size=cluster.num_instances,
            timeout=timedelta(milliseconds=config.limits.start_timeout_ms),
        )
        parts.exchange.attach(PeerMemory.create(parts.places, device, dist.group.WORLD))
        if has_deep_ep:
            all_to_all = DeepEpExchange.open(
                dist.group.WORLD,
                num_instances=cluster.num_instances,
                num_experts=model.num_experts,
                hidden_size=model.hidden_size,
                max_rows=cluster.bounds.max_rows,
            )
            parts.step.mixture = GpuMixtures(all_to_all, model, weights)
        if instance == 0:
            os.unlink(path)

    return meet
