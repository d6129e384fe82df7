"""Grouped GEMM in Triton over the rows of each expert, read where they are.

The slow reference is ReferenceGemm of tests/harness/kernels/slow_references.py. Legend: E experts,
S slots of an expert, X columns in, N columns out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from data_plane.kernels.norm import gated_product
from data_plane.model.fp8_weight import Fp8Weight
from data_plane.moe.gpu.grouped import PairsGemm
from data_plane.moe.gpu.pairs import Pairs, count_tiles, first_row_of

DEPTH = 64
_LEAST_PROGRAMS = 16


class GemmTiles(NamedTuple):
    """The cut of a product: rows and columns of a tile, warps and stages of a program."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int


GATED, PLAIN = GemmTiles(64, 64, 4, 3), GemmTiles(64, 128, 4, 4)
"""With three stages, three gated programs share a multiprocessor (72 KB each); with four, two."""
GATED_MANY, PLAIN_MANY = GemmTiles(128, 32, 4, 3), GemmTiles(128, 256, 8, 3)
"""For experts with about 128 rows or more, so that weights are read once."""
GATED_FP8, PLAIN_FP8 = GemmTiles(64, 64, 8, 4), GemmTiles(64, 128, 8, 4)
GATED_FP32, PLAIN_FP32 = GemmTiles(64, 64, 4, 2), GemmTiles(64, 128, 4, 2)
_MANY = 128


def _tiles(dtype: torch.dtype, is_gated: bool, is_fp8: bool, expected_rows: int) -> GemmTiles:
    """Choose the cut of a product; measured on an H200 (docs/log.md)."""
    if dtype == torch.float32:
        pair = GATED_FP32, PLAIN_FP32
    elif is_fp8:
        pair = GATED_FP8, PLAIN_FP8
    elif expected_rows >= _MANY:
        pair = GATED_MANY, PLAIN_MANY
    else:
        pair = GATED, PLAIN
    return pair[0] if is_gated else pair[1]


@triton.jit
def _scaled(
    acc, x, weight, scale_ptr, block_row, num_scales, begin, is_column, SCALE_X: tl.constexpr
):
    """Add a product with FP8 values, which are exact in x's dtype, times their blocks' scales."""
    scale = tl.load(
        scale_ptr + block_row * num_scales + begin // SCALE_X, mask=is_column, other=0.0
    )
    return acc + tl.dot(x, weight.to(x.dtype), input_precision="ieee") * scale[None, :]


