"""Start-up of an instance on a GPU, with a captured step."""

from __future__ import annotations

import os
import tempfile
from collections.abc import MutableMapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from data_plane.attention.backend import AttentionSite, attention_backend
from data_plane.graph.cuda_graphs import CudaGraphs, eager
from data_plane.graph.engine import GraphEngine, PairedEngine
from data_plane.instance.decode import DecodeInstance, Startup
from data_plane.instance.step_lane import StepLane
from data_plane.model.config import ModelConfig
from data_plane.model.linear import PlainPacking
from data_plane.model.weights import Progress, expert_range, load_experts, load_weights
from data_plane.moe.backend import fp8_experts
from data_plane.moe.fused.mixture import fused_obstacle
from data_plane.moe.gpu.all_to_all_gpu import GpuMixtures
from data_plane.moe.gpu.deep_ep import DeepEpExchange
from data_plane.moe.gpu.gpu_weights import GpuWeights, place_weights
from data_plane.moe.gpu.nixl_ep import NixlEpExchange
from data_plane.startup.gpu_parts import GpuParts, device_of, gpu_parts
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
from data_plane.transport.exchange import NO_TERM
from data_plane.transport.gpu.cuda_runtime import load_runtime
from data_plane.transport.gpu.ipc_memory import IpcMemory
from data_plane.transport.gpu.nvshmem import (
    NvshmemMemory,
    load_nvshmem,
    nvshmem_choice,
    nvshmem_obstacle,
)
from data_plane.transport.gpu.peer_memory import TermMemory, cuda_ipc_obstacle
from data_plane.transport.mailbox import mailbox_layout
from data_plane.transport.regions import TensorExchange
from data_plane.transport.segments import Segments
from nanocp.config.cluster import ClusterConfig
from nanocp.config.whole import Config
from nanocp.values.experts import num_slots

_EAGER = "graphs: none, every step is launched (eager)"
_NOT_TIMED = "no GPU has timed its kernel yet, so it is taken by name only"


def build_gpu_instance(
    config: Config, instance: int, segments: Segments, checkpoint: Path, progress: Progress
) -> DecodeInstance:
    """Build an instance on this machine's GPU, as startup.instance.build_instance says.

    Raises ValueError also for a configured backend that cannot run here.
    """
    cluster, data_plane, dtype = config.cluster, config.data_plane, torch_dtype(config.data_plane)
    _set_queues(cluster, os.environ)
    obstacle = cuda_ipc_obstacle(torch.device("cuda"))
    if obstacle:
        raise ValueError(f"device is cuda: {obstacle}")
    torch.cuda.set_device(device := device_of(cluster, instance))
    if data_plane.has_nvshmem and (obstacle := _nvshmem_obstacle(cluster, device)):
        raise ValueError(f"exchange_backend is nvshmem: {obstacle}")
    model = model_of(config, checkpoint)
    experts = expert_range(model, instance, cluster.num_instances)
    kv_dtype = torch.uint8 if data_plane.kv_dtype == "fp8" else dtype
    attention, attention_choice = attention_backend(
        data_plane.attention_backend, AttentionSite.of(model, device, dtype, kv_dtype)
    )
    moe = moe_backends(config, model, experts, device, _fused_obstacle(config, device))
    assert moe.gemm is not None, "a GPU has no loop"
    keeps_fp8, weights_choice = fp8_experts(model, moe.gemm, data_plane.dtype)
    packing = PlainPacking(keeps_fp8)
    weights = load_weights(checkpoint, model, dtype, experts, progress, packing)
    is_fused = moe.schedule is not None
    slots = _num_slots(cluster, model, moe.dispatch)
    # Behind a last token; where no step row is live, a turn may go on from an older window's.
    max_len = cluster.max_model_len + 2 * config.scheduler.num_drafts
    # What lays rows out by expert knows no shared one.
    is_alone = cluster.num_instances == 1 and moe.dispatch not in ("deep_ep", "nixl_ep")
    placed = place_weights(weights, device, moe.gemm, max_len, is_fused, slots, is_alone)
    new_parts = partial(
        gpu_parts, cluster, data_plane, model, placed, attention, config.limits.exchange_timeout_ms
    )
    parts = new_parts(is_fused=is_fused)
    parts.frames.carry = new_carry(config, model, cluster.bounds.max_rows + 1, device)
    lanes = [parts]
    if config.scheduler.has_lanes:
        lanes.append(new_parts(frames=parts.frames))
    mailbox = mailbox_layout(cluster)
    new_ends = partial(term_ends, config, instance, segments, mailbox, parts.frames)
    ends = new_ends()
    capture = _capture(config, lanes)
    weights_choice = weights_choice if model.fp8_block is not None else ""
    sentences = [*moe.sentences, *carry_choice(model, dtype)]
    meeting = _meeting(config, instance, segments, lanes, model, placed, moe.dispatch)
    engines = [GraphEngine(lane.pool, bucket_table(config), capture) for lane in lanes]
    tensors = TensorExchange(ends.exchange, mailbox)
    startup = Startup(
        lanes=[
            StepLane(engine, lane.step, tensors)
            for engine, lane in zip(engines, lanes, strict=True)
        ],
        frames=parts.frames,
        ends=ends,
        selected=_selected(config, attention_choice, sentences, weights_choice),
        load_experts=lambda held: load_experts(
            checkpoint, model, dtype, placed.weights, held, packing, placed.put_expert
        ),
        new_ends=None if moe.dispatch == "deep_ep" or data_plane.has_nvshmem else new_ends,
        drafts_alone=True,
        both_lanes=_both_lanes(config, lanes, engines, capture) if lanes[1:] else None,
        graphs_report=lambda: [_EAGER if data_plane.eager else capture.report],
        meeting=meeting,
    )
    built = DecodeInstance(config, startup)
    if moe.dispatch != "deep_ep":
        meeting.be_alone()
        built.prepare()
    return built


