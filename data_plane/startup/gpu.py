"""Start-up of an instance on a GPU, with a captured step."""

from __future__ import annotations

import os
from collections.abc import Callable, MutableMapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from data_plane.attention.backend import AttentionSite, attention_backend
from data_plane.graph.cuda_graphs import CudaGraphs, eager
from data_plane.graph.engine import GraphEngine, PairedEngine
from data_plane.instance.decode import DecodeInstance, Startup
from data_plane.instance.step_lane import StepLane
from data_plane.kv.gpu_copies import GpuCopies
from data_plane.model.config import ModelConfig
from data_plane.model.linear import PlainPacking
from data_plane.model.weights import MlpWeights, Progress, expert_range, load_weights
from data_plane.moe.backend import fp8_experts
from data_plane.moe.expert_weights import ExpertWeights
from data_plane.moe.fused.mixture import fused_obstacle
from data_plane.moe.gpu.gpu_weights import GpuWeights, place_weights
from data_plane.startup.experimental_backends import DISPATCHES, EXCHANGES, ExchangeEnd, TermEnd
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
from data_plane.step.probe import Probe, no_probe
from data_plane.transport.exchange import NO_TERM
from data_plane.transport.gpu.cuda_ipc import GpuExchange
from data_plane.transport.gpu.cuda_runtime import load_runtime
from data_plane.transport.gpu.ipc_memory import IpcMemory
from data_plane.transport.gpu.peer_memory import TermMemory, cuda_ipc_obstacle
from data_plane.transport.mailbox import mailbox_layout
from data_plane.transport.regions import TensorExchange
from data_plane.transport.segments import Segments
from nanocp.config.cluster import ClusterConfig
from nanocp.config.whole import Config
from nanocp.overlap.policies.registry import lane_policy
from nanocp.values.experts import num_slots

_EAGER = "graphs: none, every step is launched (eager)"
_SLOWER = "one H200 ran it slower than its parts, so it is taken by name only"


def build_gpu_instance(
    config: Config,
    instance: int,
    segments: Segments,
    checkpoint: Path,
    progress: Progress,
    probe: Probe = no_probe,
) -> DecodeInstance:
    """Build an instance on this GPU. Raises ValueError for a backend that cannot run here.

    probe: of its step.
    """
    cluster, data_plane, dtype = config.cluster, config.data_plane, torch_dtype(config.data_plane)
    _set_queues(cluster, os.environ)
    obstacle = cuda_ipc_obstacle(torch.device("cuda"))
    if obstacle:
        raise ValueError(f"device is cuda: {obstacle}")
    torch.cuda.set_device(device := device_of(cluster, instance))
    exchange = data_plane.exchange_backend
    if data_plane.dispatch_backend == "deep_ep":
        # As DeepEP does, which starts NVSHMEM for both.
        os.environ["NVSHMEM_IB_ENABLE_IBGDA"] = "1"
    if exchange in EXCHANGES and (obstacle := _exchange_obstacle(exchange, cluster, device)):
        raise ValueError(f"exchange_backend is {exchange}: {obstacle}")
    model = model_of(config, checkpoint)
    experts = expert_range(model, instance, cluster.num_instances)
    kv_dtype = torch.uint8 if data_plane.kv_dtype == "fp8" else dtype
    attention, attention_choice = attention_backend(
        data_plane.attention_backend, AttentionSite.of(model, device, dtype, kv_dtype)
    )
    site = dtype, model, cluster.num_instances, cluster.bounds.max_rows
    obstacles = {name: partial(each.obstacle, *site) for name, each in DISPATCHES.items()}
    fused = _fused_obstacle(config, device)
    moe = moe_backends(config, model, experts, device, fused, obstacles)
    assert moe.gemm is not None, "a GPU has no loop"
    keeps_fp8, weights_choice = fp8_experts(model, moe.gemm, data_plane.dtype)
    packing = PlainPacking(keeps_fp8)
    weights = load_weights(checkpoint, model, dtype, experts, progress, packing)
    is_fused = moe.schedule is not None
    has_terms = moe.dispatch not in DISPATCHES or DISPATCHES[moe.dispatch].has_terms
    slots = num_slots(model.num_experts, cluster.num_instances, cluster.redundant_experts)
    # Behind a last token; where no step row is live, a turn may go on from an older window's.
    max_len = cluster.max_model_len + 2 * config.scheduler.num_drafts
    # What lays rows out by expert knows no shared one.
    is_alone = cluster.num_instances == 1 and moe.dispatch not in DISPATCHES
    placed = place_weights(weights, device, moe.gemm, max_len, is_fused, slots, is_alone)
    new_parts = partial(
        gpu_parts, cluster, data_plane, model, placed, attention, config.limits.exchange_timeout_ms
    )
    parts = new_parts(is_fused=is_fused)
    parts.step.probe = probe
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
    meeting = _meeting(config, instance, segments, lanes, model, moe.dispatch)
    engines = [GraphEngine(lane.pool, bucket_table(config), capture) for lane in lanes]
    tensors = TensorExchange(ends.exchange, mailbox)
    startup = Startup(
        lanes=[StepLane(one, lane.step, tensors) for one, lane in zip(engines, lanes, strict=True)],
        frames=parts.frames,
        ends=ends,
        selected=_selected(config, attention_choice, sentences, weights_choice),
        orders=[lane_policy(order) for order in config.scheduler.lane_orders],
        experts=ExpertWeights(
            checkpoint, model, dtype, placed.weights, instance, packing, _put_aside(placed, device)
        ),
        new_ends=new_ends if has_terms and exchange not in EXCHANGES else None,
        drafts_alone=True,
        both_lanes=_both_lanes(config, lanes, engines, capture) if lanes[1:] else None,
        graphs_report=lambda: [_EAGER if data_plane.eager else capture.report],
        meeting=meeting,
        copies=partial(GpuCopies, load_runtime(device.index or 0), device),
    )
    built = DecodeInstance(config, startup)
    if has_terms:
        meeting.prepare = built.prepare
        if exchange not in EXCHANGES:
            meeting.prepare_alone()
    return built


