"""A weight that stays in FP8, with a scale for each block, as checkpoints publish it.

Enters: values and scales. Leaves: both, or the weight that they stand for. Does not know:
checkpoints, who multiplies.

Legend: N columns out, X columns in.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

FP8 = torch.float8_e4m3fn


class Fp8Weight(NamedTuple):
    """One weight, or one for each expert in front of its dimensions."""

    values: Tensor
    """[..., N, X] e4m3."""
    scale: Tensor
    """[..., ceil(N / block rows), ceil(X / block columns)] fp32: what a block's values are
    multiplied with."""
    block: tuple[int, int]
    """Rows and columns that share a scale."""

    def dequantised(self) -> Tensor:
        """[..., N, X] fp32."""
        rows, columns = self.values.shape[-2:]
        scale = self.scale.repeat_interleave(self.block[0], -2)[..., :rows, :]
        return self.values.float() * scale.repeat_interleave(self.block[1], -1)[..., :columns]

    def to(self, device: torch.device) -> Fp8Weight:
        """There."""
        return self._replace(values=self.values.to(device), scale=self.scale.to(device))

    @staticmethod
    def stack(weights: list[Fp8Weight]) -> Fp8Weight:
        """Of weights of one shape and block."""
        values = torch.stack([weight.values for weight in weights])
        return Fp8Weight(
            values, torch.stack([weight.scale for weight in weights]), weights[0].block
        )


class Fp8Linear:
    """x [..., in] -> x W^T [..., out], slowly: a reference. Who keeps a weight in FP8 has a kernel
    that reads it."""

    __slots__ = ("weight",)

    def __init__(self, weight: Fp8Weight) -> None:
        self.weight = weight

    @property
    def shape(self) -> tuple[int, ...]:
        """(out, in)."""
        return tuple(self.weight.values.shape)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.weight.dequantised()).to(x.dtype)
