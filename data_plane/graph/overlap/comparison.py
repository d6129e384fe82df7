"""Whether two results are equal but for rounding, element by element.

Enters: what two runs made. Leaves: a sentence about what differs. Does not know: what ran.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

_TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 3e-2,
}
"""Largest difference that is rounding, as a share of a value and of `_scale`; others are equal."""
_MOST_SAMPLED = 2**20


def difference(result: Any, expected: Any) -> str:
    """A sentence about the first output that differs by more than rounding; empty if none does."""
    pairs = zip(tree_leaves(result), tree_leaves(expected), strict=True)
    for place, (one, other) in enumerate(pairs):
        if not isinstance(other, torch.Tensor):
            if one != other:
                return f"output {place} is {one}, not {other}"
            continue
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return f"output {place} is {_described(one)}, not {_described(other)}"
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


def _scale(values: torch.Tensor) -> float:
    """A magnitude that one distinct value in ten exceeds: what is banned by a large one is one."""
    sampled = values.abs().flatten()[:: 1 + values.numel() // _MOST_SAMPLED]
    distinct = torch.unique(sampled[sampled.isfinite()])
    return float(distinct[len(distinct) * 9 // 10]) if len(distinct) else 0.0


def _described(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"