def _set_queues(cluster: ClusterConfig, environment: MutableMapping[str, str]) -> None:
    """Give streams of instances that share a GPU a queue each, before any call of CUDA.

    With 8 queues a replay takes a third of the processor time (docs/use/gpu.md).
    """
    if min(cluster.num_instances, cluster.instances_per_node) > torch.cuda.device_count():
        environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def _nvshmem_obstacle(cluster: ClusterConfig, device: torch.device) -> str:
    on_node = min(cluster.num_instances, cluster.instances_per_node)
    return nvshmem_obstacle(
        has_far_peers=cluster.num_nodes > 1,
        orders_writes=load_runtime(device.index or 0).orders_writes,
        shares_gpu=on_node > torch.cuda.device_count(),
    )


def _capture(config: Config, lanes: Sequence[GpuParts]) -> Any:
    first, *beside = ((lane.pool, lane.step.run) for lane in lanes)
    draft = lanes[0].step.draft if config.scheduler.num_drafts else None
    return (eager if config.data_plane.eager else CudaGraphs)(*first, *beside, draft=draft)


def _num_slots(cluster: ClusterConfig, model: ModelConfig, dispatch: str) -> int:
    """Return the slots for experts in a layer; 0, for DeepEP: as many as experts."""
    if dispatch == "deep_ep":
        return 0
    return num_slots(model.num_experts, cluster.num_instances, cluster.redundant_experts)


def _selected(
    config: Config, attention_choice: str, sentences: Sequence[str], weights_choice: str
) -> list[str]:
    data_plane = config.data_plane
    exchange = "exchange: cuda_ipc, peers' memory on one node"
    if data_plane.has_nvshmem:
        exchange = nvshmem_choice(config.cluster.num_nodes > 1)
    selected = [
        f"attention: {attention_choice}",
        exchange,
        page_choice(config),
        f"wire form: {data_plane.wire_form}",
        *sentences,
        f"KV: {'FP8' if data_plane.kv_dtype == 'fp8' else data_plane.dtype}",
    ]
    if weights_choice:
        selected.append(f"weights: {weights_choice}")
    if config.scheduler.has_lanes:
        selected.append(f"lanes: up to two ({config.scheduler.lanes})")
    return selected


def _both_lanes(
    config: Config, lanes: Sequence[GpuParts], engines: Sequence[GraphEngine], capture: Any
) -> PairedEngine:
    return PairedEngine(
        engines,
        bucket_table(config),
        lambda bucket: capture(*(lane.pool.context(bucket) for lane in lanes)),
    )


def _fused_obstacle(config: Config, device: torch.device) -> str:
    if config.data_plane.dispatch_backend != "fused":
        return _NOT_TIMED
    return fused_obstacle(
        torch.cuda.get_device_properties(device),
        torch_dtype(config.data_plane),
        config.data_plane.expert_backend,
        num_nodes=config.cluster.num_nodes,
    )


