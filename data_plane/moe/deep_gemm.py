"""DeepGEMM's masked FP8 GEMM as a backend of grouped experts.

Enters: grouped rows in bf16, weights, counts on the device. Leaves: grouped rows in bf16. Does not
know: what the experts compute.

tests/harness/published_packages.py keeps its public signature, with the source. On Hopper it takes
e4m3 with fp32 scales: one for 1 x 128 of the rows, one for 128 x 128 of the weights. It compiles
each shape on first use, so it must have run once before a graph with it is captured.

Legend: E experts, S slots of an expert, X columns in, N columns out.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from data_plane.model.fp8_weight import FP8, Fp8Weight

BLOCK = 128
_FP8_MAX = torch.finfo(FP8).max

Fp8 = tuple[Tensor, Tensor]
"""(e4m3 values, fp32 scales)."""


class DeepGemm:
    """DeepGEMM as a grouped.Fp8GroupedGemm; it rounds rows and plain weights to FP8."""

    def __init__(self, expected_rows: int, package: Any = None) -> None:
        """expected_rows: about how many an expert gets, a hint for the choice of tiles.

        package: deep_gemm; a test passes a stand-in.
        """
        self._expected_rows = expected_rows
        self._package = package or import_module("deep_gemm")

    def prepare(self, weight_ENX: Tensor) -> Fp8:
        """Round plain weights to FP8 blocks, as GroupedGemm.prepare says.

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
        """Say why blocks of this size are not taken; an empty string if they are."""
        return "" if block == (BLOCK, BLOCK) else f"deep_gemm reads blocks of {BLOCK}x{BLOCK}"

    def prepare_fp8(self, weight: Fp8Weight) -> Fp8:
        """Take weights as the checkpoint has them; raises ValueError as prepare does."""
        self._check_widths(*weight.values.shape[1:])
        return weight.values.contiguous(), weight.scale.contiguous()

    def _check_widths(self, columns: int, width: int) -> None:
        if columns % BLOCK or width % BLOCK:
            raise ValueError(
                f"expert_backend is deep_gemm: weights are {columns} x {width}; "
                f"it needs multiples of {BLOCK}"
            )

    def run(self, x_ESX: Tensor, prepared: Fp8, count_E: Tensor) -> Tensor:
        """Multiply every expert's rows, as GroupedGemm.run says; y is bf16."""
        values, scale = _quantise(x_ESX.float().reshape(*x_ESX.shape[:2], -1, BLOCK), (3,))
        y_ESN = x_ESX.new_empty((*x_ESX.shape[:2], prepared[0].shape[1]), dtype=torch.bfloat16)
        self._package.m_grouped_fp8_gemm_nt_masked(
            (values.reshape(x_ESX.shape), scale[..., 0]),
            prepared,
            y_ESN,
            count_E,
            self._expected_rows,
        )
        return y_ESN


def _quantise(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Split x into (e4m3 values, fp32 scale); elements along `dims` share a scale.

    The largest of the elements that share a scale becomes e4m3's largest.
    """
    scale = (x.abs().amax(dim=dims, keepdim=True) / _FP8_MAX).clamp_min(1e-10)
    return (x / scale).to(FP8), scale
