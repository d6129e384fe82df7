"""Dispatch and combine by DeepEP's low-latency kernels (V1), an all_to_all_gpu.GpuAllToAll.

Enters: rows, their experts and weights. Leaves: for each row, the weighted sum over its experts.
Does not know: the gate, the expert arithmetic, the exchange's epochs (DeepEP has its own).

tests/harness/gpu_stand_ins/published_packages.py keeps the public signatures, with their source.
The host turns the parity of DeepEP's buffers at every call, so a graph captures whole pairs of
dispatch and combine. The buffers' layout follows from max_rows, so it is the same on every
instance. A call sends, and the hook that it returns receives: what is computed in between takes no
time from both. NIXL-EP (nixl_ep.py) has the same calls.
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
    """What is under way to the experts, and then back from them."""

    receive: Callable[[], None]
    """Waits for what the peers send: rows for the experts here, or sums for the rows here."""
    y: Tensor
    """[E, S, X]: rows that arrive, by expert; after run_experts [B, X]: sums that arrive."""
    count_E: Tensor
    expert_BK: Tensor
    weight_BK: Tensor
    handle: Any


class LowLatencyExchange:
    """The MoE all-to-all of one instance over the calls that DeepEP and NIXL-EP have alike."""

    def __init__(self, buffer: Any, num_experts: int, max_rows: int) -> None:
        """Keep the buffer, a Buffer of one of the packages in low-latency mode.

        num_experts: of all instances, as the package numbers them. max_rows: the same on every
        instance and in every graph.
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
        """Run the experts here, as GpuAllToAll.run_experts says, and send their rows back."""
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
        """The package's number of each expert."""
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
        """Allocate the buffer, together with every instance of the group, before any capture.

        group: of torch.distributed. package: deep_ep; a test passes a stand-in.
        """
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
    """Say why DeepEP cannot serve here; an empty string if it can.

    max_rows: bound of an instance's batch. environment: where NVSHMEM_QP_DEPTH is looked up.
    """
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
    """Say why low-latency kernels cannot carry such rows; an empty string if they can.

    hidden_sizes: those that they are compiled for. per_token: how many experts a row visits, and
    the most that it may. num_rows: that all instances may send to one.
    """
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
