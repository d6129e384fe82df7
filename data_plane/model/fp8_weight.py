"""A weight that stays in FP8, with a scale for each block, as checkpoints publish it.

Legend: N columns out, X columns in.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from data_plane.model.linear import LinearLayer

FP8 = torch.float8_e4m3fn


class Fp8Weight(NamedTuple):
    """An FP8 weight [N, X] and its scales; with leading dimensions, one for each expert."""

    values: Tensor
    """[..., N, X] e4m3."""
    scale: Tensor
    """[..., ceil(N / block rows), ceil(X / block columns)] fp32: factors of the blocks' values."""
    block: tuple[int, int]
    """Rows and columns that share a scale."""

    def dequantised(self) -> Tensor:
        """Multiply values with their scales: [..., N, X] fp32."""
        rows, columns = self.values.shape[-2:]
        scale = self.scale.repeat_interleave(self.block[0], -2)[..., :rows, :]
        return self.values.float() * scale.repeat_interleave(self.block[1], -1)[..., :columns]

    def to(self, device: torch.device) -> Fp8Weight:
        return self._replace(values=self.values.to(device), scale=self.scale.to(device))

    @staticmethod
    def stack(weights: list[Fp8Weight]) -> Fp8Weight:
        """Put weights of one shape and block side by side, [weights, N, X]."""
        values = torch.stack([weight.values for weight in weights])
        return Fp8Weight(
            values, torch.stack([weight.scale for weight in weights]), weights[0].block
        )


class Fp8Linear:
    """A linear layer over an FP8 weight, x [..., in] -> x W^T [..., out]: the slow reference."""

    __slots__ = ("weight",)

    def __init__(self, weight: Fp8Weight) -> None:
        self.weight = weight

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's shape, (out, in)."""
        return tuple(self.weight.values.shape)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.weight.dequantised()).to(x.dtype)


@runtime_checkable
class Fp8DenseGemm(Protocol):
    """A GEMM of rows with one FP8 weight as it is."""

    def dense(self, weight: Fp8Weight) -> LinearLayer | None:
        """Make a layer of a weight [N, X] on its device, or None for unsupported widths."""
