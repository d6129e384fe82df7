"""DeepGEMM's FP8 GEMMs: a masked one as a backend of grouped experts, and one for dense layers.

Public signature: tests/harness/gpu_stand_ins/published_packages.py. On Hopper it takes e4m3 with
fp32 scales: 1 x 128 of the rows, 128 x 128 of the weights. Shapes compile on first use, before any
capture.

Legend: B rows, E experts, S slots of an expert, X columns in, K blocks of them, N columns out.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from data_plane.kernels.fp8 import BLOCK, quantised_rows
from data_plane.model.fp8_weight import FP8, Fp8Weight
from data_plane.moe.gpu.pairs import Pairs, lay_out

_FP8_MAX = torch.finfo(FP8).max
_TMA_COLUMNS = 8
"""TMA takes rows of whole 16 bytes: multiples of this number of bf16 columns."""

Fp8 = tuple[Tensor, Tensor]
"""(e4m3 values, fp32 scales)."""


class DeepGemm:
    """DeepGEMM as a grouped.PairsGemm and an Fp8DenseGemm; rows and plain weights become FP8."""

    def __init__(self, expected_rows: int, package: Any = None) -> None:
        """expected_rows: of an expert, a hint for tiles. package: deep_gemm or a stand-in."""
        self._expected_rows = expected_rows
        self._package = package or import_module("deep_gemm")

    def prepare(self, weight_ENX: Tensor) -> Fp8:
        """Round plain weights to FP8 blocks.

        Raises ValueError if a width is not a multiple of a block's.
        """
        num_experts, columns, width = weight_ENX.shape
        self._check_widths(columns, width)
        blocks = weight_ENX.float().reshape(
            num_experts, columns // BLOCK, BLOCK, width // BLOCK, BLOCK
        )
        values, scale = _quantise(blocks, (2, 4))
        return values.reshape(weight_ENX.shape), scale[:, :, 0, :, 0].contiguous()

    def fp8_obstacle(self, block: tuple[int, int]) -> str:
        """Return the obstacle of blocks of this size, or an empty string."""
        return "" if block == (BLOCK, BLOCK) else f"deep_gemm reads blocks of {BLOCK}x{BLOCK}"

    def prepare_fp8(self, weight: Fp8Weight) -> Fp8:
        """Take weights as stored; raises ValueError as prepare does."""
        self._check_widths(*weight.values.shape[1:])
        return weight.values.contiguous(), weight.scale.contiguous()

    def dense(self, weight: Fp8Weight) -> DenseLayer | None:
        """Make a layer of whole blocks of columns."""
        columns, width = weight.values.shape
        if weight.block != (BLOCK, BLOCK) or width % BLOCK or columns % _TMA_COLUMNS:
            return None
        return DenseLayer(weight, self._package)

    def _check_widths(self, columns: int, width: int) -> None:
        if columns % BLOCK or width % BLOCK:
            raise ValueError(
                f"expert_backend is deep_gemm: weights are {columns} x {width}; "
                f"it needs multiples of {BLOCK}"
            )

    def run(self, x_ESX: Tensor, prepared: Fp8, count_E: Tensor) -> Tensor:
        """Multiply every expert's rows, as GroupedGemm.run says; y is bf16."""
        x = lay_out(x_ESX.flatten(0, 1).contiguous(), count_E, x_ESX.shape[1], is_fp8=True)
        return self._product(x, prepared, count_E)

    def run_pairs(self, pairs: Pairs, gate_up: Fp8, down: Fp8) -> Tensor:
        """Run an MLP on pairs; only slots with a row are rounded."""
        num_slots, count_E = pairs.row_ES.shape[1], pairs.count_E
        x = lay_out(pairs.x, count_E, num_slots, pairs, is_fp8=True)
        inner = self._product(x, gate_up, count_E).flatten(0, 1)
        x = lay_out(inner, count_E, num_slots, is_gated=True, is_fp8=True)
        return self._product(x, down, count_E).flatten(0, 1)

    def _product(self, x: Fp8, prepared: Fp8, count_E: Tensor) -> Tensor:
        shape = *x[0].shape[:2], prepared[0].shape[1]
        y_ESN = torch.empty(shape, dtype=torch.bfloat16, device=count_E.device)
        self._package.m_grouped_fp8_gemm_nt_masked(x, prepared, y_ESN, count_E, self._expected_rows)
        return y_ESN


class DenseLayer:
    """A linear layer over an FP8 weight, x [..., X] -> x W^T [..., N]; rows are rounded to FP8."""

    __slots__ = ("_package", "weight")

    def __init__(self, weight: Fp8Weight, package: Any) -> None:
        self.weight, self._package = weight, package

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's shape, (N, X)."""
        return tuple(self.weight.values.shape)

    def __call__(self, x: Tensor) -> Tensor:
        columns, width = self.shape
        x_BX = x.reshape(-1, width)
        y_BN = x.new_empty(len(x_BX), columns)
        if len(x_BX):
            weight = self.weight.values, self.weight.scale
            self._package.fp8_gemm_nt(quantised_rows(x_BX), weight, y_BN)
        return y_BN.view(*x.shape[:-1], columns)


def _quantise(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Split x into (e4m3 values, fp32 scale); elements along `dims` share a scale."""
    scale = (x.abs().amax(dim=dims, keepdim=True) / _FP8_MAX).clamp_min(1e-10)
    return (x / scale).to(FP8), scale