class _Meeting:
    """Maps the memory of a term's instances, by lane."""

    nixl_ep: NixlEpExchange | None = None

    def __init__(
        self, config: Config, instance: int, segments: Segments, lanes: Sequence[GpuParts]
    ) -> None:
        self._instance, self._term, self._lanes = instance, segments.term, lanes
        self._memories = self._make_memories(config, segments)
        for lane in lanes:
            segments.term.mirror(lane.exchange.ended)

    def _make_memories(self, config: Config, segments: Segments) -> Sequence[TermMemory]:
        runtime = load_runtime(self._lanes[0].step.logits.device.index or 0)
        return [
            IpcMemory(runtime, segments, number, self._instance, lane.places, config.limits)
            for number, lane in enumerate(self._lanes)
        ]

    def meet(self, seats: Sequence[int]) -> None:
        """Begin the present term, as IpcMemory.begin_term does."""
        self._attach(seats, self._term.number)
        if self.nixl_ep is not None:
            self.nixl_ep.begin_term(seats)

    def be_alone(self) -> None:
        """Let this instance run steps alone, before its first term."""
        self._attach([self._instance], NO_TERM)

    def part(self) -> None:
        if self.nixl_ep is not None:
            self.nixl_ep.leave()
        for memory in self._memories:
            memory.leave()

    def _attach(self, seats: Sequence[int], term: int) -> None:
        for lane, memory in zip(self._lanes, self._memories, strict=True):
            lane.exchange.attach(memory.begin_term(seats), term)


class _NvshmemMeeting(_Meeting):
    def _make_memories(self, config: Config, segments: Segments) -> Sequence[TermMemory]:
        self._nvshmem = load_nvshmem(segments.address)
        device = self._lanes[0].step.logits.device
        return [
            NvshmemMemory(
                self._nvshmem, segments, self._instance, lane.places, config.limits, device
            )
            for lane in self._lanes
        ]

    def meet(self, seats: Sequence[int]) -> None:
        super().meet(seats)
        # Its kernels were loaded when graphs were captured, before NVSHMEM had started. It has not
        # if this instance is the only one.
        if self._nvshmem.is_started:
            self._nvshmem.initialise(self._lanes[0].exchange.forwarding_module())


class _DeepEpMeeting(_Meeting):
    """Begins the only term of instances with DeepEP, and opens DeepEP's buffers."""

    def __init__(
        self,
        config: Config,
        instance: int,
        segments: Segments,
        lane: GpuParts,
        model: ModelConfig,
        weights: GpuWeights,
    ) -> None:
        super().__init__(config, instance, segments, [lane])
        self._config, self._model, self._weights = config, model, weights
        self._path = _store_path(segments)

    def meet(self, seats: Sequence[int]) -> None:
        import torch.distributed as dist

        cluster, (lane,) = self._config.cluster, self._lanes
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(self._path, cluster.num_instances),  # type: ignore[attr-defined]
            rank=self._instance,
            world_size=cluster.num_instances,
            timeout=timedelta(milliseconds=self._config.limits.start_timeout_ms),
        )
        super().meet(seats)
        all_to_all = DeepEpExchange.open(
            dist.group.WORLD,
            num_instances=cluster.num_instances,
            num_experts=self._model.num_experts,
            hidden_size=self._model.hidden_size,
            max_rows=cluster.bounds.max_rows,
        )
        lane.step.mixture = GpuMixtures(all_to_all, self._model, self._weights)
        if self._instance == 0:
            os.unlink(self._path)


def _meeting(
    config: Config,
    instance: int,
    segments: Segments,
    lanes: Sequence[GpuParts],
    model: ModelConfig,
    weights: GpuWeights,
    dispatch: str,
) -> _Meeting:
    cluster, first = config.cluster, lanes[0]
    if dispatch == "deep_ep":
        return _DeepEpMeeting(config, instance, segments, first, model, weights)
    kind = _NvshmemMeeting if config.data_plane.has_nvshmem else _Meeting
    meeting = kind(config, instance, segments, lanes)
    if dispatch == "nixl_ep":
        device = first.step.logits.device
        own = NixlEpExchange(segments, instance, cluster, model, config.limits, device)
        first.step.mixture, first.step.check_mixture = GpuMixtures(own, model, weights), own.check
        meeting.nixl_ep = own
    return meeting


def _store_path(segments: Segments) -> str:
    """Name the file in which DeepEP's instances meet, so no port must be free."""
    return f"{tempfile.gettempdir()}/nanocp-{segments.cluster_id}-group"
