"""Rows on their way to experts and back: out of a batch into regions, and their sums home.

Enters: rows, regions of the exchange. Leaves: rows, sums. Does not know: epochs, flags, what
experts compute. Plain torch: everywhere, and the slow reference of data_plane/native.

Legend: B rows, N instances, K experts a row, X hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

Region = Mapping[str, Tensor]
"""The fields of one region: of DISPATCH (count, expert, weight, hidden) or of COMBINE (hidden)."""


class RowMoves(Protocol):
    """Who moves rows; the contract of each call is that of the function of the same name."""

    def pack_rows(
        self,
        x_BX: Tensor,
        expert_BK: Tensor,
        weight_BK: Tensor,
        live_B: Tensor,
        experts_each: int,
        regions: Sequence[Region | None],
    ) -> tuple[Tensor, list[int]]:
        """See moe.rows."""

    def combine_sums(
        self,
        x_BX: Tensor,
        shared_BX: Tensor | None,
        own_sum: Tensor,
        rows_NB: Tensor,
        counts: Sequence[int],
        regions: Sequence[Region | None],
    ) -> Tensor:
        """See moe.rows."""


def pack_rows(
    x_BX: Tensor,
    expert_BK: Tensor,
    weight_BK: Tensor,
    live_B: Tensor,
    experts_each: int,
    regions: Sequence[Region | None],
) -> tuple[Tensor, list[int]]:
    """Of every instance, the live rows that have an expert there, ascending: [N, B] int64, and how
    many they are.

    They are written into the instance's DISPATCH region, with their number; None: nowhere.
    """
    owner_BK = expert_BK // experts_each
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
    """x [B, X] plus what the experts made of its rows: shared_BX and, of each row, the sum of what
    every instance returned, nothing if it went nowhere. None: this instance, whose sums are
    `own_sum`, or one that got no rows.

    Ascending instances: a row's sum does not depend on who was fast.
    """
    y_BX = torch.zeros_like(x_BX)
    for rows, count, region in zip(rows_NB, counts, regions, strict=True):
        if count:
            y_BX.index_add_(
                0, rows[:count], own_sum if region is None else region["hidden"][:count]
            )
    return x_BX + (y_BX if shared_BX is None else y_BX + shared_BX)
