"""Grouped GEMM in Triton: a program for each tile of each expert's output.

Enters: grouped rows, weights, counts on the device. Leaves: grouped rows. Does not know: what the
experts compute. Programs whose rows come after an expert's count end at once.

Legend: E experts, S slots of an expert, X columns in, N columns out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from data_plane.model.fp8_weight import Fp8Weight
from data_plane.moe.grouped import GroupedGemm

BLOCK_S, BLOCK_N, BLOCK_X = 64, 128, 64
"""Rows, columns and depth of a tile. Decode brings few rows; 64 is the least that wgmma takes."""
NUM_WARPS, NUM_STAGES = 4, 4
NUM_STAGES_FP32 = 2


@triton.jit
def grouped_gemm_kernel(
    x_ptr, weight_ptr, scale_ptr, count_ptr, y_ptr, num_slots, num_columns, width,
    SCALE_N: tl.constexpr, SCALE_X: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_X: tl.constexpr,
):  # fmt: skip
    """Program (column tile, row tile, expert): one tile of an expert's output.

    Row tiles of one column tile run side by side, and share its weights. SCALE_N, SCALE_X: rows and
    columns of an FP8 weight that share a scale; 0 for a plain weight, which has no scales. e4m3 is
    exact in bf16, so values enter the products as they are; a block's scale multiplies the product.
    """
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
        x = tl.load(
            x_row + k[None, :], mask=(slot < count)[:, None] & (k < width)[None, :], other=0.0
        )
        weight = tl.load(
            weight_row + k[:, None],
            mask=(column < num_columns)[None, :] & (k < width)[:, None],
            other=0.0,
        )
        if SCALE_N:
            num_scales = tl.cdiv(width, SCALE_X)
            block_row = expert * tl.cdiv(num_columns, SCALE_N) + column // SCALE_N
            scale = tl.load(
                scale_ptr + block_row * num_scales + begin // SCALE_X,
                mask=column < num_columns,
                other=0.0,
            )
            acc += tl.dot(x, weight.to(x.dtype), input_precision="ieee") * scale[None, :]
        else:
            acc = tl.dot(x, weight.to(x.dtype), acc, input_precision="ieee")
    y = y_ptr + (expert * num_slots + slot[:, None]) * num_columns + column[None, :]
    is_written = (slot < count)[:, None] & (column < num_columns)[None, :]
    tl.store(y, acc.to(y_ptr.dtype.element_ty), mask=is_written)


class TritonGemm(GroupedGemm):
    """A grouped.Fp8GroupedGemm by the kernel of this file."""

    def prepare(self, weight_ENX: Tensor) -> Tensor:
        return weight_ENX.contiguous()

    def fp8_obstacle(self, block: tuple[int, int]) -> str:
        """Say why blocks do not fit the kernel's tiles; an empty string if they do."""
        if block[1] % BLOCK_X == 0:
            return ""
        return f"triton reads {BLOCK_X} columns at a time, and blocks are {block[1]} wide"

    def prepare_fp8(self, weight: Fp8Weight) -> Fp8Weight:
        """Take FP8 weights and scales, contiguous, as Fp8GroupedGemm.prepare_fp8 says."""
        return weight._replace(values=weight.values.contiguous(), scale=weight.scale.contiguous())

    def run(self, x_ESX: Tensor, prepared: Tensor | Fp8Weight, count_E: Tensor) -> Tensor:
        weight, scale, block = (
            prepared if isinstance(prepared, Fp8Weight) else (prepared, None, (0, 0))
        )
        num_experts, num_slots, width = x_ESX.shape
        num_columns = weight.shape[1]
        y_ESN = x_ESX.new_empty((num_experts, num_slots, num_columns))
        grid = triton.cdiv(num_columns, BLOCK_N), triton.cdiv(num_slots, BLOCK_S), num_experts
        grouped_gemm_kernel[grid](
            x_ESX.contiguous(), weight, scale, count_E, y_ESN, num_slots, num_columns, width,
            SCALE_N=block[0], SCALE_X=block[1], BLOCK_S=BLOCK_S, BLOCK_N=BLOCK_N,
            BLOCK_X=BLOCK_X, num_warps=NUM_WARPS,
            num_stages=NUM_STAGES_FP32 if x_ESX.dtype == torch.float32 else NUM_STAGES,
        )  # fmt: skip
        return y_ESN
