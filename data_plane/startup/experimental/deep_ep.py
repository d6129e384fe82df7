"""Dispatch and combine by DeepEP's low-latency kernels (V1), a GpuAllToAll.

Public signatures: tests/harness/gpu_stand_ins/deep_ep_stand_in.py. The host turns the buffers'
parity at every call, so a graph captures whole pairs of them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from data_plane.model.config import ModelConfig
from data_plane.startup.experimental.gathering import Communicator, bounded
from data_plane.startup.experimental.low_latency import LowLatencyExchange, rows_obstacle
from data_plane.startup.experimental.nvshmem import require_one_library

_HIDDEN_SIZES = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
_MAX_EXPERTS_PER_TOKEN = 11
_DEFAULT_QP_DEPTH = 1024
_KIND = "deep_ep"


class DeepEpExchange(LowLatencyExchange):
    """The MoE all-to-all of one instance over DeepEP, in the only term."""

    def begin_term(self, _seats: Sequence[int], package: Any = None) -> None:
        """Meet all instances and allocate the buffer, before any capture.

        Raises ExchangeTimeout, PeerLost, TermOver, or ValueError for mixed versions.
        """
        num_instances, segments = self._num_instances, self._segments
        meeting = Communicator(segments, _KIND, self._instance, num_instances, self._limits)
        try:
            package = package or import_module("deep_ep")
            meeting.require_same(
                f"deep_ep {package.__version__}, torch {torch.__version__}, CUDA "
                f"{torch.version.cuda}"
            )
            require_one_library()
            buffer_class = package.Buffer
            num_bytes = buffer_class.get_low_latency_rdma_size_hint(
                self._max_rows, self._hidden_size, num_instances, self._num_numbers
            )
            # It starts NVSHMEM, with its own settings, and takes as many queue pairs as experts.
            self._buffer = bounded(
                lambda: buffer_class(
                    None,
                    0,
                    num_bytes,
                    low_latency_mode=True,
                    num_qps_per_rank=self._num_slots,
                    comm=meeting,
                ),
                "DeepEP",
                self._device,
                segments.term,
                self._limits,
            )
        finally:
            meeting.leave()

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
    depth = int(environment.get("NVSHMEM_QP_DEPTH", _DEFAULT_QP_DEPTH))
    if depth < 2 * (max_rows + 1):
        return (
            f"NVSHMEM_QP_DEPTH is {depth}; max_rows {max_rows} needs at least {2 * (max_rows + 1)}"
        )
    return ""
