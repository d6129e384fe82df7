"""Rows on their way to experts and back.

Plain torch: the slow reference of data_plane/native. The GPU's sibling is gpu/rows.py. Legend:
all_to_all_cpu.py's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Region = Mapping[str, Tensor]
"""Fields of a region: of DISPATCH (count, number, weight, hidden) or of COMBINE (hidden)."""


def name_slots(expert_BK: Tensor, live_B: Tensor, number_ER: Tensor, seat: int) -> Tensor:
    """Return the slot's number for each expert of a row [B, K]; -1: not live.

    number_ER: SlotNames.of a layer. Row b of instance `seat` takes replica b + seat.
    """
    row_B1 = torch.arange(seat, seat + len(expert_BK))[:, None]
    replica_BK = 1 + row_B1 % number_ER[expert_BK, 0]
    return number_ER[expert_BK, replica_BK].long().masked_fill_(~live_B[:, None], -1)


def pack_rows(
    x_BX: Tensor,
    number_BK: Tensor,
    weight_BK: Tensor,
    num_slots: int,
    regions: Sequence[Region | None],
) -> tuple[Tensor, list[int]]:
    """Find each instance's rows, those that name a slot there: ([N, B] int64, counts).

    Rows ascend. num_slots: of an instance. regions: DISPATCH regions for the rows; None: nothing is
    written.
    """
    owner_BK = number_BK.div(num_slots, rounding_mode="floor")
    rows_NB, counts = torch.empty(len(regions), len(x_BX), dtype=torch.int64), []
    for instance, region in enumerate(regions):
        chosen = (owner_BK == instance).any(dim=1).nonzero().squeeze(1)
        count = len(chosen)
        rows_NB[instance, :count] = chosen
        counts.append(count)
        if region is not None:
            region["count"][0] = count
            region["hidden"][:count] = x_BX[chosen]
            region["number"][:count] = number_BK[chosen]
            region["weight"][:count] = weight_BK[chosen]
    return rows_NB, counts


def combine_sums(
    x_BX: Tensor,
    shared_BX: Tensor | None,
    own_sum: Tensor,
    rows_NB: Tensor,
    counts: Sequence[int],
    regions: Sequence[Region | None],
) -> Tensor:
    """Return x_BX plus its rows' experts: shared_BX, and each instance's sums.

    rows_NB, counts: of pack_rows. regions: COMBINE regions, None for this instance, whose sums are
    `own_sum`, and for one without rows. The order of sums is fixed.
    """
    y_BX = torch.zeros_like(x_BX)
    for rows, count, region in zip(rows_NB, counts, regions, strict=True):
        if count:
            y_BX.index_add_(
                0, rows[:count], own_sum if region is None else region["hidden"][:count]
            )
    return x_BX + (y_BX if shared_BX is None else y_BX + shared_BX)
