"""Rows on their way to experts and back: out of a batch into regions, together out of regions, and their sums home.

Enters: rows, regions of the exchange. Leaves: rows, sums. Does not know: epochs, flags, what experts compute.
Plain torch: everywhere, and the slow reference of data_plane/native.

Legend: B rows, N instances, K experts a row, X hidden size, T rows that arrived here, this instance's own first.
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

    def join_rows(
        self, x_BX: Tensor, expert_BK: Tensor, weight_BK: Tensor, own: Tensor, regions: Sequence[Region], room: Region
    ) -> list[int]:
        """See moe.rows."""

    def return_sums(self, y_TX: Tensor, counts: Sequence[int], regions: Sequence[Region | None]) -> None:
        """See moe.rows."""

    def combine_sums(
        self, own_sum: Tensor, rows_NB: Tensor, counts: Sequence[int], regions: Sequence[Region | None]
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
    """Of every instance, the live rows that have an expert there, ascending: [N, B] int64, and how many they are.

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


def join_rows(
    x_BX: Tensor, expert_BK: Tensor, weight_BK: Tensor, own: Tensor, regions: Sequence[Region], room: Region
) -> list[int]:
    """Lay the rows `own` of the batch and those of all regions, in their order, side by side into `room`, which has the
    fields of a region but the count. Returns how many came from each region."""
    counts = [int(region["count"][0]) for region in regions]
    own_rows = {"hidden": x_BX[own], "expert": expert_BK[own], "weight": weight_BK[own]}
    for name, rows in own_rows.items():
        parts = [region[name][:count] for region, count in zip(regions, counts, strict=True)]
        torch.cat([rows, *parts], out=room[name][: len(own) + sum(counts)])
    return counts


def return_sums(y_TX: Tensor, counts: Sequence[int], regions: Sequence[Region | None]) -> None:
    """Write the last sum(counts) rows into the COMBINE regions of those that they came from; None: it sent none."""
    for rows, region in zip(torch.split(y_TX[len(y_TX) - sum(counts) :], list(counts)), regions, strict=True):
        if region is not None:
            region["hidden"][: len(rows)] = rows


def combine_sums(own_sum: Tensor, rows_NB: Tensor, counts: Sequence[int], regions: Sequence[Region | None]) -> Tensor:
    """[B, X]: of each row the sum of what every instance returned; 0 if it went nowhere. None: this instance, whose
    sums are `own_sum`, or one that got no rows. Ascending instances: a row's sum does not depend on who was fast."""
    y_BX = own_sum.new_zeros(rows_NB.shape[1], own_sum.shape[1])
    for rows, count, region in zip(rows_NB, counts, regions, strict=True):
        if count:
            y_BX.index_add_(0, rows[:count], own_sum if region is None else region["hidden"][:count])
    return y_BX
