"""Rows in FP8 on a GPU, with a scale for each 128 columns, in DeepGEMM's layout.

The slow reference is deep_gemm._quantise. Legend: B rows, X columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128
"""Columns of a row that share a scale, and rows and columns of a weight."""
_BLOCKS, _NUM_WARPS = 8, 4
LEAST_SCALE = tl.constexpr(1e-10)
_TMA_SCALES = 4
"""TMA takes rows of whole 16 bytes: multiples of this number of scales."""


@triton.jit
def divided(x, LEAST: tl.constexpr):
    """Divide blocks of numbers [blocks, columns] by their scales: (quotients, scales [blocks])."""
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x), 1), 448.0), LEAST)
    return tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape)), scale


@triton.jit
def quantise_kernel(
    x_ptr, value_ptr, scale_ptr, num_blocks, scale_rows, BLOCKS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Program (row, p): round BLOCKS blocks of a row's columns to e4m3, from p * BLOCKS on.

    scale_ptr: [num_blocks, scale_rows].
    """
    row, block = tl.program_id(0), tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    is_block = block < num_blocks
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    at = row.to(tl.int64) * num_blocks * BLOCK + column
    x = tl.load(x_ptr + at, mask=is_block[:, None], other=0.0).to(tl.float32)
    value, scale = divided(x, LEAST_SCALE)
    tl.store(value_ptr + at, value.to(value_ptr.dtype.element_ty), mask=is_block[:, None])
    tl.store(scale_ptr + block * scale_rows + row, scale, mask=is_block)


def padded_scales(num_rows: int) -> int:
    """Count the scales that lie side by side in memory for these rows, with padding."""
    return -(-num_rows // _TMA_SCALES) * _TMA_SCALES


def quantised_rows(x_BX: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows in one launch: (values [B, X], scales [B, X / 128]), laid out for TMA."""
    x_BX = x_BX.contiguous()
    num_rows, num_blocks = len(x_BX), x_BX.shape[1] // BLOCK
    padded = padded_scales(num_rows)
    values_BX = torch.empty_like(x_BX, dtype=torch.float8_e4m3fn)
    scale_KB = x_BX.new_empty(num_blocks, padded, dtype=torch.float32)
    quantise_kernel[(num_rows, triton.cdiv(num_blocks, _BLOCKS))](
        x_BX, values_BX, scale_KB, num_blocks, padded, BLOCKS=_BLOCKS, BLOCK=BLOCK,
        num_warps=_NUM_WARPS,
    )  # fmt: skip
    return values_BX, scale_KB.T[:num_rows]
