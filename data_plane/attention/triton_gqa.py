"""Attention over K/V heads in Triton: a group's heads read each page of their K/V head once.

triton_split.py cuts the work. Legend: A attention rows, H query heads, G K/V heads, E width of a
head, W = 2GE (all keys, then values), F frames, S = 64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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
from nanocp.values.plan import PAGE_SIZE

TILES_16_BIT = Tiles(block_heads=16, block_tokens=64, num_warps=4, num_stages=3)
"""A group has 4 to 16 heads: a tile of 64 for wgmma would be mostly empty."""
TILES_FP32 = Tiles(block_heads=16, block_tokens=16, num_warps=4, num_stages=1)
"""Exact, for comparisons: no tensor cores."""


@triton.jit
def _tile_heads(
    shift, GROUPS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, BLOCK_H: tl.constexpr
):
    """Return a tile's (K/V head, heads of all queries, query of each, which exist); shift is 0."""
    TILES: tl.constexpr = (QUERIES * GROUP + BLOCK_H - 1) // BLOCK_H
    tile = tl.program_id(0) + shift
    inner = (tile % TILES) * BLOCK_H + tl.arange(0, BLOCK_H)
    query = inner // GROUP
    head = query * (GROUPS * GROUP) + tile // TILES * GROUP + inner % GROUP
    return tile // TILES, head, query, query < QUERIES


@triton.jit
def decode_heads_kernel(
    q_ptr, kv_ptr, frame_ptr, length_ptr, query_length_ptr, begin_ptr, slot_ptr, slot_lse_ptr,
    out_ptr, lse_ptr, scale_log2, page_stride, num_heads, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, QUERIES: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Program (head tile, part): attend to the part's pages with heads of one group.

    num_heads: of all QUERIES of a row, query by query. Operands have the dtype of queries and KV,
    sums are fp32. The frame after a row's last token is read too, with weight 0 (FramePool keeps it
    finite).
    """
    WIDTH: tl.constexpr = 2 * GROUPS * HEAD_DIM
    BLOCKS: tl.constexpr = PAGE // BLOCK_T
    group, head, query, is_head = _tile_heads(0, GROUPS, GROUP, QUERIES, BLOCK_H)
    part = tl.program_id(1)
    column = tl.arange(0, HEAD_DIM)
    token = tl.arange(0, BLOCK_T)
    key_at = group * HEAD_DIM
    begin_row, begin_page, end_row, end_page, stop_row = part_bounds(begin_ptr, part)
    for row in range(begin_row, stop_row):
        length = tl.load(length_ptr + row)
        pages = (length + PAGE - 1) // PAGE
        lo, hi = row_pages(row, pages, begin_row, begin_page, end_row, end_page)
        if hi > lo:
            reach = tile_lengths(length, query_length_ptr, row, query, is_head, QUERIES)
            q_base = q_ptr + (row * num_heads + head).to(tl.int64)[:, None] * HEAD_DIM
            q = load_queries(q_base, column, is_head)
            maximum = tl.full([BLOCK_H], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_H], tl.float32)
            acc = tl.zeros([BLOCK_H, HEAD_DIM], tl.float32)
            for block in range(lo * BLOCKS, tl.minimum(hi * BLOCKS, tl.cdiv(length, BLOCK_T))):
                frame = tl.load(frame_ptr + row * page_stride + block // BLOCKS).to(tl.int64)
                base = kv_ptr + frame * (PAGE * WIDTH) + (block % BLOCKS) * (BLOCK_T * WIDTH)
                at = base + key_at + (token[:, None] * WIDTH + column[None, :])
                key = tl.load(at)
                value = tl.load(at + GROUPS * HEAD_DIM)
                score = tl.dot(q, tl.trans(key), input_precision="ieee")
                is_token = block * BLOCK_T + token[None, :] < reach
                weight, rescale, maximum, total = weigh(score, is_token, scale_log2, maximum, total)
                weight = weight.to(value.dtype)
                acc = tl.dot(weight, value, acc * rescale[:, None], input_precision="ieee")
            # Computed once more, so that no register keeps them through the loop.
            none = tl.minimum(hi - lo, 0)
            _, late, _, is_late = _tile_heads(none, GROUPS, GROUP, QUERIES, BLOCK_H)
            store_piece(
                acc, maximum, total, row, lo, hi, pages, part, late, is_late, column, num_heads,
                slot_ptr, slot_lse_ptr, out_ptr, lse_ptr, HEAD_DIM,
            )  # fmt: skip


class TritonHeads(Attention):
    """The attention backend `triton` for K/V heads."""

    def __init__(
        self, num_kv_heads: int, head_dim: int, num_heads: int, num_parts: int | None = None
    ) -> None:
        """head_dim: a power of two from 16 on. num_parts: None to fill the GPU."""
        self._num_kv_heads, self._head_dim, self._num_heads = num_kv_heads, head_dim, num_heads
        if num_parts is None:
            tiles = self._num_tiles(TILES_16_BIT, 1)
            # Two programs fit on a multiprocessor.
            num_parts = 2 * torch.cuda.get_device_properties().multi_processor_count // tiles
        self._num_parts = max(num_parts, 1)

    def _num_tiles(self, tiles: Tiles, num_queries: int) -> int:
        group = num_queries * self._num_heads // self._num_kv_heads
        return int(self._num_kv_heads * triton.cdiv(group, tiles.block_heads))

    def plan(self, frame_AP: Tensor, length_A: Tensor, num_queries: int = 1) -> TritonPlan:
        return plan_parts(frame_AP, length_A, num_queries, self._num_parts)

    def run(
        self, q_AHE: Tensor, pool_FSW: Tensor, plan: TritonPlan, scale: float,
        needs_lse: bool = True,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        heads, width = plan.num_queries * self._num_heads, self._head_dim
        num_rows = len(q_AHE) // plan.num_queries
        out = q_AHE.new_empty((num_rows, heads, width))
        lse = q_AHE.new_empty((num_rows, heads), dtype=torch.float32)
        slots = q_AHE.new_empty((2 * self._num_parts, heads, width), dtype=torch.float32)
        slot_lse = q_AHE.new_empty((2 * self._num_parts, heads), dtype=torch.float32)
        tiles = TILES_FP32 if q_AHE.dtype == torch.float32 else TILES_16_BIT
        decode_heads_kernel[(self._num_tiles(tiles, plan.num_queries), self._num_parts)](
            q_AHE.contiguous(), pool_FSW, plan.frame_RP, plan.length_R, plan.length_A,
            plan.begin_N2, slots, slot_lse, out, lse, scale * LOG2_E, plan.frame_RP.stride(0),
            heads, GROUPS=self._num_kv_heads, GROUP=self._num_heads // self._num_kv_heads,
            HEAD_DIM=width, PAGE=PAGE_SIZE, QUERIES=plan.num_queries,
            BLOCK_H=tiles.block_heads, BLOCK_T=tiles.block_tokens, num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )  # fmt: skip
        merge_splits(slots, slot_lse, plan.row_parts_R2, out, lse)
        return out.view(len(q_AHE), -1, width), lse.view(len(q_AHE), -1)
