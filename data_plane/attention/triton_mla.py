"""Paged split-KV MLA decode in Triton: latent KV of a row is read by all parts of the GPU, balanced
on the device.

Enters: absorbed queries, a layer's frames, a page table and lengths on the device. Leaves:
(partial_o, lse) per row, lse natural log, fp32, (0, -inf) for a row that reads nothing. Does not
know: routes, other instances, the host.

A step's work is cut into equal parts by a kernel that reads the lengths (`plan`), so a captured
step stays right for any lengths: part p works from (row, page) begin[p] to begin[p + 1]. A row that
lies in one part is written as it is; the pieces of the others go to slots, and the merge kernel
adds them up: the first piece to slot 2p + 1 of its part p, the others to slot 2p of theirs, so a
part never needs more than two.

Legend: A attention rows, H heads, D latent KV width, R kv_lora_rank, F frames, S = 64, P pages, N
parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from data_plane.attention.fp8_latent import token_bytes, views
from data_plane.attention.triton_merge import merge_splits
from nanocp.plan import PAGE_SIZE

_ROW_COST_PAGES = 5
"""What a row costs beside its pages, in pages: its query, its output and the loop's start.
FlashMLA's own constant."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """How the decode kernel is cut for one dtype."""

    block_heads: int
    """64: the least rows of a wgmma."""
    block_tokens: int
    num_warps: int
    num_stages: int


TILES_16_BIT = Tiles(block_heads=64, block_tokens=64, num_warps=8, num_stages=2)
TILES_FP8 = Tiles(block_heads=64, block_tokens=32, num_warps=8, num_stages=2)
"""Of 64 tokens the loop would spill: values are widened on the way from memory to the products."""
TILES_FP32 = Tiles(block_heads=16, block_tokens=16, num_warps=4, num_stages=1)
"""Exact, for comparisons: no tensor cores."""


