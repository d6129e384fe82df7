"""Rows on their way to experts and back, on a GPU: tables of what goes where, grouping, and sums.

Enters: experts and weights of rows, counts on the device. Leaves: tables, grouped rows, sums. Does
not know: the gate, GEMMs, how rows travel. grouped.group_rows and ungroup_rows are the slow
reference of the grouping. The CPU's sibling is rows.py.

Legend: B rows, K experts a row, N instances, T rows that arrived, E experts here, S slots of an
expert, X hidden.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_X = 1024
_BLOCK_T = 128


@triton.jit
def target_kernel(
    expert_ptr, live_ptr, seat_ptr, count_ptr, row_ptr, slot_ptr, num_rows, num_slots, per_row,
    BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program n: find the live rows that have an expert at instance n, ascending.

    seat_ptr [num_experts]: int64, the instance of each expert. Writes count [N], row [N, slots] and
    slot [N, B], int32; -1 for a row that does not go there.
    """
    target = tl.program_id(0)
    row, k = tl.arange(0, BLOCK_B), tl.arange(0, BLOCK_K)
    inside = (row < num_rows)[:, None] & (k < per_row)[None, :]
    expert = tl.load(expert_ptr + row[:, None] * per_row + k[None, :], mask=inside, other=0)
    is_there = inside & (tl.load(seat_ptr + expert, mask=inside, other=-1) == target)
    is_live = tl.load(live_ptr + row, mask=row < num_rows, other=0) != 0
    visits = (tl.max(is_there.to(tl.int32), 1) > 0) & is_live
    slot = tl.cumsum(visits.to(tl.int32), 0) - 1
    tl.store(count_ptr + target, tl.sum(visits.to(tl.int32), 0))
    tl.store(row_ptr + target * num_slots + slot, row, mask=visits)
    tl.store(slot_ptr + target * num_rows + row, tl.where(visits, slot, -1), mask=row < num_rows)


