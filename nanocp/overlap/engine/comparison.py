"""Test inputs with distinct rows, and comparison of two results up to rounding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from nanocp.overlap.engine.batch import Cut

_TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 3e-2,
}
"""Largest rounding difference, as a share of a value and of `_scale`."""
_MOST_SAMPLED = 2**20


def altered(value: Tensor, cut: Cut, batch_size: int) -> Tensor:
    """A random batch of distinct rows, of values such as the tensor has.

    Zeros become zeros and ones: larger values may exceed an embedding table.
    """
    shape = list(value.shape)
    shape[cut.dim] = batch_size * cut.rows_each
    if value.is_floating_point() or value.is_complex():
        rows = torch.arange(shape[cut.dim], device=value.device) % value.shape[cut.dim]
        return value.index_select(cut.dim, rows) + torch.rand(shape).to(value)
    if value.dtype == torch.bool:
        return torch.rand(shape).to(value.device) < 0.5
    if value.min() < 0:
        return value.flatten()[torch.randint(value.numel(), shape).to(value.device)]
    return torch.randint(max(int(value.max()), 1) + 1, shape).to(value)


def difference(result: Any, expected: Any) -> str:
    """A sentence about the first output that differs by more than rounding; empty if none does."""
    pairs = zip(tree_leaves(result), tree_leaves(expected), strict=True)
    for place, (one, other) in enumerate(pairs):
        if not isinstance(other, Tensor):
            if one != other:
                return f"output {place} is {one}, not {other}"
            continue
        kinds = [f"{each.dtype} of shape {tuple(each.shape)}" for each in (one, other)]
        if kinds[0] != kinds[1]:
            return f"output {place} is {kinds[0]}, not {kinds[1]}"
        tolerance = _TOLERANCES.get(other.dtype)
        if torch.equal(one, other):
            continue
        if tolerance is None:
            return f"output {place} differs in {int((one != other).sum())} elements"
        at_most = tolerance * _scale(other)
        is_close = torch.isclose(one, other, rtol=tolerance, atol=at_most, equal_nan=True)
        if not is_close.all():
            first, whole = one[~is_close][0], other[~is_close][0]
            return f"output {place} differs: {first.item():.6g}, where {whole.item():.6g} is right"
    return ""


def _scale(values: Tensor) -> float:
    """The 90th percentile of distinct magnitudes, without large mask values."""
    sampled = values.abs().flatten()[:: 1 + values.numel() // _MOST_SAMPLED]
    distinct = torch.unique(sampled[sampled.isfinite()])
    return float(distinct[len(distinct) * 9 // 10]) if len(distinct) else 0.0