@triton.jit
def plan_kernel(
    length_ptr,
    begin_ptr,
    row_parts_ptr,
    num_rows,
    num_parts,
    ROW_COST: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_A: tl.constexpr,
):
    """Program p of num_parts + 1 writes begin[p] = (row, page); program 0 also every row's (first
    part, parts).

    The rows lie side by side on a line, each ROW_COST + its pages long, and the line is cut evenly.
    """
    part = tl.program_id(0)
    row = tl.arange(0, BLOCK_A)
    length = tl.load(length_ptr + row, mask=row < num_rows, other=0)
    pages = (length + PAGE - 1) // PAGE
    cost = tl.where(pages > 0, pages + ROW_COST, 0)
    end = tl.cumsum(cost, 0)
    start = end - cost
    total = tl.sum(cost, 0)
    share = tl.maximum((total + num_parts - 1) // num_parts, 1)
    position = part * share
    begin_row = tl.minimum(tl.sum((end <= position).to(tl.int32), 0), num_rows)
    row_start = tl.sum(tl.where(row == begin_row, start, 0), 0)
    begin_page = tl.where(begin_row == num_rows, 0, tl.maximum(position - row_start - ROW_COST, 0))
    tl.store(begin_ptr + 2 * part, begin_row)
    tl.store(begin_ptr + 2 * part + 1, begin_page)
    if part == 0:
        # The part with the first page: parts that begin within a row's fixed cost begin at its page
        # 0, the last wins.
        first = (start + ROW_COST) // share
        count = tl.where(pages > 0, (end - 1) // share - first + 1, 0)
        tl.store(row_parts_ptr + 2 * row, first, mask=row < num_rows)
        tl.store(row_parts_ptr + 2 * row + 1, count, mask=row < num_rows)


@triton.jit
def _store_piece(
    acc, maximum, total, row, lo, hi, pages, part, head, is_head, column, num_heads,
    slot_ptr, slot_lse_ptr, out_ptr, lse_ptr, RANK: tl.constexpr,
):  # fmt: skip
    """Write columns of one piece of a row: to the output if it is the whole row, else to its slot."""
    out = acc * (1.0 / total)[:, None]
    lse = (maximum + tl.log2(total)) * 0.6931471805599453
    if (lo == 0) & (hi == pages):
        at = (row * num_heads + head).to(tl.int64)
        tl.store(
            out_ptr + at[:, None] * RANK + column[None, :],
            out.to(out_ptr.dtype.element_ty),
            mask=is_head[:, None],
        )
        tl.store(lse_ptr + at, lse, mask=is_head)
    else:
        at = ((2 * part + tl.where(lo == 0, 1, 0)) * num_heads + head).to(tl.int64)
        tl.store(slot_ptr + at[:, None] * RANK + column[None, :], out, mask=is_head[:, None])
        tl.store(slot_lse_ptr + at, lse, mask=is_head)


@triton.jit
def _late_heads(lo, hi, BLOCK_H: tl.constexpr):
    """The tile's heads once more (lo is below hi here), so that the compiler makes them where a
    piece is stored, and does not keep three dozen registers of them through the loop over the
    tokens: it spilled there (docs/log.md)."""
    return (tl.program_id(0) + tl.minimum(hi - lo, 0)) * BLOCK_H + tl.arange(0, BLOCK_H)


@triton.jit
def _part_bounds(begin_ptr, part):
    """(begin row, begin page, end row, end page, rows behind the last one)."""
    begin_row, begin_page = tl.load(begin_ptr + 2 * part), tl.load(begin_ptr + 2 * part + 1)
    end_row, end_page = tl.load(begin_ptr + 2 * part + 2), tl.load(begin_ptr + 2 * part + 3)
    return begin_row, begin_page, end_row, end_page, end_row + tl.where(end_page > 0, 1, 0)


@triton.jit
def _weigh(score, is_token, scale_log2, maximum, total):
    """(weights of a block's tokens, factor for what was summed before, new maximum, new total)."""
    score = tl.where(is_token[None, :], score * scale_log2, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(score, 1))
    rescale = tl.exp2(maximum - new_maximum)
    weight = tl.exp2(score - new_maximum[:, None])
    return weight, rescale, new_maximum, total * rescale + tl.sum(weight, 1)


@triton.jit
def decode_kernel(
    q_ptr, kv_ptr, frame_ptr, length_ptr, begin_ptr, slot_ptr, slot_lse_ptr, out_ptr, lse_ptr, scale_log2, max_pages,
    num_heads, RANK: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Program (head tile, part): attend to the part's pages with one tile of heads.

    Head tiles of a part run side by side, so the second reads its KV from the L2 cache. Operands of
    products have the dtype of the queries; sums are fp32. The frame after a row's last token is
    read too (it holds finite numbers: FramePool), and weighs nothing.
    """
    DOT: tl.constexpr = q_ptr.dtype.element_ty
    WIDTH: tl.constexpr = RANK + ROPE
    BLOCKS: tl.constexpr = PAGE // BLOCK_T
    head = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    part = tl.program_id(1)
    is_head = head < num_heads
    column, rope_column = tl.arange(0, RANK), RANK + tl.arange(0, ROPE)
    token = tl.arange(0, BLOCK_T)
    begin_row, begin_page, end_row, end_page, stop_row = _part_bounds(begin_ptr, part)
    for row in range(begin_row, stop_row):
        length = tl.load(length_ptr + row)
        pages = (length + PAGE - 1) // PAGE
        lo = tl.where(row == begin_row, begin_page, 0)
        hi = tl.where(row == end_row, end_page, pages)
        if hi > lo:
            q_base = q_ptr + (row * num_heads + head).to(tl.int64)[:, None] * WIDTH
            q = tl.load(q_base + column[None, :], mask=is_head[:, None], other=0.0).to(DOT)
            q_rope = tl.load(q_base + rope_column[None, :], mask=is_head[:, None], other=0.0).to(
                DOT
            )
            maximum = tl.full([BLOCK_H], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_H], tl.float32)
            acc = tl.zeros([BLOCK_H, RANK], tl.float32)
            for block in range(
                lo * BLOCKS, tl.minimum(hi * BLOCKS, (length + BLOCK_T - 1) // BLOCK_T)
            ):
                frame = tl.load(frame_ptr + row * max_pages + block // BLOCKS)
                base = (
                    kv_ptr
                    + frame.to(tl.int64) * (PAGE * WIDTH)
                    + (block % BLOCKS) * (BLOCK_T * WIDTH)
                )
                kv = tl.load(base + (token[:, None] * WIDTH + column[None, :])).to(DOT)
                k_rope = tl.load(base + (token[:, None] * WIDTH + rope_column[None, :])).to(DOT)
                score = tl.dot(q, tl.trans(kv), input_precision="ieee")
                score = tl.dot(q_rope, tl.trans(k_rope), score, input_precision="ieee")
                is_token = block * BLOCK_T + token < length
                weight, rescale, maximum, total = _weigh(
                    score, is_token, scale_log2, maximum, total
                )
                acc = tl.dot(weight.to(DOT), kv, acc * rescale[:, None], input_precision="ieee")
            late = _late_heads(lo, hi, BLOCK_H)
            _store_piece(
                acc, maximum, total, row, lo, hi, pages, part, late, late < num_heads, column, num_heads,
                slot_ptr, slot_lse_ptr, out_ptr, lse_ptr, RANK,
            )  # fmt: skip


@triton.jit
def decode_fp8_kernel(
    q_ptr, value_ptr, scale_ptr, k_rope_ptr, frame_ptr, length_ptr, begin_ptr, slot_ptr, slot_lse_ptr, out_ptr,
    lse_ptr, scale_log2, max_pages, num_heads, RANK: tl.constexpr, ROPE: tl.constexpr, TOKEN_BYTES: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """decode_kernel over FP8 frames (fp8_latent: four groups of values with a scale each).

    e4m3 is exact in bf16, so values enter the products as they are; a group's scale multiplies its
    scores on the way in and the weights on the way out, [BLOCK_H, BLOCK_T] numbers instead of
    [BLOCK_T, RANK].
    """
    DOT: tl.constexpr = q_ptr.dtype.element_ty
    GROUP: tl.constexpr = RANK // 4
    head = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    part = tl.program_id(1)
    is_head = head < num_heads
    column, rope_column = tl.arange(0, GROUP), tl.arange(0, ROPE)
    token = tl.arange(0, BLOCK_T)
    begin_row, begin_page, end_row, end_page, stop_row = _part_bounds(begin_ptr, part)
    for row in range(begin_row, stop_row):
        length = tl.load(length_ptr + row)
        pages = (length + PAGE - 1) // PAGE
        lo = tl.where(row == begin_row, begin_page, 0)
        hi = tl.where(row == end_row, end_page, pages)
        if hi > lo:
            q_base = q_ptr + (row * num_heads + head).to(tl.int64)[:, None] * (RANK + ROPE)
            q0 = tl.load(q_base + column[None, :], mask=is_head[:, None], other=0.0).to(DOT)
            q1 = tl.load(q_base + GROUP + column[None, :], mask=is_head[:, None], other=0.0).to(DOT)
            q2 = tl.load(q_base + 2 * GROUP + column[None, :], mask=is_head[:, None], other=0.0).to(
                DOT
            )
            q3 = tl.load(q_base + 3 * GROUP + column[None, :], mask=is_head[:, None], other=0.0).to(
                DOT
            )
            q_rope = tl.load(
                q_base + RANK + rope_column[None, :], mask=is_head[:, None], other=0.0
            ).to(DOT)
            maximum = tl.full([BLOCK_H], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_H], tl.float32)
            acc0 = tl.zeros([BLOCK_H, GROUP], tl.float32)
            acc1 = tl.zeros([BLOCK_H, GROUP], tl.float32)
            acc2 = tl.zeros([BLOCK_H, GROUP], tl.float32)
            acc3 = tl.zeros([BLOCK_H, GROUP], tl.float32)
            for block in range(
                lo * (PAGE // BLOCK_T), tl.minimum(hi * (PAGE // BLOCK_T), tl.cdiv(length, BLOCK_T))
            ):
                frame = tl.load(frame_ptr + row * max_pages + block // (PAGE // BLOCK_T)).to(
                    tl.int64
                )
                first = frame * PAGE + (block % (PAGE // BLOCK_T)) * BLOCK_T
                values = (
                    value_ptr
                    + first * TOKEN_BYTES
                    + (token[:, None] * TOKEN_BYTES + column[None, :])
                )
                v0 = tl.load(values).to(DOT)
                v1 = tl.load(values + GROUP).to(DOT)
                v2 = tl.load(values + 2 * GROUP).to(DOT)
                v3 = tl.load(values + 3 * GROUP).to(DOT)
                scales = scale_ptr + first * (TOKEN_BYTES // 4) + token * (TOKEN_BYTES // 4)
                s0, s1 = tl.load(scales), tl.load(scales + 1)
                s2, s3 = tl.load(scales + 2), tl.load(scales + 3)
                rope = k_rope_ptr + first * (TOKEN_BYTES // 2)
                k_rope = tl.load(
                    rope + (token[:, None] * (TOKEN_BYTES // 2) + rope_column[None, :])
                ).to(DOT)
                score = tl.dot(q_rope, tl.trans(k_rope), input_precision="ieee")
                score += tl.dot(q0, tl.trans(v0), input_precision="ieee") * s0[None, :]
                score += tl.dot(q1, tl.trans(v1), input_precision="ieee") * s1[None, :]
                score += tl.dot(q2, tl.trans(v2), input_precision="ieee") * s2[None, :]
                score += tl.dot(q3, tl.trans(v3), input_precision="ieee") * s3[None, :]
                is_token = block * BLOCK_T + token < length
                weight, rescale, maximum, total = _weigh(
                    score, is_token, scale_log2, maximum, total
                )
                acc0 = tl.dot(
                    (weight * s0[None, :]).to(DOT),
                    v0,
                    acc0 * rescale[:, None],
                    input_precision="ieee",
                )
                acc1 = tl.dot(
                    (weight * s1[None, :]).to(DOT),
                    v1,
                    acc1 * rescale[:, None],
                    input_precision="ieee",
                )
                acc2 = tl.dot(
                    (weight * s2[None, :]).to(DOT),
                    v2,
                    acc2 * rescale[:, None],
                    input_precision="ieee",
                )
                acc3 = tl.dot(
                    (weight * s3[None, :]).to(DOT),
                    v3,
                    acc3 * rescale[:, None],
                    input_precision="ieee",
                )
            late = _late_heads(lo, hi, BLOCK_H)
            _store_piece(
                acc0, maximum, total, row, lo, hi, pages, part, late, late < num_heads, 0 * GROUP + column, num_heads,
                slot_ptr, slot_lse_ptr, out_ptr, lse_ptr, RANK,
            )  # fmt: skip
            _store_piece(
                acc1, maximum, total, row, lo, hi, pages, part, late, late < num_heads, 1 * GROUP + column, num_heads,
                slot_ptr, slot_lse_ptr, out_ptr, lse_ptr, RANK,
            )  # fmt: skip
            _store_piece(
                acc2, maximum, total, row, lo, hi, pages, part, late, late < num_heads, 2 * GROUP + column, num_heads,
                slot_ptr, slot_lse_ptr, out_ptr, lse_ptr, RANK,
            )  # fmt: skip
            _store_piece(
                acc3, maximum, total, row, lo, hi, pages, part, late, late < num_heads, 3 * GROUP + column, num_heads,
                slot_ptr, slot_lse_ptr, out_ptr, lse_ptr, RANK,
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """One step's page table and how its work is cut: made once a step, used by every layer. All on
    the device."""

    frame_AP: Tensor
    length_A: Tensor
    begin_N2: Tensor
    """[N + 1, 2] int32: (row, page) where each part begins."""
    row_parts_A2: Tensor
    """[A, 2] int32: (first part, parts) of each row."""


class TritonMla:
    """The attention backend `triton`; see backend.Attention."""

    def __init__(
        self, rank: int, rope_dim: int, num_heads: int, num_parts: int | None = None
    ) -> None:
        """num_parts: by default as many as fill the GPU, head tiles counted."""
        self._rank, self._rope_dim, self._num_heads = rank, rope_dim, num_heads
        if num_parts is None:
            num_parts = torch.cuda.get_device_properties().multi_processor_count // triton.cdiv(
                num_heads, 64
            )
        self._num_parts = max(num_parts, 1)

    def plan(self, frame_AP: Tensor, length_A: Tensor) -> TritonPlan:
        """See backend.Attention.plan. Nothing is read by the host."""
        num_rows = len(length_A)
        begin = length_A.new_empty((self._num_parts + 1, 2))
        row_parts = length_A.new_empty((num_rows, 2))
        plan_kernel[(self._num_parts + 1,)](
            length_A,
            begin,
            row_parts,
            num_rows,
            self._num_parts,
            ROW_COST=_ROW_COST_PAGES,
            PAGE=PAGE_SIZE,
            BLOCK_A=triton.next_power_of_2(max(num_rows, 1)),
        )
        return TritonPlan(frame_AP, length_A, begin, row_parts)

    def run(
        self, q_AHD: Tensor, pool_FSD: Tensor, plan: TritonPlan, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See backend.Attention.run."""
        num_rows, heads, rank = len(q_AHD), self._num_heads, self._rank
        out = q_AHD.new_empty((num_rows, heads, rank))
        lse = q_AHD.new_empty((num_rows, heads), dtype=torch.float32)
        slots = q_AHD.new_empty((2 * self._num_parts, heads, rank), dtype=torch.float32)
        slot_lse = q_AHD.new_empty((2 * self._num_parts, heads), dtype=torch.float32)
        is_fp8 = pool_FSD.dtype == torch.uint8
        tiles = (
            TILES_FP8 if is_fp8 else TILES_FP32 if q_AHD.dtype == torch.float32 else TILES_16_BIT
        )
        kernel, kv = (
            (decode_fp8_kernel, views(pool_FSD, rank)) if is_fp8 else (decode_kernel, (pool_FSD,))
        )
        widths = {"TOKEN_BYTES": token_bytes(rank, self._rope_dim)} if is_fp8 else {}
        kernel[(triton.cdiv(heads, tiles.block_heads), self._num_parts)](
            q_AHD.contiguous(), *kv, plan.frame_AP, plan.length_A, plan.begin_N2, slots, slot_lse, out, lse,
            scale * 1.4426950408889634, plan.frame_AP.stride(0), heads,
            RANK=rank, ROPE=self._rope_dim, PAGE=PAGE_SIZE, BLOCK_H=tiles.block_heads, BLOCK_T=tiles.block_tokens,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages, **widths,
        )  # fmt: skip
        merge_splits(slots, slot_lse, plan.row_parts_A2, out, lse)
        return out, lse
