"""LSE merge in Triton: any number of partials of a row, in one pass over them.

The slow reference is lse_merge.py. Legend: Q partials, B rows, H heads, V width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def add_partial(acc, total, maximum, partial, lse):
    """Add one partial: the new (weighted sum, sum of weights, maximum)."""
    new_maximum = tl.maximum(maximum, lse)
    # While all partials are empty the maximum is -inf, and -inf - -inf would be NaN.
    safe = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    weight = tl.exp(lse - safe)
    rescale = tl.exp(maximum - safe)
    return acc * rescale + partial * weight, total * rescale + weight, new_maximum


@triton.jit
def merge_kernel(
    partial_ptr,
    lse_ptr,
    row_parts_ptr,
    out_ptr,
    out_lse_ptr,
    num_partials,
    IS_SPLIT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Program (row, head): merge the partials of one head of one row.

    IS_SPLIT: partials are a decode kernel's pieces, counted by row_parts. Else partial q of row b
    is number q * rows + b.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    num_rows, num_heads = tl.num_programs(0), tl.num_programs(1)
    if IS_SPLIT:
        first = tl.load(row_parts_ptr + 2 * row)
        count = tl.load(row_parts_ptr + 2 * row + 1)
        if count == 1:
            return
    else:
        first = 0
        count = num_partials
    column = tl.arange(0, BLOCK_V)
    inside = column < WIDTH
    maximum = float("-inf")
    total = 0.0
    acc = tl.zeros([BLOCK_V], tl.float32)
    for q in range(count):
        if IS_SPLIT:  # noqa: SIM108 - compiled once for each value
            index = 2 * (first + q) + tl.where(q == 0, 1, 0)
        else:
            index = q * num_rows + row
        at = index.to(tl.int64) * num_heads + head
        lse = tl.load(lse_ptr + at)
        partial = tl.load(partial_ptr + at * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        acc, total, maximum = add_partial(acc, total, maximum, partial, lse)
    is_empty = total == 0.0
    total = tl.where(is_empty, 1.0, total)
    at = row.to(tl.int64) * num_heads + head
    out = (acc / total).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at * WIDTH + column, out, mask=inside)
    tl.store(out_lse_ptr + at, tl.where(is_empty, float("-inf"), maximum + tl.log(total)))


def merge_partials(partial_QBHV: Tensor, lse_QBH: Tensor) -> tuple[Tensor, Tensor]:
    """Merge partials on a GPU, as lse_merge does: (output [B, H, V], lse [B, H]), both fp32."""
    num_partials, num_rows, num_heads, width = partial_QBHV.shape
    out_BHV = partial_QBHV.new_empty((num_rows, num_heads, width), dtype=torch.float32)
    lse_BH = lse_QBH.new_empty((num_rows, num_heads))
    merge_kernel[(num_rows, num_heads)](
        partial_QBHV.contiguous(),
        lse_QBH.contiguous(),
        lse_BH,  # not read
        out_BHV,
        lse_BH,
        num_partials,
        IS_SPLIT=False,
        WIDTH=width,
        BLOCK_V=triton.next_power_of_2(width),
    )
    return out_BHV, lse_BH


def merge_splits(
    split_SHV: Tensor, lse_SH: Tensor, row_parts_A2: Tensor, out_AHV: Tensor, lse_AH: Tensor
) -> None:
    """Write the rows of out and lse that have several pieces, or none.

    Pieces are split [S, H, V] and lse [S, H] fp32. row_parts [A, 2] int32: as of TritonPlan.
    """
    num_rows, num_heads, width = out_AHV.shape
    merge_kernel[(num_rows, num_heads)](
        split_SHV,
        lse_SH,
        row_parts_A2,
        out_AHV,
        lse_AH,
        0,
        IS_SPLIT=True,
        WIDTH=width,
        BLOCK_V=triton.next_power_of_2(width),
    )
