"""The experts of one instance on the CPU: each row's weighted sum over them.

The GPU's sibling is grouped.py. Legend: T rows, X hidden, K experts a row, M pairs of a row and an
expert here, B rows of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from data_plane.model.layers import gated
from data_plane.model.weights import MoeWeights
from data_plane.moe.rows import Region


def experts_forward(x_TX: Tensor, slot_TK: Tensor, weight_TK: Tensor, moe: MoeWeights) -> Tensor:
    """Run the experts that are here: [T, X], each row's weighted sum over them.

    slot_TK: int64; no slot of `mlps`: it is elsewhere. weight_TK: fp32. With packed weights a loop
    beats one grouped GEMM (docs/log.md).
    """
    is_here_TK = (slot_TK >= 0) & (slot_TK < len(moe.mlps))
    row_M, choice_M = is_here_TK.nonzero(as_tuple=True)
    if not len(row_M):
        return torch.zeros_like(x_TX)
    expert_M, order_M = slot_TK[row_M, choice_M].sort(stable=True)
    row_M, choice_M = row_M[order_M], choice_M[order_M]
    counts = torch.bincount(expert_M).tolist()
    mlps = [moe.mlps[expert] for expert, count in enumerate(counts) if count]
    sizes = [count for count in counts if count]
    # Two passes, so that the activation is one call for all experts.
    gate_up_M = torch.cat(
        [mlp.gate_up(x) for mlp, x in zip(mlps, torch.split(x_TX[row_M], sizes), strict=True)]
    )
    inner_MI = gated(gate_up_M, moe.limit)
    y_MX = torch.cat(
        [mlp.down(inner) for mlp, inner in zip(mlps, torch.split(inner_MI, sizes), strict=True)]
    )
    weight_M = weight_TK[row_M, choice_M].to(x_TX.dtype)
    return torch.zeros_like(x_TX).index_add_(0, row_M, y_MX.mul_(weight_M[:, None]))


def visit_experts(
    x_BX: Tensor,
    number_BK: Tensor,
    weight_BK: Tensor,
    own: Tensor,
    peers: Sequence[tuple[Region, Region]],
    moe: MoeWeights,
    first: int = 0,
    load_S: Tensor | None = None,
) -> tuple[Tensor, list[int]]:
    """Run the experts on rows `own` of the batch and on those of peers.

    own: int64 indices. peers: DISPATCH regions with rows, and COMBINE regions for their sums.
    first: the number of the first slot here. load_S: SlotLoads.of. Returns (sums of own rows
    [own, X], number of rows of each peer).
    """
    sent = [(arrived, int(arrived["count"][0])) for arrived, _ in peers]
    counts = [count for _, count in sent]
    own_rows = {"hidden": x_BX[own], "number": number_BK[own], "weight": weight_BK[own]}
    x_TX, number_TK, weight_TK = (
        torch.cat([rows, *(arrived[name][:count] for arrived, count in sent)])
        for name, rows in own_rows.items()
    )
    slot_TK = number_TK - first
    if load_S is not None:
        is_here_TK = (slot_TK >= 0) & (slot_TK < len(load_S))
        load_S += torch.bincount(slot_TK[is_here_TK], minlength=len(load_S))
    sizes = [len(own), *counts]
    own_sum, *sums = torch.split(experts_forward(x_TX, slot_TK, weight_TK, moe), sizes)
    for (_, answers), count, rows in zip(peers, counts, sums, strict=True):
        answers["hidden"][:count] = rows
    return own_sum, counts
