"""Instances at DeepSeek-V3's shapes on one GPU, or on the CPU that plays one, for benchmarks.

Enters: shapes. Leaves: what runs steps, filled in, by our kernels or by installed packages. Does
not know: what is measured.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import torch

from benchmarks.gpu.gpu_attention import replay_us
from benchmarks.gpu.gpu_shapes import StepShapes, latent, random_weights
from data_plane.attention.paged import Attention
from data_plane.attention.triton_mla import TritonMla
from data_plane.graph.buckets import Bucket
from data_plane.graph.cuda_graphs import CudaGraphs, eager
from data_plane.model.config import ModelConfig
from data_plane.model.fp8_weight import Fp8DenseGemm
from data_plane.model.linear import LinearLayer, PlainLinear
from data_plane.moe.gpu.gemm import TritonGemm
from data_plane.moe.gpu.grouped import GroupedGemm
from data_plane.startup.gpu_parts import GpuParts, gpu_parts
from data_plane.transport.gpu.peer_memory import PeerMemory
from harness.kernels.kernel_cases import in_fp8
from nanocp.config.cluster import ClusterConfig
from nanocp.config.data_plane import DataPlaneConfig
from nanocp.values.plan import PAGE_SIZE


class Card:
    """The GPU, or the CPU that plays one."""

    def __init__(self, shapes: StepShapes) -> None:
        self.shapes = shapes
        self.is_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", 0) if self.is_gpu else torch.device("cpu")
        self.num_parts = None if self.is_gpu else 2
        self.dtype = getattr(torch, shapes.dtype)
        self.attention: Callable[[], Attention] | None = None
        """Makes what attends; None: our kernel."""
        self.gemm: GroupedGemm = TritonGemm()
        self.linear: Callable[[torch.Tensor], LinearLayer] = PlainLinear

    def sync(self) -> None:
        """Wait for everything."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def us(self, *calls: Callable[[], Any]) -> float:
        """Measure a call, median microseconds; all are in one graph.

        So launches cost as they do in a step.
        """
        return replay_us(list(calls), self.shapes.rounds)

    def host_us(self, call: Callable[[], Any]) -> tuple[float, float]:
        """Measure a call that returns before the device is done.

        Returns (processor time of this thread for it, time until the device is done).
        """
        call()
        self.sync()
        cpu, whole = [], []
        for _ in range(self.shapes.rounds):
            begin, begin_cpu = time.perf_counter(), time.thread_time()
            call()
            cpu.append((time.thread_time() - begin_cpu) * 1e6)
            self.sync()
            whole.append((time.perf_counter() - begin) * 1e6)
        return median(cpu), median(whole)

    def graphs(self, parts: GpuParts) -> Any:
        """What captures a step: on the CPU it does not."""
        if self.is_gpu:
            return CudaGraphs((parts.pool, parts.step))
        return eager((parts.pool, parts.step))

    def parts(
        self,
        model: ModelConfig,
        num_instances: int,
        num_frames: int,
        max_len: int,
        num_here: int = 0,
        **keys: Any,
    ) -> list[GpuParts]:
        """Make instances on this card, attached to each other.

        All layers' frames are the same memory, as their weights are. num_here: so many of the
        cluster's instances, the others being in no term; 0: all.
        """
        shapes, made = self.shapes, []
        if self.is_gpu:
            # What the last ones held; a pool of frames for all layers is a large piece.
            gc.collect()
            torch.cuda.empty_cache()
        cluster = ClusterConfig(num_instances, num_instances, 1, max_len, bounds=shapes.bounds)
        data_plane = DataPlaneConfig(device="cuda", dtype=shapes.dtype, **keys)
        kind = latent(model)
        attention: Attention = (
            self.attention()
            if self.attention
            else TritonMla(kind.kv_lora_rank, kind.rope_dim, kind.num_heads, self.num_parts)
        )
        share = model.num_experts // num_instances
        here = range(num_here or num_instances)
        for instance in here:
            experts = range(instance * share, (instance + 1) * share)
            weights = random_weights(
                model, self.dtype, self.device, experts, self.gemm, num_instances == 1, self.linear
            )
            own = replace(cluster, num_frames=num_frames)
            made.append(gpu_parts(own, data_plane, model, weights, attention, 2000.0))
            frames = made[-1].frames
            shared = torch.randn(1, *frames.layers.shape[1:], dtype=self.dtype, device=self.device)
            frames.layers = shared.expand(model.num_layers, -1, -1, -1)
            frames.slots = frames.layers.flatten(1, 2).unbind()
        memories = PeerMemory.create_all(made[0].places, self.device, list(here))
        for parts, memory in zip(made, memories, strict=True):
            parts.exchange.attach(memory)
        return made