@triton.jit
def slot_kernel(
    expert_ptr, place_ptr, source_count_ptr, slot_ptr, count_ptr, num_instances, num_arrived,
    per_row, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program e: give a slot to every arrived row that visits local expert e, in row order.

    place_ptr [num_experts]: int64, the local number of each expert, -1 if it is elsewhere. Writes
    slot [T, K] int32 (e * T + slot) and count [E]; a pair whose expert is elsewhere is left as it
    is. As many rows arrived as the sources' counts say.
    """
    expert = tl.program_id(0)
    source = tl.arange(0, BLOCK_N)
    total = tl.sum(tl.load(source_count_ptr + source, mask=source < num_instances, other=0), 0)
    k = tl.arange(0, BLOCK_K)
    done = 0
    for begin in range(0, total, BLOCK_T):
        row = begin + tl.arange(0, BLOCK_T)
        at = row[:, None] * per_row + k[None, :]
        inside = (row < total)[:, None] & (k < per_row)[None, :]
        visited = tl.load(expert_ptr + at, mask=inside, other=0)
        is_here = inside & (tl.load(place_ptr + visited, mask=inside, other=-1) == expert)
        visits = tl.max(is_here.to(tl.int32), 1)
        slot = expert * num_arrived + done + tl.cumsum(visits, 0) - 1
        tl.store(
            slot_ptr + at, slot[:, None] + tl.zeros([BLOCK_T, BLOCK_K], tl.int32), mask=is_here
        )
        done += tl.sum(visits, 0)
    tl.store(count_ptr + expert, done)


@triton.jit
def group_kernel(
    x_ptr, slot_ptr, source_count_ptr, grouped_ptr, num_instances, width, per_row,
    BLOCK_X: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (row, column block): copy an arrived row to each of its slots."""
    row = tl.program_id(0)
    source = tl.arange(0, BLOCK_N)
    if row >= tl.sum(tl.load(source_count_ptr + source, mask=source < num_instances, other=0), 0):
        return
    column = tl.program_id(1) * BLOCK_X + tl.arange(0, BLOCK_X)
    x = tl.load(x_ptr + row.to(tl.int64) * width + column, mask=column < width)
    for k in range(per_row):
        slot = tl.load(slot_ptr + row * per_row + k).to(tl.int64)
        if slot >= 0:
            tl.store(grouped_ptr + slot * width + column, x, mask=column < width)


@triton.jit
def ungroup_kernel(
    y_ptr, slot_ptr, weight_ptr, source_count_ptr, sum_ptr, num_instances, width, per_row,
    BLOCK_X: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (row, column block): sum an arrived row over its experts that are here, weighted.

    The sum is computed in fp32.
    """
    row = tl.program_id(0)
    source = tl.arange(0, BLOCK_N)
    if row >= tl.sum(tl.load(source_count_ptr + source, mask=source < num_instances, other=0), 0):
        return
    column = tl.program_id(1) * BLOCK_X + tl.arange(0, BLOCK_X)
    acc = tl.zeros([BLOCK_X], tl.float32)
    for k in range(per_row):
        slot = tl.load(slot_ptr + row * per_row + k).to(tl.int64)
        if slot >= 0:
            y = tl.load(y_ptr + slot * width + column, mask=column < width, other=0.0)
            acc += tl.load(weight_ptr + row * per_row + k) * y.to(tl.float32)
    to = sum_ptr + row.to(tl.int64) * width + column
    tl.store(to, acc.to(sum_ptr.dtype.element_ty), mask=column < width)


@triton.jit
def sum_kernel(
    part_ptr, count_ptr, slot_ptr, sum_ptr, num_instances, width,
    BLOCK_X: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (row, column block): sum what the instances sent back for the row; 0 if none did.

    The sum is computed in fp32. Parts are dense, by source, then slot. count_ptr [N], slot_ptr
    [N, rows]: as target_kernel writes them.
    """
    row, num_rows = tl.program_id(0), tl.num_programs(0)
    column = tl.program_id(1) * BLOCK_X + tl.arange(0, BLOCK_X)
    source = tl.arange(0, BLOCK_N)
    counts = tl.load(count_ptr + source, mask=source < num_instances, other=0)
    first = tl.cumsum(counts, 0) - counts
    acc = tl.zeros([BLOCK_X], tl.float32)
    for n in range(num_instances):
        slot = tl.load(slot_ptr + n * num_rows + row)
        if slot >= 0:
            at = (tl.sum(tl.where(source == n, first, 0)) + slot).to(tl.int64)
            acc += tl.load(part_ptr + at * width + column, mask=column < width, other=0.0).to(
                tl.float32
            )
    to = sum_ptr + row.to(tl.int64) * width + column
    tl.store(to, acc.to(sum_ptr.dtype.element_ty), mask=column < width)


def route_rows(
    expert_BK: Tensor, live_B: Tensor, seat_E: Tensor, num_instances: int, num_slots: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the rows that each instance gets: (count [N], row [N, slots], slot [N, B]), all int32.

    An instance gets the live rows that have an expert there. seat_E: [num_experts] int64, the
    instance of each expert. num_slots: most rows that it may get.
    """
    num_rows, per_row = expert_BK.shape
    assert expert_BK.is_contiguous()
    count_N = expert_BK.new_empty(num_instances, dtype=torch.int32)
    row_NL = expert_BK.new_empty(num_instances, num_slots, dtype=torch.int32)
    slot_NB = expert_BK.new_empty(num_instances, num_rows, dtype=torch.int32)
    if not num_rows:
        return count_N.zero_(), row_NL, slot_NB
    target_kernel[(num_instances,)](
        expert_BK, live_B.view(torch.uint8), seat_E, count_N, row_NL, slot_NB, num_rows, num_slots,
        per_row, BLOCK_B=triton.next_power_of_2(num_rows),
        BLOCK_K=triton.next_power_of_2(per_row),
    )  # fmt: skip
    return count_N, row_NL, slot_NB


def group_arrived(
    x_TX: Tensor, expert_TK: Tensor, count_N: Tensor, place_E: Tensor, num_here: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Lay arrived rows out by expert: (x [E, T, X], count [E] int32, slot [T, K] int32).

    place_E: [num_experts] int64, the number of each expert among the num_here that are here, -1 if
    it is elsewhere. A slot is the place of a pair of row and expert in x.flatten(0, 1); -1 if the
    expert is not here. Only the first sum(count_N) of the T rows arrived. Slots after a count are
    not written.
    """
    assert x_TX.is_contiguous() and expert_TK.is_contiguous()
    (num_arrived, width), per_row, num_instances = x_TX.shape, expert_TK.shape[1], len(count_N)
    slot_TK = torch.full_like(expert_TK, -1, dtype=torch.int32)
    count_E = count_N.new_empty(num_here)
    x_ETX = x_TX.new_empty(num_here, num_arrived, width)
    blocks = {"BLOCK_N": triton.next_power_of_2(num_instances)}
    slot_kernel[(num_here,)](
        expert_TK, place_E, count_N, slot_TK, count_E, num_instances, num_arrived, per_row,
        BLOCK_T=_BLOCK_T, BLOCK_K=triton.next_power_of_2(per_row), **blocks,
    )  # fmt: skip
    group_kernel[(num_arrived, triton.cdiv(width, _BLOCK_X))](
        x_TX, slot_TK, count_N, x_ETX, num_instances, width, per_row, BLOCK_X=_BLOCK_X, **blocks
    )
    return x_ETX, count_E, slot_TK


def ungroup_arrived(y_ETX: Tensor, slot_TK: Tensor, weight_TK: Tensor, count_N: Tensor) -> Tensor:
    """Sum each arrived row over its experts that are here, weighted: [T, X].

    slot_TK, count_N: as group_arrived gives and takes them. Rows that did not arrive are not
    written.
    """
    (_, num_arrived, width), num_instances = y_ETX.shape, len(count_N)
    y_TX = y_ETX.new_empty(num_arrived, width)
    ungroup_kernel[(num_arrived, triton.cdiv(width, _BLOCK_X))](
        y_ETX, slot_TK, weight_TK, count_N, y_TX, num_instances, width, slot_TK.shape[1],
        BLOCK_X=_BLOCK_X, BLOCK_N=triton.next_power_of_2(num_instances),
    )  # fmt: skip
    return y_TX


def sum_returned(part_QX: Tensor, count_N: Tensor, slot_NB: Tensor) -> Tensor:
    """Sum the parts that came back for each row: [B, X].

    part_QX: dense, by source, then slot. count_N, slot_NB: as route_rows gives them.
    """
    num_instances, num_rows = slot_NB.shape
    y_BX = part_QX.new_empty(num_rows, part_QX.shape[1])
    if num_rows:
        sum_kernel[(num_rows, triton.cdiv(part_QX.shape[1], _BLOCK_X))](
            part_QX, count_N, slot_NB, y_BX, num_instances, part_QX.shape[1],
            BLOCK_X=_BLOCK_X, BLOCK_N=triton.next_power_of_2(num_instances),
        )  # fmt: skip
    return y_BX
