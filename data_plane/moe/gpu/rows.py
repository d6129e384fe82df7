"""Rows on their way to the instances of their slots, on a GPU: the table of routes.

The CPU's sibling is moe/rows.py. Legend: B rows, K experts a row, N instances.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def target_kernel(
    number_ptr, count_ptr, row_ptr, slot_ptr, num_rows, num_slots, per_row, num_here,
    BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program n: find the rows that name one of the num_here slots of instance n, ascending.

    Writes int32 count [N], row [N, slots] and slot [N, B], -1 for other rows.
    """
    target = tl.program_id(0)
    row, k = tl.arange(0, BLOCK_B), tl.arange(0, BLOCK_K)
    inside = (row < num_rows)[:, None] & (k < per_row)[None, :]
    number = tl.load(number_ptr + row[:, None] * per_row + k[None, :], mask=inside, other=-1)
    place = number - target * num_here
    is_there = (place >= 0) & (place < num_here)
    visits = tl.max((inside & is_there).to(tl.int32), 1) > 0
    slot = tl.cumsum(visits.to(tl.int32), 0) - 1
    tl.store(count_ptr + target, tl.sum(visits.to(tl.int32), 0))
    tl.store(row_ptr + target * num_slots + slot, row, mask=visits)
    tl.store(slot_ptr + target * num_rows + row, tl.where(visits, slot, -1), mask=row < num_rows)


def route_rows(
    number_BK: Tensor, num_here: int, num_instances: int, num_slots: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return target_kernel's (count [N], row [N, slots], slot [N, B]), all int32."""
    num_rows, per_row = number_BK.shape
    assert number_BK.is_contiguous()
    count_N = number_BK.new_empty(num_instances, dtype=torch.int32)
    row_NL = number_BK.new_empty(num_instances, num_slots, dtype=torch.int32)
    slot_NB = number_BK.new_empty(num_instances, num_rows, dtype=torch.int32)
    if not num_rows:
        return count_N.zero_(), row_NL, slot_NB
    target_kernel[(num_instances,)](
        number_BK, count_N, row_NL, slot_NB, num_rows, num_slots, per_row, num_here,
        BLOCK_B=triton.next_power_of_2(num_rows),
        BLOCK_K=triton.next_power_of_2(per_row),
    )  # fmt: skip
    return count_N, row_NL, slot_NB
