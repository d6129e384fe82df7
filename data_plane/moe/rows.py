"""Rows on their way to experts and back: from a batch into regions, and their sums home.

Plain torch: the slow reference of data_plane/native. The GPU's sibling is gpu/rows.py. Legend:
all_to_all_cpu.py's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Region = Mapping[str, Tensor]
"""Fields of a region: of DISPATCH (count, expert, weight, hidden) or of COMBINE (hidden)."""


def pack_rows(
    x_BX: Tensor,
    expert_BK: Tensor,
    weight_BK: Tensor,
    live_B: Tensor,
    seat_E: Tensor,
    regions: Sequence[Region | None],
) -> tuple[Tensor, list[int]]:
    """Find each instance's rows, the live ones that have an expert there: ([N, B] int64, counts).

    Rows ascend. seat_E: int64, each expert's instance. regions: DISPATCH regions for the rows;
    None: nothing is written.
    """
    owner_BK = seat_E[expert_BK]
    rows_NB, counts = torch.empty(len(regions), len(x_BX), dtype=torch.int64), []
    for instance, region in enumerate(regions):
        chosen = ((owner_BK == instance).any(dim=1) & live_B).nonzero().squeeze(1)
        count = len(chosen)
        rows_NB[instance, :count] = chosen
        counts.append(count)
        if region is not None:
            region["count"][0] = count
            region["hidden"][:count] = x_BX[chosen]
            region["expert"][:count] = expert_BK[chosen]
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
