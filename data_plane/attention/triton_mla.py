"""MLA decode in Triton: all heads of a tile read each page of latent KV once.

triton_split.py cuts the work. Legend: A attention rows, H heads, D latent KV width, R kv_lora_rank,
F frames, S = 64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from data_plane.attention.fp8_latent import views
from data_plane.attention.paged import Attention
from data_plane.attention.triton_merge import merge_splits
from data_plane.attention.triton_split import (
    LOG2_E,
    Tiles,
    TritonPlan,
    load_queries,
    part_bounds,
    plan_parts,
    row_pages,
    store_piece,
    tile_lengths,
    weigh,
)
from data_plane.model.sizes import NUM_SCALES
from nanocp.values.plan import PAGE_SIZE

TILES_16_BIT = Tiles(block_heads=64, block_tokens=64, num_warps=8, num_stages=2)
TILES_FP32 = Tiles(block_heads=16, block_tokens=16, num_warps=4, num_stages=1)
"""Exact, for comparisons: no tensor cores."""


@triton.jit
def _late_heads(lo, hi, BLOCK_H: tl.constexpr):
    """Compute the tile's heads again, where a piece is stored.

    Else the compiler keeps them in three dozen registers through the loop, and spills
    (docs/log.md).
    """
    return (tl.program_id(0) + tl.minimum(hi - lo, 0)) * BLOCK_H + tl.arange(0, BLOCK_H)


@triton.jit
def _load_values(
    value_ptr, scale_ptr, first, DOT: tl.constexpr, BLOCK_T: tl.constexpr, RANK: tl.constexpr,
    STRIDE: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Load the values of a block of tokens in the dtype of products, [BLOCK_T, RANK].

    e4m3 is multiplied by its group's scale in fp32 and rounded once.
    """
    token, column, group = tl.arange(0, BLOCK_T), tl.arange(0, RANK), tl.arange(0, SCALES)
    values = tl.load(value_ptr + first * STRIDE + token[:, None] * STRIDE + column[None, :])
    if value_ptr.dtype.element_ty == tl.float8e4nv:
        scales = scale_ptr + first * (STRIDE // 4) + token[:, None] * (STRIDE // 4) + group[None, :]
        wide = tl.reshape(values.to(tl.float32), [BLOCK_T, SCALES, RANK // SCALES])
        values = tl.reshape(wide * tl.load(scales)[:, :, None], [BLOCK_T, RANK]).to(DOT)
    return values


@triton.jit
def decode_kernel(
    q_ptr, value_ptr, scale_ptr, k_rope_ptr, frame_ptr, length_ptr, query_length_ptr, begin_ptr,
    slot_ptr, slot_lse_ptr, out_ptr, lse_ptr, scale_log2, page_stride, num_heads,
    RANK: tl.constexpr, ROPE: tl.constexpr, STRIDE: tl.constexpr, ROPE_STRIDE: tl.constexpr,
    SCALES: tl.constexpr, PAGE: tl.constexpr, QUERIES: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Program (head tile, part): attend to the part's pages with one tile of heads.

    num_heads: of all QUERIES of a row, query by query. Operands have the queries' dtype, sums are
    fp32. The frame after a row's last token is read too, with weight 0 (FramePool keeps it finite).
    The other pointers are views of the frames, STRIDE values or ROPE_STRIDE numbers of a key apart.
    SCALES: of a token in e4m3 (fp8_latent.py).
    """
    DOT: tl.constexpr = q_ptr.dtype.element_ty
    BLOCKS: tl.constexpr = PAGE // BLOCK_T
    head = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    part = tl.program_id(1)
    is_head = head < num_heads
    column, rope_column = tl.arange(0, RANK), tl.arange(0, ROPE)
    token = tl.arange(0, BLOCK_T)
    begin_row, begin_page, end_row, end_page, stop_row = part_bounds(begin_ptr, part)
    for row in range(begin_row, stop_row):
        length = tl.load(length_ptr + row)
        pages = (length + PAGE - 1) // PAGE
        lo, hi = row_pages(row, pages, begin_row, begin_page, end_row, end_page)
        if hi > lo:
            query = head // (num_heads // QUERIES)
            reach = tile_lengths(length, query_length_ptr, row, query, is_head, QUERIES)
            q_base = q_ptr + (row * num_heads + head).to(tl.int64)[:, None] * (RANK + ROPE)
            q = load_queries(q_base, column, is_head)
            q_rope = load_queries(q_base + RANK, rope_column, is_head)
            maximum = tl.full([BLOCK_H], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_H], tl.float32)
            acc = tl.zeros([BLOCK_H, RANK], tl.float32)
            for block in range(lo * BLOCKS, tl.minimum(hi * BLOCKS, tl.cdiv(length, BLOCK_T))):
                frame = tl.load(frame_ptr + row * page_stride + block // BLOCKS).to(tl.int64)
                first = frame * PAGE + (block % BLOCKS) * BLOCK_T
                kv = _load_values(value_ptr, scale_ptr, first, DOT, BLOCK_T, RANK, STRIDE, SCALES)
                rope = k_rope_ptr + first * ROPE_STRIDE + token[:, None] * ROPE_STRIDE
                k_rope = tl.load(rope + rope_column[None, :]).to(DOT)
                score = tl.dot(q_rope, tl.trans(k_rope), input_precision="ieee")
                score = tl.dot(q, tl.trans(kv), score, input_precision="ieee")
                is_token = block * BLOCK_T + token[None, :] < reach
                weight, rescale, maximum, total = weigh(score, is_token, scale_log2, maximum, total)
                acc = tl.dot(weight.to(DOT), kv, acc * rescale[:, None], input_precision="ieee")
            late = _late_heads(lo, hi, BLOCK_H)
            store_piece(
                acc, maximum, total, row, lo, hi, pages, part, late, late < num_heads,
                column, num_heads, slot_ptr, slot_lse_ptr, out_ptr, lse_ptr, RANK,
            )  # fmt: skip


class TritonMla(Attention):
    """The attention backend `triton` for latent KV."""

    def __init__(
        self, rank: int, rope_dim: int, num_heads: int, num_parts: int | None = None
    ) -> None:
        """rank, rope_dim: of the latent KV. num_parts: None to fill the GPU."""
        self._rank, self._rope_dim, self._num_heads = rank, rope_dim, num_heads
        if num_parts is None:
            num_parts = torch.cuda.get_device_properties().multi_processor_count // triton.cdiv(
                num_heads, 64
            )
        self._num_parts = max(num_parts, 1)

    def plan(self, frame_AP: Tensor, length_A: Tensor, num_queries: int = 1) -> TritonPlan:
        return plan_parts(frame_AP, length_A, num_queries, self._num_parts)

    def run(
        self, q_AHD: Tensor, pool_FSD: Tensor, plan: TritonPlan, scale: float,
        needs_lse: bool = True,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        heads, rank = plan.num_queries * self._num_heads, self._rank
        num_rows = len(q_AHD) // plan.num_queries
        out = q_AHD.new_empty((num_rows, heads, rank))
        lse = q_AHD.new_empty((num_rows, heads), dtype=torch.float32)
        slots = q_AHD.new_empty((2 * self._num_parts, heads, rank), dtype=torch.float32)
        slot_lse = q_AHD.new_empty((2 * self._num_parts, heads), dtype=torch.float32)
        if pool_FSD.dtype == torch.uint8:
            value, scales, k_rope = views(pool_FSD, rank)
        else:
            value, scales, k_rope = pool_FSD, pool_FSD, pool_FSD[..., rank:]
        tiles = TILES_FP32 if q_AHD.dtype == torch.float32 else TILES_16_BIT
        decode_kernel[(triton.cdiv(heads, tiles.block_heads), self._num_parts)](
            q_AHD.contiguous(), value, scales, k_rope, plan.frame_RP, plan.length_R, plan.length_A,
            plan.begin_N2, slots, slot_lse, out, lse, scale * LOG2_E, plan.frame_RP.stride(0),
            heads, RANK=rank, ROPE=self._rope_dim, STRIDE=value.stride(1),
            ROPE_STRIDE=k_rope.stride(1), SCALES=NUM_SCALES, PAGE=PAGE_SIZE,
            QUERIES=plan.num_queries, BLOCK_H=tiles.block_heads, BLOCK_T=tiles.block_tokens,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
        merge_splits(slots, slot_lse, plan.row_parts_R2, out, lse)
        return out.view(len(q_AHD), -1, rank), lse.view(len(q_AHD), -1)
