"""Start-up of an instance on the CPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from data_plane.graph.engine import GraphEngine
from data_plane.graph.pool_cpu import ContextPool
from data_plane.instance.decode import DecodeInstance, Startup
from data_plane.instance.step_lane import StepLane
from data_plane.kv.frame_pool import FramePool
from data_plane.model.weights import ModelWeights, Progress, expert_range, load_weights
from data_plane.moe.expert_weights import ExpertWeights
from data_plane.moe.mixture import MoeSchedule
from data_plane.startup.cpu_parts import cpu_parts, kernels_for
from data_plane.startup.memory_need import check_memory, memory_need
from data_plane.startup.shared_parts import (
    bucket_table,
    carry_choice,
    model_of,
    moe_backends,
    new_carry,
    page_choice,
    term_ends,
    torch_dtype,
)
from data_plane.step.cpu import CpuStep
from data_plane.step.cpu_kernels import Arithmetic, cpu_mixtures, fused_obstacle
from data_plane.step.probe import Probe, no_probe
from data_plane.transport.exchange import in_two_lanes
from data_plane.transport.regions import TensorExchange, region_layout
from data_plane.transport.segments import Segments
from data_plane.transport.shm import ShmExchange
from nanocp.config.whole import Config
from nanocp.overlap.policies.registry import lane_policy
from nanocp.values.experts import home_table


def load_shared_weights(config: Config, checkpoint: Path) -> ModelWeights:
    """Load all weights but experts: the same on every instance."""
    dtype, model = torch_dtype(config.data_plane), model_of(config, checkpoint)
    kernels, _ = kernels_for(config.data_plane, model, checkpoint)
    return load_weights(checkpoint, model, dtype, range(0), packing=kernels)


def build_cpu_instance(
    config: Config,
    instance: int,
    segments: Segments,
    checkpoint: Path,
    progress: Progress,
    shared: ModelWeights | None = None,
    probe: Probe = no_probe,
    exchange: type[ShmExchange] = ShmExchange,
) -> DecodeInstance:
    """Build an instance on the CPU, not yet connected, as startup.instance.build_instance says.

    shared: weights to which only the instance's experts are added. probe: of its steps. Raises
    ValueError also for a configured backend that cannot run here.
    """
    dtype = torch_dtype(config.data_plane)
    cluster = config.cluster
    model = model_of(config, checkpoint)
    experts = expert_range(model, instance, cluster.num_instances)
    kernels, attention, sentences = cpu_parts(config.data_plane, model, checkpoint)
    has_lanes = config.scheduler.has_lanes
    need = memory_need(model, cluster, config.data_plane, has_lanes, kernels.keeps_bf16)
    check_memory(cluster, need)
    moe = moe_backends(config, model, experts, torch.device("cpu"), fused_obstacle(kernels))
    assert moe.gemm is None, "the CPU's step runs the loop"
    schedule = moe.schedule
    if schedule is not None and probe is not no_probe and not has_lanes:
        # Where rows are awaited inside the call, waits would count as experts.
        schedule = MoeSchedule.BARRIER
    weights = shared or load_weights(checkpoint, model, dtype, experts, progress, kernels)
    slots = ExpertWeights(checkpoint, model, dtype, weights, instance, kernels)
    if shared is not None:
        slots.load(home_table(model.num_experts, cluster.num_instances))
    frames = FramePool(model.num_kept_layers, cluster.num_frames, model.attention.kv_width, dtype)
    frames.carry = new_carry(config, model, cluster.bounds.max_rows + 1)
    layout = region_layout(cluster, config.data_plane, model)
    if has_lanes:
        layout = in_two_lanes(layout)
    new_ends = partial(term_ends, config, instance, segments, layout, frames, exchange)
    ends = new_ends()

    def new_lane(number: int) -> StepLane:
        tensors = TensorExchange(ends.exchange, layout, number)
        mixtures = cpu_mixtures(schedule, tensors, model, weights, kernels, cluster, probe)
        form = config.data_plane.wire_form
        arithmetic = Arithmetic(model, kernels, attention)
        step = CpuStep(arithmetic, weights, frames, tensors, mixtures, form, cluster.bounds, probe)
        engine = GraphEngine(ContextPool(cluster), bucket_table(config), step.capture)
        return StepLane(engine, step, tensors)

    selected = [
        *sentences,
        _exchange_choice(config),
        page_choice(config),
        f"wire form: {config.data_plane.wire_form}",
        *moe.sentences,
    ]
    if model.fp8_block is not None:
        selected.append(_fp8_choice(model.fp8_block, config.data_plane.dtype))
    selected += carry_choice(model, dtype)
    if has_lanes:
        selected.append(f"lanes: up to two ({config.scheduler.lanes})")
    return DecodeInstance(
        config,
        Startup(
            lanes=[new_lane(number) for number in range(1 + has_lanes)],
            frames=frames,
            ends=ends,
            selected=selected,
            orders=[lane_policy(order) for order in config.scheduler.lane_orders],
            experts=slots,
            new_ends=new_ends,
        ),
    )


def _exchange_choice(config: Config) -> str:
    match config.data_plane.exchange_backend:
        case "tcp":
            return "exchange: TCP, as configured"
        case "shm":
            return "exchange: shared memory, as configured"
    return "exchange: shared memory within a node, TCP between nodes (auto)"


def _fp8_choice(block: tuple[int, int], dtype: str) -> str:
    rows, columns = block
    return f"weights: FP8 in blocks of {rows}x{columns}, de-quantised to {dtype}"
