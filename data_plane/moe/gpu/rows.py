"""Rows on their way to the instances of their experts, on a GPU: the table of routes.

The CPU's sibling is moe/rows.py. Legend: B rows, K experts a row, N instances.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def target_kernel(
    expert_ptr, live_ptr, seat_ptr, count_ptr, row_ptr, slot_ptr, num_rows, num_slots, per_row,
    BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program n: find the live rows that have an expert at instance n, ascending.

    seat_ptr [num_experts] int64: each expert's instance. Writes int32 count [N], row [N, slots] and
    slot [N, B], -1 for other rows.
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


def route_rows(
    expert_BK: Tensor, live_B: Tensor, seat_E: Tensor, num_instances: int, num_slots: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Find each instance's rows, the live ones that have an expert there.

    Returns (count [N], row [N, slots], slot [N, B]), all int32. seat_E: [num_experts] int64, each
    expert's instance.
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
