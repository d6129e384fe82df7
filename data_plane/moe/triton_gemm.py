"""Grouped GEMM in Triton: a program for each tile of each expert's output; those behind its count
end at once.

Enters: grouped rows, weights, counts on the device. Leaves: grouped rows. Does not know: what the
experts compute.

Legend: E experts, S slots of an expert, X columns in, N columns out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from data_plane.model.fp8_weight import Fp8Weight

BLOCK_S, BLOCK_N, BLOCK_X = 64, 128, 64
"""64 rows: a wgmma's least. Decode brings an expert a few rows; its weights are what takes the
time."""
NUM_WARPS, NUM_STAGES = 4, 4
NUM_STAGES_FP32 = 2


@triton.jit
def grouped_gemm_kernel(
    x_ptr, weight_ptr, scale_ptr, count_ptr, y_ptr, num_slots, num_columns, width, SCALE_N: tl.constexpr,
    SCALE_X: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """Program (column tile, row tile, expert): the row tiles of a weight's columns run side by
    side, and share them.

    SCALE_N, SCALE_X: rows and columns of a weight in FP8 that share a scale; 0 and no scales of a
    plain one. e4m3 is exact in bf16, so values enter the products as they are, and a block's scale
    multiplies what comes out.
    """
    DOT: tl.constexpr = x_ptr.dtype.element_ty
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
            acc += tl.dot(x.to(DOT), weight.to(DOT), input_precision="ieee") * scale[None, :]
        else:
            acc = tl.dot(x.to(DOT), weight.to(DOT), acc, input_precision="ieee")
    y = y_ptr + (expert * num_slots + slot[:, None]) * num_columns + column[None, :]
    is_written = (slot < count)[:, None] & (column < num_columns)[None, :]
    tl.store(y, acc.to(y_ptr.dtype.element_ty), mask=is_written)


class TritonGemm:
    """See grouped.Fp8GroupedGemm."""

    def prepare(self, weight_ENX: Tensor) -> Tensor:
        """See GroupedGemm.prepare."""
        return weight_ENX.contiguous()

    def fp8_obstacle(self, block: tuple[int, int]) -> str:
        """See Fp8GroupedGemm.fp8_obstacle."""
        fits = block[1] % BLOCK_X == 0
        return (
            ""
            if fits
            else f"triton reads {BLOCK_X} columns at a time, and blocks are {block[1]} wide"
        )

    def prepare_fp8(self, weight: Fp8Weight) -> Fp8Weight:
        """See Fp8GroupedGemm.prepare_fp8."""
        return weight._replace(values=weight.values.contiguous(), scale=weight.scale.contiguous())

    def run(self, x_ESX: Tensor, prepared: Tensor | Fp8Weight, count_E: Tensor) -> Tensor:
        """See GroupedGemm.run."""
        weight, scale, block = (
            prepared if isinstance(prepared, Fp8Weight) else (prepared, None, (0, 0))
        )
        num_experts, num_slots, width = x_ESX.shape
        num_columns = weight.shape[1]
        y_ESN = x_ESX.new_empty((num_experts, num_slots, num_columns))
        grouped_gemm_kernel[(triton.cdiv(num_columns, BLOCK_N), triton.cdiv(num_slots, BLOCK_S), num_experts)](
            x_ESX.contiguous(), weight, scale, count_E, y_ESN, num_slots, num_columns, width,
            SCALE_N=block[0], SCALE_X=block[1], BLOCK_S=BLOCK_S, BLOCK_N=BLOCK_N,
            BLOCK_X=BLOCK_X, num_warps=NUM_WARPS,
            num_stages=NUM_STAGES_FP32 if x_ESX.dtype == torch.float32 else NUM_STAGES,
        )  # fmt: skip
        return y_ESN
