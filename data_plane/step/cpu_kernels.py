"""The choice of an instance's CPU kernels, torch's or compiled ones, with the reason."""

from __future__ import annotations

import os
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from data_plane.attention.paged import Attention
from data_plane.kv.carry_pool import CarryPool, CarryRows
from data_plane.model import layers
from data_plane.model.attention_kinds.delta import DeltaWeights
from data_plane.model.config import ModelConfig
from data_plane.model.linear import Packing, TorchPacking
from data_plane.model.rope import RopeTable
from data_plane.model.weights import (
    LayerWeights,
    LogitsWeights,
    ModelWeights,
)
from data_plane.moe.all_to_all_cpu import ExpertExchange, ExpertKernels
from data_plane.moe.experts import visit_experts
from data_plane.moe.gate import gate
from data_plane.moe.mixture import MixtureOfExperts, MoeSchedule
from data_plane.moe.rows import combine_sums, name_slots, pack_rows
from data_plane.native.build import NativeUnavailable
from data_plane.native.kernels import NativeKernels
from data_plane.native.mixture import NativeMixtures
from data_plane.step.probe import Probe, no_probe
from data_plane.transport.regions import TensorExchange
from nanocp.config.cluster import ClusterConfig
from nanocp.config.data_plane import CPU_KERNELS
from nanocp.values.experts import home_table


class Kernels(Packing, ExpertKernels, Protocol):
    """A packing of weights, and a layer's arithmetic on such weights.

    Each call does what the torch function of its name does. Rope tables must reach every position.
    """

    def attention_rows(
        self,
        x_BX: Tensor,
        position_B: Tensor,
        layer: LayerWeights,
        rope: RopeTable,
        config: ModelConfig,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project hidden rows to (wire_q [B, C], new KV [B, W], queries [B, H, D])."""

    def attention_queries(
        self,
        wire_q_BC: Tensor,
        position_B: Tensor,
        layer: LayerWeights,
        rope: RopeTable,
        config: ModelConfig,
    ) -> Tensor:
        """Make queries [B, H, D] from wire_q."""

    def append(self, slots_SW: Tensor, slot_B: Tensor, kv_BW: Tensor) -> None:
        """Write one token of each row to its slot, slot_B = frame * 64 + offset."""

    def finish_attention(
        self, partial_BHO: Tensor, layer: LayerWeights, config: ModelConfig
    ) -> Tensor:
        """Turn partial outputs into heads' values [B, H, V], before or after the LSE merge."""

    def after_attention(
        self, x_BX: Tensor, o_BHV: Tensor, layer: LayerWeights, rope: RopeTable, config: ModelConfig
    ) -> tuple[Tensor, Tensor]:
        """Add attention to rows [B, X]: (the rows, the rows normed for the MLP)."""

    def linear_attention(
        self, carry: CarryPool, layer: int, rows: CarryRows, x_BX: Tensor, weights: DeltaWeights
    ) -> Tensor:
        """Run one token of each row through its recurrent state, as CarryPool.step does."""

    def logits(self, x_BX: Tensor, weights: LogitsWeights, config: ModelConfig) -> Tensor:
        """Score the vocabulary for hidden rows: [B, vocabulary] fp32."""

    def own_attention(self, config: ModelConfig) -> Attention | None:
        """Return these kernels' attention, if any for the model's widths."""

    def forget(self, layer: LayerWeights) -> None:
        """Forget this layer's weights: they are given up."""


class Arithmetic(NamedTuple):
    """A layer's kind, and its kernels."""

    model: ModelConfig
    kernels: Kernels
    attention: Attention


class TorchKernels(TorchPacking):
    """Kernels of torch functions: for every CPU, on any number of threads."""

    attention_rows = staticmethod(layers.attention_rows)
    attention_queries = staticmethod(layers.attention_queries)
    append = staticmethod(layers.append)
    after_attention = staticmethod(layers.after_attention)
    finish_attention = staticmethod(layers.finish_attention)
    linear_attention = staticmethod(CarryPool.step)
    gated_mlp = staticmethod(layers.gated_mlp)
    logits = staticmethod(layers.logits)
    gate = staticmethod(gate)
    name_slots = staticmethod(name_slots)
    pack_rows = staticmethod(pack_rows)
    visit_experts = staticmethod(visit_experts)
    combine_sums = staticmethod(combine_sums)

    def experts_changed(self) -> None:
        """Do nothing: torch keeps no addresses."""

    def own_attention(self, config: ModelConfig) -> Attention | None:
        return None

    def forget(self, layer: LayerWeights) -> None:
        """Do nothing: torch keeps nothing."""


def cpu_kernels(
    name: str, dtype: torch.dtype, num_threads: int, keeps_bf16: bool = False
) -> tuple[Kernels, str]:
    """Return one of CPU_KERNELS, and a sentence why.

    keeps_bf16: native kernels keep bf16 weights; torch's widen them. Raises ValueError if native
    kernels are asked for and unavailable, or if this process may run on fewer cores than
    num_threads.
    """
    assert name in CPU_KERNELS, name
    if name == "torch":
        return TorchKernels(), "torch, as configured"
    cores = len(os.sched_getaffinity(0))
    if num_threads > cores:
        raise ValueError(
            f"threads_per_instance is {num_threads}, but this process may run on {cores} cores; "
            "native kernels take at most one thread a core, so that no task waits for its thread"
        )
    try:
        instructions = "avx2" if name == "avx2" else ""
        kernels = NativeKernels(dtype, instructions, num_threads, keeps_bf16)
        why = "which this CPU can run" if name == "auto" else "as configured"
        return kernels, f"native ({kernels.instructions}), {why}"
    except NativeUnavailable as reason:
        if name != "auto":
            raise ValueError(
                f"cpu_kernels is {name}, but native kernels are unavailable here: {reason}"
            ) from None
        return TorchKernels(), f"torch (native unavailable: {reason})"


def fused_obstacle(kernels: Kernels) -> str:
    """Return why a MoE layer cannot be one call here; empty if it can."""
    if isinstance(kernels, NativeKernels):
        return ""
    return "it needs native kernels, and this instance runs torch's"


def cpu_mixtures(
    schedule: MoeSchedule | None,
    exchange: TensorExchange,
    model: ModelConfig,
    weights: ModelWeights,
    kernels: Kernels,
    cluster: ClusterConfig,
    probe: Probe = no_probe,
) -> MixtureOfExperts:
    """Return the MoE layers of an instance: in native calls by schedule, or None: in parts."""
    home = home_table(model.num_experts, cluster.num_instances, cluster.redundant_experts)
    if schedule is None:
        return ExpertExchange(exchange, model, weights.layers, kernels, probe, home)
    assert isinstance(kernels, NativeKernels), "dispatch_backend has refused it"
    max_rows = cluster.bounds.max_rows
    return NativeMixtures(exchange, model, weights.layers, kernels, max_rows, probe, home, schedule)
