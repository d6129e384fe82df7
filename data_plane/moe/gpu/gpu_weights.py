"""Weights of one instance on its GPU: those of model/layers.py, and experts as grouped GEMMs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from data_plane.model.fp8_weight import Fp8DenseGemm, Fp8Linear, Fp8Weight
from data_plane.model.linear import LinearLayer, PlainLinear
from data_plane.model.weights import LayerWeights, MlpWeights, ModelWeights, MoeWeights
from data_plane.moe.gpu.grouped import GroupedExperts, GroupedGemm

Weight = Tensor | Fp8Weight


@dataclass(frozen=True, slots=True)
class GpuWeights:
    """A decoder on a GPU, with the experts of one instance."""

    weights: ModelWeights
    """All but the experts: `mlps` of every MoE layer is empty."""
    experts: tuple[GroupedExperts | None, ...]
    """None for a dense layer; in a fused MoE layer shared ones follow."""

    @property
    def has_fp8_experts(self) -> bool:
        """True if the experts' weights are in FP8."""
        return any(isinstance(experts.down, Fp8Weight) for experts in self.experts if experts)

    def put_expert(self, layer: int, slot: int, mlp: MlpWeights) -> None:
        """Write an expert into a slot of a layer, where captured steps read it."""
        experts = self.experts[layer]
        assert experts is not None, f"layer {layer} has no experts"
        experts.put(slot, _weight(mlp.gate_up), _weight(mlp.down))


def place_weights(
    weights: ModelWeights,
    device: torch.device,
    gemm: GroupedGemm,
    max_len: int,
    is_fused: bool = False,
    num_slots: int = 0,
    is_alone: bool = False,
) -> GpuWeights:
    """Copy weights to the device, layer by layer, and extend the rope table to max_len.

    is_fused: shared experts follow the experts, in slots of their own. num_slots: least slots of a
    layer. is_alone: shared ones follow if they can. Raises ValueError if they must and cannot.
    """
    weights.rope.place(device, max_len)
    linear = partial(_linear, gemm, device, weights.embedding.dtype)
    layers: list[LayerWeights] = []
    experts: list[GroupedExperts | None] = []
    for layer in weights.layers:
        if layer.moe is None:
            experts.append(None)
        else:
            joins = is_fused or (is_alone and _can_join(layer.moe, gemm))
            experts.append(_experts(layer.moe, device, gemm, joins, num_slots))
            shared = None if joins else layer.moe.shared
            layer = replace(layer, moe=replace(layer.moe, shared=shared))
        layers.append(_placed(layer, device, linear))
    placed = ModelWeights(
        weights.embedding.to(device),
        tuple(layers),
        weights.final_norm.to(device),
        linear(weights.lm_head),
        weights.rope,
        weights.mtp and _placed(weights.mtp, device, linear),
    )
    return GpuWeights(placed, tuple(experts))


def _experts(
    moe: MoeWeights, device: torch.device, gemm: GroupedGemm, joins: bool, num_slots: int
) -> GroupedExperts:
    # A slot that no expert of the table is in has any weights.
    mlps = moe.mlps + moe.mlps[-1:] * (num_slots - len(moe.mlps))
    gate_up = [_weight(mlp.gate_up) for mlp in mlps]
    down = [_weight(mlp.down) for mlp in mlps]
    num_here = len(mlps)
    if joins and moe.shared is not None:
        shared = shared_slots(moe.shared, moe.mlps[0].down.shape[1])
        gate_up, down = gate_up + shared[0], down + shared[1]
    weights = _stacked(gate_up).to(device), _stacked(down).to(device)
    return GroupedExperts(gemm, *weights, len(down) - num_here)


