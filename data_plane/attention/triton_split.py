"""Split-KV on a GPU: a step's KV is cut into equal parts, whose pieces of a row are merged.

The work is cut on the device (`plan_parts`), so a captured step suits any lengths. Part p works
from (row, page) begin[p] to begin[p + 1]. A row in one part is written at once; of others, part p
stores a first piece in slot 2p + 1, any other in slot 2p. A row's drafts count as more heads.

Legend: A queries (attention rows), R rows, each of as many queries, P pages, N parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from nanocp.values.plan import PAGE_SIZE

LOG2_E = 1.4426950408889634
_ROW_COST_PAGES = 5
"""Fixed cost of a row, in pages: its query, output and loop start. FlashMLA's constant."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """The cut of the decode kernel for one dtype."""

    block_heads: int
    """Heads of a tile; the matrix units of Hopper (wgmma) take at least 64."""
    block_tokens: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """A step's page table and the cut of its work, on the device."""

    num_queries: int
    frame_RP: Tensor
    length_A: Tensor
    length_R: Tensor
    """[R] int32: the longest length among the row's queries."""
    begin_N2: Tensor
    """[N + 1, 2] int32: (row, page) at which each part begins."""
    row_parts_R2: Tensor
    """[R, 2] int32: (first part, parts) of each row."""


def plan_parts(frame_AP: Tensor, length_A: Tensor, num_queries: int, num_parts: int) -> TritonPlan:
    """Cut a step into parts on the device."""
    length_R = length_A if num_queries == 1 else length_A.view(-1, num_queries).amax(dim=1)
    num_rows = len(length_R)
    begin = length_A.new_empty((num_parts + 1, 2))
    row_parts = length_A.new_empty((num_rows, 2))
    plan_kernel[(num_parts + 1,)](
        length_R,
        begin,
        row_parts,
        num_rows,
        num_parts,
        ROW_COST=_ROW_COST_PAGES,
        PAGE=PAGE_SIZE,
        BLOCK_A=triton.next_power_of_2(max(num_rows, 1)),
    )
    return TritonPlan(num_queries, frame_AP[::num_queries], length_A, length_R, begin, row_parts)


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
    """Program p of num_parts + 1: write begin[p] = (row, page); a row has ROW_COST + its pages.

    Program 0 also writes (first part, parts) of every row.
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
        # A part that begins within a row's fixed cost begins at its page 0. Several may; the last
        # of them has the first page.
        first = (start + ROW_COST) // share
        count = tl.where(pages > 0, (end - 1) // share - first + 1, 0)
        tl.store(row_parts_ptr + 2 * row, first, mask=row < num_rows)
        tl.store(row_parts_ptr + 2 * row + 1, count, mask=row < num_rows)


@triton.jit
def store_piece(
    acc, maximum, total, row, lo, hi, pages, part, head, is_head, column, num_heads,
    slot_ptr, slot_lse_ptr, out_ptr, lse_ptr, RANK: tl.constexpr,
):  # fmt: skip
    """Write columns of a piece: to the output if it is the whole row, else to the piece's slot."""
    total = tl.where(total == 0.0, 1.0, total)
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
def part_bounds(begin_ptr, part):
    """Return a part's (begin row, begin page, end row, end page, row after its last one)."""
    begin_row, begin_page = tl.load(begin_ptr + 2 * part), tl.load(begin_ptr + 2 * part + 1)
    end_row, end_page = tl.load(begin_ptr + 2 * part + 2), tl.load(begin_ptr + 2 * part + 3)
    return begin_row, begin_page, end_row, end_page, end_row + tl.where(end_page > 0, 1, 0)


@triton.jit
def row_pages(row, pages, begin_row, begin_page, end_row, end_page):
    """Return the pages of a row that a part reads: (first, end)."""
    lo = tl.where(row == begin_row, begin_page, 0)
    hi = tl.where(row == end_row, end_page, pages)
    return lo, hi


@triton.jit
def tile_lengths(length, query_length_ptr, row, query, is_head, QUERIES: tl.constexpr):
    """Return the lengths of a tile's heads, one or [BLOCK_H, 1]. query [BLOCK_H]: of each head."""
    if QUERIES == 1:
        lengths = length
    else:
        lengths = tl.load(query_length_ptr + row * QUERIES + query, mask=is_head, other=0)[:, None]
    return lengths


@triton.jit
def weigh(score, is_token, scale_log2, maximum, total):
    """Turn a block's scores into (weights, factor for the sums so far, new maximum, new total).

    is_token: marks the tokens of a head, [1 or BLOCK_H, BLOCK_T].
    """
    score = tl.where(is_token, score * scale_log2, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(score, 1))
    # A query may read nothing of the first blocks: -inf - -inf would be NaN.
    safe = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    rescale = tl.exp2(maximum - safe)
    weight = tl.exp2(score - safe[:, None])
    return weight, rescale, new_maximum, total * rescale + tl.sum(weight, 1)


@triton.jit
def load_queries(base, column, is_head):
    """Load columns of a tile of heads; their queries begin at base [BLOCK_H, 1]."""
    return tl.load(base + column[None, :], mask=is_head[:, None], other=0.0)
