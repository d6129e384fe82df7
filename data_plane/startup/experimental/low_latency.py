"""What DeepEP and NIXL-EP have in common: low-latency calls that send, and hooks that receive.

Both compute an expert's instance from its number, which is a slot's here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from data_plane.model.config import ModelConfig
from data_plane.moe.gpu.all_to_all_gpu import GpuAllToAll, GpuMixtures
from data_plane.moe.gpu.grouped import GroupedExperts
from data_plane.step.gpu import GpuStep
from data_plane.transport.segments import Segments
from nanocp.config.cluster import ClusterConfig
from nanocp.config.limits import LimitsConfig
from nanocp.values.experts import num_slots


@dataclass(slots=True)
class LowLatencyDispatched:
    """Rows on their way to the experts, and then back."""

    receive: Callable[[], None]
    """Waits for the peers' rows or sums."""
    y: Tensor
    """[E, S, X]: arriving rows by expert; after run_experts [B, X]: arriving sums."""
    count_E: Tensor
    number_BK: Tensor
    weight_BK: Tensor
    handle: Any


class LowLatencyExchange(GpuAllToAll):
    """The MoE all-to-all of one instance over a package's Buffer."""

    _buffer: Any

    def __init__(
        self,
        segments: Segments,
        instance: int,
        cluster: ClusterConfig,
        model: ModelConfig,
        limits: LimitsConfig,
        device: torch.device,
    ) -> None:
        """A subclass opens the buffer."""
        self._segments, self._instance, self._limits = segments, instance, limits
        self._device = device
        self._num_instances, self._hidden_size = cluster.num_instances, model.hidden_size
        self._num_slots = num_slots(
            model.num_experts, cluster.num_instances, cluster.redundant_experts
        )
        self._num_numbers = cluster.num_instances * self._num_slots
        self._max_rows = cluster.bounds.max_rows

    @classmethod
    def serve(
        cls,
        segments: Segments,
        instance: int,
        cluster: ClusterConfig,
        model: ModelConfig,
        limits: LimitsConfig,
        step: GpuStep,
    ) -> Self:
        """Let a step's mixtures go by it."""
        own = cls(segments, instance, cluster, model, limits, step.logits.device)
        assert isinstance(step.mixture, GpuMixtures)
        step.mixture.all_to_all, step.check_mixture = own, own.check
        return own

    def check(self) -> None:
        """Raise if a wait for a peer was given up in silence; by default none is."""

    def dispatch(self, x_BX: Tensor, number_BK: Tensor, weight_BK: Tensor) -> LowLatencyDispatched:
        x_ESX, count_E, handle, _, receive = self._buffer.low_latency_dispatch(
            x_BX, number_BK, self._max_rows, self._num_numbers, use_fp8=False, return_recv_hook=True
        )
        return LowLatencyDispatched(receive, x_ESX, count_E, number_BK, weight_BK, handle)

    def receive(self, dispatched: LowLatencyDispatched) -> None:
        dispatched.receive()

    def run_experts(
        self, dispatched: LowLatencyDispatched, experts: GroupedExperts, load_E: Tensor
    ) -> None:
        sent = dispatched
        load_E += sent.count_E
        y_ESX = experts.run_grouped(sent.y, sent.count_E)
        sent.y, _, sent.receive = self._buffer.low_latency_combine(
            y_ESX, sent.number_BK, sent.weight_BK, sent.handle, return_recv_hook=True
        )

    def receive_sums(self, dispatched: LowLatencyDispatched) -> None:
        dispatched.receive()

    def combine(
        self,
        dispatched: LowLatencyDispatched,
        x_BX: Tensor,
        shared_BX: Tensor | None,
        norm_X: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        from data_plane.kernels.norm import add_norm

        return add_norm(x_BX, norm_X, eps, dispatched.y, shared_BX)


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
