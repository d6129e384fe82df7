"""The gates of the reference model: their near-ties, and the other choice there.

Where two experts or groups are closer than the rounding of fp32 sums, both choices are right, and
their texts differ.
"""

from __future__ import annotations

from collections.abc import Set
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

GATE_NEAR_TIE = 2e-6
"""Five times the seen difference of two orders of summation (docs/log.md)."""


class GateDecision(NamedTuple):
    """One token's choice of experts in one layer."""

    layer: int
    """Index among the layers that have a gate."""
    token: int


class ReferenceGates:
    """Watches the gates of a model's forwards (one sequence at a time)."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.near_ties: list[GateDecision] = []
        """Near-ties since the list was last cleared, by layer."""
        self.decided_otherwise: Set[GateDecision] = frozenset()
        """Near-ties in which the next forwards take the other choice."""
        routers = [
            module for module in model.modules() if type(module).__name__.lower().endswith("router")
        ]
        for layer, router in enumerate(routers):
            router.register_forward_hook(partial(self._after_gate, layer))

    def _after_gate(
        self, layer: int, router: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]
    ) -> Any:
        logits, weights, experts = output
        scores = logits.softmax(dim=-1) if _is_softmax(router) else logits.sigmoid()
        others = _other_choice(router, scores, experts)
        tied = (others.sort(dim=-1).values != experts.sort(dim=-1).values).any(dim=-1)
        decisions = [GateDecision(layer, token) for token in tied.nonzero().flatten().tolist()]
        self.near_ties += decisions
        tokens = [decision.token for decision in decisions if decision in self.decided_otherwise]
        if not tokens:
            return None
        weights, experts = weights.clone(), experts.clone()
        experts[tokens] = others[tokens]
        weights[tokens] = _weights(router, scores[tokens], others[tokens])
        return logits, weights, experts


def _other_choice(router: Any, scores: Tensor, experts: Tensor) -> Tensor:
    """Return the choice [tokens, experts per token] if all chosen had scored GATE_NEAR_TIE less."""
    choice: Tensor = scores if _is_softmax(router) else scores + router.e_score_correction_bias
    has_groups = hasattr(router, "topk_group") and getattr(router, "topk_method", None) != "greedy"
    num_groups, groups_per_token = (router.num_group, router.topk_group) if has_groups else (1, 1)
    grouped = choice.view(len(choice), num_groups, -1)
    group_scores = grouped.topk(1 if _is_softmax(router) else 2, dim=-1).values.sum(dim=-1)
    chosen = group_scores.topk(groups_per_token, dim=-1).indices
    lowered = group_scores.scatter_add(1, chosen, torch.full_like(group_scores, -GATE_NEAR_TIE))
    groups = lowered.topk(groups_per_token, dim=-1).indices
    is_out = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, groups, False)
    lowered = choice.scatter_add(1, experts, torch.full_like(choice, -GATE_NEAR_TIE))
    lowered = lowered.view_as(grouped).masked_fill(is_out[..., None], float("-inf")).flatten(1)
    return lowered.topk(router.top_k, dim=-1).indices


def _is_softmax(router: Any) -> bool:
    """True for softmax scores: only gates of sigmoids have a bias."""
    return not hasattr(router, "e_score_correction_bias")


def _weights(router: Any, scores: Tensor, experts: Tensor) -> Tensor:
    weights = scores.gather(1, experts)
    # Mixtral's gate has neither field: it always normalises.
    has_scale = hasattr(router, "routed_scaling_factor")
    if getattr(router, "norm_topk_prob", not has_scale):
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * float(getattr(router, "routed_scaling_factor", 1.0))
