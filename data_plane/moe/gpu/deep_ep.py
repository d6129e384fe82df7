"""Dispatch and combine by DeepEP's low-latency kernels (V1), an all_to_all_gpu.GpuAllToAll.

Public signatures: tests/harness/gpu_stand_ins/published_packages.py. The host turns the buffers'
parity at every call, so a graph captures whole pairs of them. A call sends, its hook receives.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from data_plane.moe.gpu.grouped import GroupedExperts
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
        cls,
        group: Any,
        *,
        num_instances: int,
        num_experts: int,
        hidden_size: int,
        max_rows: int,
        package: Any = None,
    ) -> DeepEpExchange:
        """Allocate the buffer, together with every instance, before any capture."""
        buffer_class = (package or import_module("deep_ep")).Buffer
        num_bytes = buffer_class.get_low_latency_rdma_size_hint(
            max_rows, hidden_size, num_instances, num_experts
        )
        buffer = buffer_class(
            group,
            0,
            num_bytes,
            low_latency_mode=True,
            num_qps_per_rank=num_experts // num_instances,
        )
        return cls(buffer, num_experts, max_rows)

    def place_experts(self, table: ExpertTable) -> None:
        """Refuse: DeepEP computes the instance of an expert from its number."""
        raise ValueError("DeepEP cannot move experts; dispatch_backend exchange can")


def deep_ep_obstacle(
    device: torch.device,
    dtype: torch.dtype,
    *,
    hidden_size: int,
    num_experts: int,
    num_experts_per_token: int,
    num_instances: int,
    max_rows: int,
    environment: Mapping[str, str] = os.environ,
) -> str:
    """Return why DeepEP cannot serve here; empty if it can."""
    if device.type != "cuda":
        return "it needs NVIDIA GPUs, and this instance runs on the CPU"
    if find_spec("deep_ep") is None:
        return (
            "the package deep_ep is not installed (pip install --no-build-isolation '.[deep_ep]')"
        )
    per_token = num_experts_per_token, _MAX_EXPERTS_PER_TOKEN
    obstacle = rows_obstacle(dtype, hidden_size, _HIDDEN_SIZES, per_token, max_rows * num_instances)
    if obstacle:
        return obstacle
    if num_experts % num_instances:
        return f"{num_experts} experts cannot be shared evenly by {num_instances} instances"
    depth = int(environment.get("NVSHMEM_QP_DEPTH", _DEFAULT_QP_DEPTH))
    if depth < 2 * (max_rows + 1):
        return (
            f"NVSHMEM_QP_DEPTH is {depth}; max_rows {max_rows} needs at least {2 * (max_rows + 1)}"
        )
    return ""


def rows_obstacle(
    dtype: torch.dtype,
    hidden_size: int,
    hidden_sizes: Sequence[int],
    per_token: tuple[int, int],
    num_rows: int,
) -> str:
    """Return why low-latency kernels cannot carry such rows; empty if they can."""
    if dtype != torch.bfloat16:
        return f"it carries bfloat16, not {dtype}"
    if hidden_size not in hidden_sizes:
        sizes = ", ".join(map(str, hidden_sizes))
        return f"the model's hidden size is {hidden_size}; its kernels are compiled for {sizes}"
    if per_token[0] > per_token[1]:
        return f"a row visits {per_token[0]} experts; it takes at most {per_token[1]}"
    if num_rows % 4:
        return f"max_rows times the number of instances is {num_rows}, no multiple of 4"
    return ""
