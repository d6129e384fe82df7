"""The gate (router): the experts of each row, and their weights.

Legend: B rows, X hidden, E experts, G groups, K experts a row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from data_plane.model.config import ModelConfig
from data_plane.model.weights import MoeWeights


def gate(x_BX: Tensor, moe: MoeWeights, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Choose each row's experts: (global ids [B, K] int64, weights [B, K] fp32).

    Scores are sigmoids, or a softmax. The choice goes by score + bias: first groups (by the sum of
    their best two experts; with softmax by their best), then experts. Weights are the plain scores,
    normalised and scaled.
    """
    logits_BE = F.linear(x_BX.float(), moe.gate)
    scores_BE = logits_BE.softmax(dim=-1) if config.softmax_gate else logits_BE.sigmoid()
    choice_BE = scores_BE if moe.gate_bias is None else scores_BE + moe.gate_bias
    if config.num_groups_per_token < config.num_groups:
        grouped_BGE = choice_BE.view(
            len(choice_BE), config.num_groups, config.num_experts // config.num_groups
        )
        group_score_BG = grouped_BGE.topk(1 if config.softmax_gate else 2, dim=-1).values.sum(
            dim=-1
        )
        chosen = group_score_BG.topk(config.num_groups_per_token, dim=-1).indices
        is_out_BG = torch.ones_like(group_score_BG, dtype=torch.bool).scatter_(1, chosen, False)
        choice_BE = grouped_BGE.masked_fill(is_out_BG[..., None], float("-inf")).flatten(1)
    expert_BK = choice_BE.topk(config.num_experts_per_token, dim=-1).indices
    weight_BK = scores_BE.gather(1, expert_BK)
    if config.weights_normalised:
        weight_BK = weight_BK / (weight_BK.sum(dim=-1, keepdim=True) + 1e-20)
    return expert_BK, weight_BK * config.routed_scale