def _can_join(moe: MoeWeights, gemm: GroupedGemm) -> bool:
    if moe.shared is None or moe.shared_gate is not None or not moe.mlps:
        return False
    first, width = moe.mlps[0], moe.mlps[0].down.shape[1]
    kinds = {
        isinstance(_weight(weight), Tensor)
        for mlp in (*moe.mlps, moe.shared)
        for weight in (mlp.gate_up, mlp.down)
    }
    down, size = _weight(first.down), moe.shared.down.shape[1]
    is_cut = size != width and isinstance(down, Fp8Weight) and width % max(down.block)
    is_rounded = isinstance(gemm, Fp8DenseGemm) and True in kinds
    return len(kinds) == 1 and size % width == 0 and not is_cut and not is_rounded


def shared_slots(shared: MlpWeights, width: int) -> tuple[list[Weight], list[Weight]]:
    """Cut the MLP of all shared experts into one of this width for each: (gate_up, down).

    Raises ValueError if a block of an FP8 weight would be cut.
    """
    gate_up, down = _weight(shared.gate_up), _weight(shared.down)
    num_shared = shared.down.shape[1] // width
    if num_shared == 1:
        return [gate_up], [down]
    return (
        [
            _joined(_cut(gate_up, 0, v * width, width), _cut(gate_up, 0, up * width, width))
            for v, up in zip(range(num_shared), range(num_shared, 2 * num_shared), strict=True)
        ],
        [_cut(down, 1, v * width, width) for v in range(num_shared)],
    )


def _cut(weight: Weight, dim: int, begin: int, size: int) -> Weight:
    if isinstance(weight, Tensor):
        return weight.narrow(dim, begin, size)
    block = weight.block[dim]
    if size % block:
        raise ValueError(
            f"dispatch_backend is fused: a shared expert is {size} wide, and blocks of its FP8 "
            f"weight are {block}; exchange works everywhere"
        )
    scale = weight.scale.narrow(dim, begin // block, size // block)
    return weight._replace(values=weight.values.narrow(dim, begin, size), scale=scale)


def _joined(first: Weight, second: Weight) -> Weight:
    if isinstance(first, Fp8Weight) and isinstance(second, Fp8Weight):
        values = torch.cat([first.values, second.values])
        return first._replace(values=values, scale=torch.cat([first.scale, second.scale]))
    assert isinstance(first, Tensor) and isinstance(second, Tensor)
    return torch.cat([first, second])


def _stacked(weights: list[Weight]) -> Weight:
    fp8 = [weight for weight in weights if isinstance(weight, Fp8Weight)]
    plain = [weight for weight in weights if isinstance(weight, Tensor)]
    if fp8 and plain:
        raise ValueError(
            "dispatch_backend is fused: the checkpoint has some experts in FP8 and others, or the "
            "shared ones, not; exchange works everywhere"
        )
    return Fp8Weight.stack(fp8) if fp8 else torch.stack(plain)


def _placed(
    weights: Any, device: torch.device, linear: Callable[[LinearLayer], LinearLayer]
) -> Any:
    changes: dict[str, Any] = {}
    for name in weights.__dataclass_fields__:
        value = getattr(weights, name)
        if isinstance(value, Tensor):
            changes[name] = value.to(device)
        elif isinstance(value, PlainLinear | Fp8Linear):
            changes[name] = linear(value)
        elif name == "mlps":
            changes[name] = []
        elif is_dataclass(value):
            changes[name] = _placed(value, device, linear)
    return replace(weights, **changes)


def _linear(
    gemm: GroupedGemm, device: torch.device, dtype: torch.dtype, linear: LinearLayer
) -> LinearLayer:
    """Copy a layer; FP8 is de-quantised unless the experts' GEMM takes dense layers too."""
    weight = _weight(linear)
    if isinstance(weight, Fp8Weight):
        if isinstance(gemm, Fp8DenseGemm) and (dense := gemm.dense(weight.to(device))):
            return dense
        weight = weight.dequantised().to(dtype)
    return PlainLinear(weight.to(device))


def _weight(linear: LinearLayer) -> Weight:
    assert isinstance(linear, PlainLinear | Fp8Linear), "load weights for a device by PlainPacking"
    return linear.weight