def fill(
    parts: GpuParts,
    num_rows: int,
    context: int,
    targets: dict[int, int],
    sources: dict[int, int],
    width: int = 1,
) -> None:
    """Fill the tables of one window: num_rows own step rows of one context.

    The first of them go to peers (targets); others come from peers (sources), with their KV in
    frames of this instance. width: so many step rows next to each other have the same pages.
    """
    tables, state = parts.pool.staging[0], parts.pool.rows
    pages, next_frame = -(-context // PAGE_SIZE), 0
    num_frames = parts.frames.scratch_slot // PAGE_SIZE
    tables.num_rows[0] = num_rows
    state.live[:num_rows], state.position[:num_rows] = True, context - 1
    tables.own.num_pages[:] = tables.received.num_pages[:] = 0
    tables.num_sent[:] = tables.num_received[:] = 0
    for peer, count in targets.items():
        tables.num_sent[peer], tables.send_row[peer, :count] = count, range(count)
    for peer, count in sources.items():
        tables.num_received[peer] = count
    for local, count in ((tables.own, num_rows), (tables.received, sum(sources.values()))):
        for row in range(count):
            local.num_pages[row], local.page[row, :pages] = pages, range(pages)
            begin = next_frame + row // width * pages
            local.frame[row, :pages] = [(begin + page) % num_frames for page in range(pages)]
        next_frame += count // width * pages
    parts.pool.upload(0)
    parts.pool.adopt(0)


def variants(card: Card) -> Iterator[str]:
    """Let the card compute with each set of what is installed; yield its name."""
    yield "triton"
    if not card.is_gpu or find_spec("flash_mla") is None:
        return
    from data_plane.attention.flashmla import FlashMla

    card.attention = lambda: FlashMla(latent(card.shapes.model).kv_lora_rank)
    yield "flashmla"
    if find_spec("deep_gemm") is not None:
        from data_plane.moe.gpu.deep_gemm import DeepGemm

        gemm = card.gemm = DeepGemm(64)
        yield "flashmla, FP8 experts"
        card.linear = partial(dense_in_fp8, gemm)
        yield "flashmla, all in FP8"
    card.attention, card.gemm, card.linear = None, TritonGemm(), PlainLinear


def dense_in_fp8(gemm: Fp8DenseGemm, weight: torch.Tensor) -> LinearLayer:
    """Make a dense layer of a weight in FP8."""
    stacked = in_fp8(weight[None].float(), (128, 128))
    layer = gemm.dense(stacked._replace(values=stacked.values[0], scale=stacked.scale[0]))
    assert layer is not None, weight.shape
    return layer


class OneStep:
    """A step of one instance, captured: rows of one context."""

    def __init__(self, card: Card, num_rows: int, context: int) -> None:
        model, pages = card.shapes.model, -(-context // PAGE_SIZE)
        (self.parts,) = card.parts(model, 1, num_rows * pages, context + PAGE_SIZE)
        self.bucket = self.parts.pool.context(Bucket(num_rows, 0, has_links=False))
        fill(self.parts, num_rows, context, {}, {})
        self.launch = eager((self.parts.pool, self.parts.step))(self.bucket)
        self.launch()
        card.sync()
        self.replay = card.graphs(self.parts)(self.bucket)
