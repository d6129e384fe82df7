"""The experts of one instance: the weighted sum, per row, over those of its experts that are here.

Enters: rows that arrived, their expert ids and weights. Leaves: sums. Does not know: who sent the rows.

Legend: T rows, X hidden, K experts a row, I expert width, M pairs of a row and an expert that is here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from data_plane.model.weights import MoeWeights

_FEW_PAIRS = 8
"""Up to here a loop over the experts beats one grouped GEMM (measured: docs/log.md)."""


def experts_forward(x_TX: Tensor, expert_TK: Tensor, weight_TK: Tensor, moe: MoeWeights) -> Tensor:
    """[T, X]. Ids are global; those that are not in moe.experts are passed over."""
    local_TK = expert_TK - moe.experts.start
    row_M, choice_M = ((local_TK >= 0) & (local_TK < len(moe.experts))).nonzero(as_tuple=True)
    expert_M = local_TK[row_M, choice_M]
    order = expert_M.argsort(stable=True)
    row_M, expert_M, choice_M = row_M[order], expert_M[order], choice_M[order]
    weight_M = weight_TK[row_M, choice_M].to(x_TX.dtype)
    ends_E = torch.bincount(expert_M, minlength=len(moe.experts)).cumsum(0, dtype=torch.int32)
    y_MX = _grouped(x_TX[row_M], ends_E, moe)
    return torch.zeros_like(x_TX).index_add_(0, row_M, y_MX * weight_M[:, None])


def reference_experts_forward(x_TX: Tensor, expert_TK: Tensor, weight_TK: Tensor, moe: MoeWeights) -> Tensor:
    """The same, slowly: one row and one expert at a time."""
    y_TX = torch.zeros_like(x_TX)
    for row, (experts, weights) in enumerate(zip(expert_TK.tolist(), weight_TK, strict=True)):
        for expert, weight in zip(experts, weights, strict=True):
            if expert in moe.experts:
                local = expert - moe.experts.start
                y_TX[row] += weight.to(x_TX.dtype) * _mlp(x_TX[row], moe.gate_up[local], moe.down[local])
    return y_TX


def _grouped(x_MX: Tensor, ends_E: Tensor, moe: MoeWeights) -> Tensor:
    if len(x_MX) > _FEW_PAIRS:
        gate, up = F.grouped_mm(x_MX, moe.gate_up.transpose(1, 2), offs=ends_E).chunk(2, dim=-1)
        return F.grouped_mm(F.silu(gate) * up, moe.down.transpose(1, 2), offs=ends_E)
    y_MX = torch.empty_like(x_MX)
    begin = 0
    for expert, end in enumerate(ends_E.tolist()):
        if end > begin:
            y_MX[begin:end] = _mlp(x_MX[begin:end], moe.gate_up[expert], moe.down[expert])
        begin = end
    return y_MX


def _mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)