@triton.jit
def grouped_gemm_kernel(
    x_ptr, peer_ptr, row_ptr, weight_ptr, scale_ptr, count_ptr, y_ptr, offset, instance,
    num_experts, num_slots, num_columns, width, stride, GATHERS: tl.constexpr,
    IN_REGION: tl.constexpr, IS_GATED: tl.constexpr, SCALE_N: tl.constexpr, SCALE_X: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Program (column tile, p) of P: row tiles p, p + P, ... of all experts' products.

    GATHERS: the row of a slot is row_ptr's, else the slot's own. IS_GATED: a weight has gate, then
    up; the result is silu(gate) * up, num_columns wide. SCALE_N, SCALE_X: rows and columns of an
    FP8 weight that share a scale; 0: plain.
    """
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = column < num_columns
    x_base = first_row_of(x_ptr, peer_ptr, offset, instance, IN_REGION)
    e, counts, tiles, ends, total = count_tiles(count_ptr, num_experts, BLOCK_E, BLOCK_S)
    for tile in range(tl.program_id(1), total, tl.num_programs(1)):
        expert = tl.sum((ends <= tile).to(tl.int32), 0)
        first = tl.sum(tl.where(e == expert, ends - tiles, 0), 0)
        count = tl.sum(tl.where(e == expert, counts, 0), 0)
        place = (tile - first) * BLOCK_S + tl.arange(0, BLOCK_S)
        is_row = place < count
        slot = expert.to(tl.int64) * num_slots + place
        row = slot
        if GATHERS:
            row = tl.load(row_ptr + slot, mask=is_row, other=0).to(tl.int64)
        x_row = x_base + row[:, None] * stride
        weight_rows = num_columns
        if IS_GATED:
            weight_rows += num_columns
        weight_row = weight_ptr + (expert.to(tl.int64) * weight_rows + column[None, :]) * width
        if SCALE_N:
            num_scales = tl.cdiv(width, SCALE_X)
            block_row = expert * tl.cdiv(weight_rows, SCALE_N) + column // SCALE_N
            up_block_row = block_row + num_columns // SCALE_N
        acc = tl.zeros([BLOCK_S, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_S, BLOCK_N], tl.float32)
        for begin in range(0, width, BLOCK_X):
            k = begin + tl.arange(0, BLOCK_X)
            in_k = k < width
            x = tl.load(x_row + k[None, :], mask=is_row[:, None] & in_k[None, :], other=0.0)
            is_weight = is_column[None, :] & in_k[:, None]
            weight = tl.load(weight_row + k[:, None], mask=is_weight, other=0.0)
            if SCALE_N:
                acc = _scaled(
                    acc, x, weight, scale_ptr, block_row, num_scales, begin, is_column, SCALE_X
                )
            else:
                acc = tl.dot(x, weight, acc, input_precision="ieee")
            if IS_GATED:
                up_row = weight_row + tl.cast(num_columns, tl.int64) * width
                weight = tl.load(up_row + k[:, None], mask=is_weight, other=0.0)
                if SCALE_N:
                    up = _scaled(
                        up, x, weight, scale_ptr, up_block_row, num_scales, begin, is_column,
                        SCALE_X,
                    )  # fmt: skip
                else:
                    up = tl.dot(x, weight, up, input_precision="ieee")
        if IS_GATED:
            acc = gated_product(acc, up)
        y = y_ptr + slot[:, None] * num_columns + column[None, :]
        tl.store(y, acc.to(y_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


class TritonGemm(PairsGemm):
    """A grouped.PairsGemm by the kernel of this file."""

    def __init__(self, rows_a_row: float = 1.0) -> None:
        """rows_a_row: about the rows of an expert for each row of an instance's batch."""
        self._rows_a_row = rows_a_row

    def prepare(self, weight_ENX: Tensor) -> Tensor:
        return weight_ENX.contiguous()

    def fp8_obstacle(self, block: tuple[int, int]) -> str:
        if block[1] % DEPTH == 0:
            return ""
        return f"triton reads {DEPTH} columns at a time, and blocks are {block[1]} wide"

    def prepare_fp8(self, weight: Fp8Weight) -> Fp8Weight:
        return weight._replace(values=weight.values.contiguous(), scale=weight.scale.contiguous())

    def run(self, x_ESX: Tensor, prepared: Tensor | Fp8Weight, count_E: Tensor) -> Tensor:
        num_experts, num_slots, _ = x_ESX.shape
        y = _product(x_ESX.flatten(0, 1).contiguous(), prepared, count_E, num_slots, 0)
        return y.view(num_experts, num_slots, y.shape[1])

    def run_pairs(
        self, pairs: Pairs, gate_up: Tensor | Fp8Weight, down: Tensor | Fp8Weight
    ) -> Tensor:
        """Run an MLP on pairs in two launches."""
        num_slots, expected = pairs.row_ES.shape[1], round(len(pairs.x) * self._rows_a_row)
        inner = _product(pairs.x, gate_up, pairs.count_E, num_slots, expected, pairs)
        return _product(inner, down, pairs.count_E, num_slots, expected)


def _product(
    x: Tensor,
    weight: Tensor | Fp8Weight,
    count_E: Tensor,
    num_slots: int,
    expected_rows: int,
    pairs: Pairs | None = None,
) -> Tensor:
    """Multiply rows by slot, or gate the products of pairs' rows: [E * S, N]."""
    values, scale, block = (weight, weight, (0, 0)) if isinstance(weight, Tensor) else weight
    is_gated = pairs is not None
    num_experts, columns, width = values.shape
    columns //= 2 if is_gated else 1
    y = x.new_empty(num_experts * num_slots, columns)
    table, offset, instance, stride = pairs.place if pairs else (count_E, 0, 0, width)
    tiles = _tiles(x.dtype, is_gated, bool(block[0]), expected_rows)
    most_tiles = num_experts * triton.cdiv(max(num_slots, 1), tiles.rows)
    grid = (
        triton.cdiv(columns, tiles.columns),
        min(most_tiles, max(2 * num_experts, _LEAST_PROGRAMS)),
    )
    assert values.is_contiguous() and x.is_contiguous()
    if num_slots:
        grouped_gemm_kernel[grid](
            x, table, pairs.row_ES if pairs else count_E, values, scale, count_E, y, offset,
            instance, num_experts, num_slots, columns, width, stride, GATHERS=is_gated,
            IN_REGION=pairs is not None and pairs.region is not None, IS_GATED=is_gated,
            SCALE_N=block[0], SCALE_X=block[1], BLOCK_S=tiles.rows, BLOCK_N=tiles.columns,
            BLOCK_X=DEPTH, BLOCK_E=triton.next_power_of_2(num_experts),
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
    return y