def _put_aside(placed: GpuWeights, device: torch.device) -> Callable[[int, int, MlpWeights], None]:
    """Put experts into slots beside the steps: on a stream of its own."""
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def put(layer: int, slot: int, mlp: MlpWeights) -> None:
        with torch.cuda.stream(stream):
            placed.put_expert(layer, slot, mlp)
        stream.synchronize()

    return put


def _set_queues(cluster: ClusterConfig, environment: MutableMapping[str, str]) -> None:
    """Give streams of instances that share a GPU a queue each, before any call of CUDA.

    With 8 queues a replay takes a third of the processor time (docs/use/gpu.md).
    """
    if min(cluster.num_instances, cluster.instances_per_node) > torch.cuda.device_count():
        environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def _exchange_obstacle(name: str, cluster: ClusterConfig, device: torch.device) -> str:
    on_node = min(cluster.num_instances, cluster.instances_per_node)
    return EXCHANGES[name].obstacle(
        has_far_peers=cluster.num_nodes > 1,
        orders_writes=load_runtime(device.index or 0).orders_writes,
        shares_gpu=on_node > torch.cuda.device_count(),
    )


def _capture(config: Config, lanes: Sequence[GpuParts]) -> Any:
    steps = [(lane.pool, lane.step) for lane in lanes]
    draft = lanes[0].step.draft if config.scheduler.num_drafts else None
    if config.data_plane.eager:
        return eager(*steps, draft=draft)
    policies = [lane_policy(order) for order in config.scheduler.lane_orders]
    return CudaGraphs(*steps, draft=draft, policies=policies)


def _selected(
    config: Config, attention_choice: str, sentences: Sequence[str], weights_choice: str
) -> list[str]:
    data_plane = config.data_plane
    exchange = "exchange: cuda_ipc, peers' memory on one node"
    if by_name := EXCHANGES.get(data_plane.exchange_backend):
        exchange = by_name.choice(config.cluster.num_nodes > 1)
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
        len(config.scheduler.lane_orders),
        lambda bucket, order: capture(*(each.pool.context(bucket) for each in lanes), order=order),
    )


def _fused_obstacle(config: Config, device: torch.device) -> str:
    if config.data_plane.dispatch_backend != "fused":
        return _SLOWER
    return fused_obstacle(
        torch.cuda.get_device_properties(device),
        torch_dtype(config.data_plane),
        config.data_plane.expert_backend,
        num_nodes=config.cluster.num_nodes,
    )


class _Meeting:
    def __init__(
        self,
        instance: int,
        segments: Segments,
        exchanges: Sequence[GpuExchange],
        memories: Sequence[TermMemory],
        ends: tuple[TermEnd | None, ExchangeEnd | None],
    ) -> None:
        """ends: of an experimental dispatch and of an experimental exchange."""
        self._instance, self._term, self._exchanges = instance, segments.term, exchanges
        self._memories, self._ends = memories, ends
        self.prepare: Callable[[], None] | None = None
        """Prepares graphs without a peer; None: with all, or it is done."""
        for exchange in exchanges:
            segments.term.mirror(exchange.ended)

    def meet(self, seats: Sequence[int]) -> None:
        """Begin the present term, as IpcMemory.begin_term does."""
        dispatch, exchange = self._ends
        if exchange is not None:
            exchange.agree()
        self.prepare_alone()
        # A dispatch's first: NVSHMEM then takes DeepEP's settings (docs/decisions/0070).
        if dispatch is not None:
            dispatch.begin_term(seats)
        self._attach(seats, self._term.number)
        if exchange is not None:
            exchange.begin_term(seats)

    def prepare_alone(self) -> None:
        """Prepare graphs that need no peer, once, before the first term."""
        if self.prepare is not None:
            self._attach([self._instance], NO_TERM)
            self.prepare()
            self.prepare = None

    def part(self) -> None:
        for end in self._ends:
            if end is not None:
                end.leave()
        for memory in self._memories:
            memory.leave()

    def _attach(self, seats: Sequence[int], term: int) -> None:
        for exchange, memory in zip(self._exchanges, self._memories, strict=True):
            exchange.attach(memory.begin_term(seats), term)


def _meeting(
    config: Config,
    instance: int,
    segments: Segments,
    lanes: Sequence[GpuParts],
    model: ModelConfig,
    dispatch: str,
) -> _Meeting:
    cluster, limits, step = config.cluster, config.limits, lanes[0].step
    exchanges, device = [lane.exchange for lane in lanes], step.logits.device
    carrier: ExchangeEnd | None = None
    memories: Sequence[TermMemory]
    if by_name := EXCHANGES.get(config.data_plane.exchange_backend):
        carrier = own = by_name.open(segments, instance, exchanges, limits)
        memories = own.memories
    else:
        runtime = load_runtime(device.index or 0)
        memories = [
            IpcMemory(runtime, segments, number, instance, exchange.places, limits)
            for number, exchange in enumerate(exchanges)
        ]
    mixer: TermEnd | None = None
    if found := DISPATCHES.get(dispatch):
        mixer = found.open(segments, instance, cluster, model, limits, step)
    return _Meeting(instance, segments, exchanges, memories, (mixer, carrier))
