"""Weights of one instance on its GPU: what model/layers.py takes, and experts as grouped GEMMs.

Enters: weights that were loaded plain (linear.PlainPacking). Leaves: the same on the GPU. Does not
know: checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from data_plane.model.fp8_weight import Fp8Linear, Fp8Weight
from data_plane.model.linear import LinearLayer, PlainLinear
from data_plane.model.weights import ModelWeights, MoeWeights
from data_plane.moe.grouped import GroupedExperts, GroupedGemm


@dataclass(frozen=True, slots=True)
class GpuWeights:
    """A decoder on a GPU, with the experts of one instance."""

    weights: ModelWeights
    """All but the experts: `mlps` of every mixture of experts is empty."""
    experts: tuple[GroupedExperts | None, ...]
    """The experts of each layer; None for a dense one."""

    @property
    def has_fp8_experts(self) -> bool:
        """Whether the experts' weights are in FP8."""
        return any(isinstance(experts.down, Fp8Weight) for experts in self.experts if experts)


def place_weights(
    weights: ModelWeights, device: torch.device, gemm: GroupedGemm, max_len: int
) -> GpuWeights:
    """Copy weights to the device, layer by layer, and make the rope table reach max_len."""
    weights.rope.place(device, max_len)
    layers, experts = [], []
    for layer in weights.layers:
        experts.append(None if layer.moe is None else _experts(layer.moe, device, gemm))
        layers.append(_placed(layer, device))
    placed = ModelWeights(
        weights.embedding.to(device),
        tuple(layers),
        weights.final_norm.to(device),
        _linear(weights.lm_head, device),
        weights.rope,
    )
    return GpuWeights(placed, tuple(experts))


def _experts(moe: MoeWeights, device: torch.device, gemm: GroupedGemm) -> GroupedExperts:
    gate_up, down = (
        _stacked(linears).to(device)
        for linears in ([mlp.gate_up for mlp in moe.mlps], [mlp.down for mlp in moe.mlps])
    )
    return GroupedExperts(gemm, moe.slot_E.to(device), gate_up, down)


def _stacked(linears: list[LinearLayer]) -> Tensor | Fp8Weight:
    weights = [linear.weight for linear in linears if isinstance(linear, Fp8Linear)]
    return (
        Fp8Weight.stack(weights)
        if weights
        else torch.stack([_weight(linear) for linear in linears])
    )


def _placed(weights: Any, device: torch.device) -> Any:
    """Copy the weights of a layer or of a part of it to the device, without experts."""
    changes: dict[str, Any] = {}
    for name in weights.__dataclass_fields__:
        value = getattr(weights, name)
        if isinstance(value, Tensor):
            changes[name] = value.to(device)
        elif isinstance(value, PlainLinear):
            changes[name] = _linear(value, device)
        elif name == "mlps":
            changes[name] = []
        elif is_dataclass(value):
            changes[name] = _placed(value, device)
    return replace(weights, **changes)


def _linear(linear: LinearLayer, device: torch.device) -> PlainLinear:
    return PlainLinear(_weight(linear).to(device))


def _weight(linear: LinearLayer) -> Tensor:
    assert isinstance(linear, PlainLinear), "weights for a device are loaded with PlainPacking"
    return linear.weight
