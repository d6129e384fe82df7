"""Grouped GEMM in Triton: a program for each tile of each expert's output; those behind its count end at once.

Enters: grouped rows, weights, counts on the device. Leaves: grouped rows. Does not know: what the experts compute.

Legend: E experts, S slots of an expert, X columns in, N columns out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from data_plane.triton_dtype import dot_dtype

BLOCK_S, BLOCK_N, BLOCK_X = 64, 128, 64
"""64 rows: a wgmma's least. Decode brings an expert a few rows; its weights are what takes the time."""
NUM_WARPS, NUM_STAGES = 4, 4
NUM_STAGES_FP32 = 2


@triton.jit
def grouped_gemm_kernel(
    x_ptr, weight_ptr, count_ptr, y_ptr, num_slots, num_columns, width,
    BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_X: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Program (column tile, row tile, expert): the row tiles of a weight's columns run side by side, and share them."""
    expert = tl.program_id(2).to(tl.int64)
    count = tl.load(count_ptr + expert)
    first_slot = tl.program_id(1) * BLOCK_S
    if first_slot >= count:
        return
    slot = first_slot + tl.arange(0, BLOCK_S)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_row = x_ptr + (expert * num_slots + slot[:, None]) * width
    weight_row = weight_ptr + (expert * num_columns + column[None, :]) * width
    acc = tl.zeros([BLOCK_S, BLOCK_N], tl.float32)
    for begin in range(0, width, BLOCK_X):
        k = begin + tl.arange(0, BLOCK_X)
        x = tl.load(x_row + k[None, :], mask=(slot < count)[:, None] & (k < width)[None, :], other=0.0)
        weight = tl.load(
            weight_row + k[:, None], mask=(column < num_columns)[None, :] & (k < width)[:, None], other=0.0
        )
        acc = tl.dot(x.to(DOT), weight.to(DOT), acc, input_precision="ieee")
    y = y_ptr + (expert * num_slots + slot[:, None]) * num_columns + column[None, :]
    is_written = (slot < count)[:, None] & (column < num_columns)[None, :]
    tl.store(y, acc.to(y_ptr.dtype.element_ty), mask=is_written)


class TritonGemm:
    """See grouped.GroupedGemm."""

    def prepare(self, weight_ENX: Tensor) -> Tensor:
        """See GroupedGemm.prepare."""
        return weight_ENX.contiguous()

    def run(self, x_ESX: Tensor, prepared: Tensor, count_E: Tensor) -> Tensor:
        """See GroupedGemm.run."""
        num_experts, num_slots, width = x_ESX.shape
        num_columns = prepared.shape[1]
        y_ESN = x_ESX.new_empty((num_experts, num_slots, num_columns))
        grouped_gemm_kernel[(triton.cdiv(num_columns, BLOCK_N), triton.cdiv(num_slots, BLOCK_S), num_experts)](
            x_ESX.contiguous(), prepared, count_E, y_ESN, num_slots, num_columns, width,
            BLOCK_S=BLOCK_S, BLOCK_N=BLOCK_N, BLOCK_X=BLOCK_X, DOT=dot_dtype(x_ESX.dtype), num_warps=NUM_WARPS,
            num_stages=NUM_STAGES_FP32 if x_ESX.dtype == torch.float32 else NUM_STAGES,
        )  # fmt: skip
        return y_ESN
