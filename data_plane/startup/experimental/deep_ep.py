"""Dispatch and combine by DeepEP's low-latency kernels (V1), an all_to_all_gpu.GpuAllToAll.

Public signatures: tests/harness/gpu_stand_ins/published_packages.py. The host turns the buffers'
parity at every call, so a graph captures whole pairs of them. A call sends, its hook receives.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from data_plane.model.config import ModelConfig
from data_plane.moe.gpu.all_to_all_gpu import GpuMixtures
from data_plane.moe.gpu.gpu_weights import GpuWeights
from data_plane.moe.gpu.grouped import GroupedExperts
from data_plane.step.gpu import GpuStep
from data_plane.transport.segments import Segments
from nanocp.config.cluster import ClusterConfig
from nanocp.config.limits import LimitsConfig
from nanocp.values.experts import ExpertTable

_HIDDEN_SIZES = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
_MAX_EXPERTS_PER_TOKEN = 11
_DEFAULT_QP_DEPTH = 1024


@dataclass(slots=True)
class LowLatencyDispatched:
    """Rows on their way to the experts, and then back."""

    receive: Callable[[], None]
    """Waits for the peers' rows or sums."""
    y: Tensor
    """[E, S, X]: arriving rows by expert; after run_experts [B, X]: arriving sums."""
    count_E: Tensor
    expert_BK: Tensor
    weight_BK: Tensor
    handle: Any


class LowLatencyExchange:
    """The MoE all-to-all of one instance over the common calls of DeepEP and NIXL-EP."""

    def __init__(self, buffer: Any, num_experts: int, max_rows: int) -> None:
        """buffer: a Buffer of one of the packages in low-latency mode.

        num_experts: of all instances. max_rows: equal on every instance and in every graph.
        """
        self._buffer, self._num_experts, self._max_rows = buffer, num_experts, max_rows

    def dispatch(
        self, x_BX: Tensor, expert_BK: Tensor, weight_BK: Tensor, live_B: Tensor
    ) -> LowLatencyDispatched:
        """Send the live rows away, as GpuAllToAll.dispatch says."""
        chosen_BK = self._numbered(expert_BK).masked_fill(~live_B[:, None], -1)
        x_ESX, count_E, handle, _, receive = self._buffer.low_latency_dispatch(
            x_BX, chosen_BK, self._max_rows, self._num_experts, use_fp8=False, return_recv_hook=True
        )
        return LowLatencyDispatched(receive, x_ESX, count_E, chosen_BK, weight_BK, handle)

    def run_experts(self, dispatched: LowLatencyDispatched, experts: GroupedExperts) -> None:
        """Run the experts here and send their rows back."""
        sent = dispatched
        sent.receive()
        y_ESX = experts.run_grouped(sent.y, sent.count_E)
        sent.y, _, sent.receive = self._buffer.low_latency_combine(
            y_ESX, sent.expert_BK, sent.weight_BK, sent.handle, return_recv_hook=True
        )

    def combine(
        self,
        dispatched: LowLatencyDispatched,
        x_BX: Tensor,
        shared_BX: Tensor | None,
        norm_X: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """Receive, sum and add the rows, as GpuAllToAll.combine says."""
        from data_plane.kernels.norm import add_norm

        dispatched.receive()
        return add_norm(x_BX, norm_X, eps, dispatched.y, shared_BX)

    def _numbered(self, expert_BK: Tensor) -> Tensor:
        return expert_BK


class DeepEpExchange(LowLatencyExchange):
    """The MoE all-to-all of one instance over DeepEP."""

    @classmethod
    def open(
        cls, group: Any, cluster: ClusterConfig, model: ModelConfig, package: Any = None
    ) -> DeepEpExchange:
        """Allocate the buffer, together with every instance, before any capture."""
        num_instances, max_rows = cluster.num_instances, cluster.bounds.max_rows
        num_qps = model.num_experts // num_instances
        buffer_class = (package or import_module("deep_ep")).Buffer
        num_bytes = buffer_class.get_low_latency_rdma_size_hint(
            max_rows, model.hidden_size, num_instances, model.num_experts
        )
        buffer = buffer_class(group, 0, num_bytes, low_latency_mode=True, num_qps_per_rank=num_qps)
        return cls(buffer, model.num_experts, max_rows)

    def place_experts(self, table: ExpertTable) -> None:
        """Refuse: DeepEP computes the instance of an expert from its number."""
        raise ValueError("DeepEP cannot move experts; dispatch_backend exchange can")


@dataclass(slots=True)
class DeepEpEnd:
    """DeepEP's part in the only term of an instance's step."""

    segments: Segments
    instance: int
    cluster: ClusterConfig
    model: ModelConfig
    limits: LimitsConfig
    step: GpuStep
    weights: GpuWeights

    def begin_term(self, _seats: Sequence[int]) -> None:
        """Open the buffers; instances meet in a file, so no port must be free."""
        import torch.distributed as dist

        path = f"{tempfile.gettempdir()}/nanocp-{self.segments.cluster_id}-group"
        num_instances = self.cluster.num_instances
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(path, num_instances),  # type: ignore[attr-defined]
            rank=self.instance,
            world_size=num_instances,
            timeout=timedelta(milliseconds=self.limits.start_timeout_ms),
        )
        all_to_all = DeepEpExchange.open(dist.group.WORLD, self.cluster, self.model)
        self.step.mixture = GpuMixtures(all_to_all, self.model, self.weights)
        if self.instance == 0:
            os.unlink(path)

    def leave(self) -> None:
        """Do nothing."""


def deep_ep_obstacle(
    dtype: torch.dtype,
    model: ModelConfig,
    num_instances: int,
    max_rows: int,
    environment: Mapping[str, str] = os.environ,
) -> str:
    """Return why DeepEP cannot serve on GPUs here; empty if it can."""
    if find_spec("deep_ep") is None:
        return (
            "the package deep_ep is not installed (pip install --no-build-isolation '.[deep_ep]')"
        )
    num_rows = max_rows * num_instances
    obstacle = rows_obstacle(dtype, model, _HIDDEN_SIZES, _MAX_EXPERTS_PER_TOKEN, num_rows)
    if obstacle:
        return obstacle
    if model.num_experts % num_instances:
        return f"{model.num_experts} experts cannot be shared evenly by {num_instances} instances"
    depth = int(environment.get("NVSHMEM_QP_DEPTH", _DEFAULT_QP_DEPTH))
    if depth < 2 * (max_rows + 1):
        return (
            f"NVSHMEM_QP_DEPTH is {depth}; max_rows {max_rows} needs at least {2 * (max_rows + 1)}"
        )
    return ""


def rows_obstacle(
    dtype: torch.dtype, model: ModelConfig, sizes: Sequence[int], max_per_token: int, num_rows: int
) -> str:
    """Return why low-latency kernels cannot carry such rows; empty if they can."""
    if dtype != torch.bfloat16:
        return f"it carries bfloat16, not {dtype}"
    if (size := model.hidden_size) not in sizes:
        compiled = ", ".join(map(str, sizes))
        return f"the model's hidden size is {size}; its kernels are compiled for {compiled}"
    if (num := model.num_experts_per_token) > max_per_token:
        return f"a row visits {num} experts; it takes at most {max_per_token}"
    if num_rows % 4:
        return f"max_rows times the number of instances is {num_rows}, no multiple of 4"
    return ""
