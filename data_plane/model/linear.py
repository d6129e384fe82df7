"""Linear layers and the layout of their weights: packed for this CPU's GEMM, or plain.

A decode step takes as long as reading the weights, which packed ones allow 1.4 to 2.2 times as fast
at 4 to 16 rows (docs/log.md).
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

_PACKED_FOR_ROWS = 16
"""The layout's batch; it is as good from 1 to 512."""


class LinearLayer(Protocol):
    """A linear layer, x [..., in] -> x W^T [..., out]."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's shape, (out, in)."""

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply rows [..., in] with the weight: [..., out]."""


class Packing(Protocol):
    """A layout of weights for one kind of kernels, which alone can read it."""

    @property
    def keeps_fp8(self) -> bool:
        """True if FP8 layers become Fp8Linear, without `linear`."""

    @property
    def keeps_bf16(self) -> bool:
        """True if matrices but gates', stored in bf16, stay so where rows are fp32."""

    @property
    def keeps_heads(self) -> bool:
        """True if `head_weight` gives [H, in, out], readable for torch."""

    def linear(self, weight: Tensor) -> LinearLayer:
        """Lay out the weight [out, in] of a linear layer."""

    def head_weight(self, weight_HKN: Tensor) -> Tensor:
        """Lay out a weight with a part for every head, [H, in, out]."""

    def gate_weight(self, weight_EX: Tensor) -> Tensor:
        """Lay out the weight of a gate, [experts, hidden] fp32."""


class Linear:
    """A linear layer on the CPU, x [..., in] -> x W^T [..., out], packed if possible."""

    __slots__ = ("_is_packed", "_weight", "shape")

    def __init__(self, weight: Tensor) -> None:
        """Pack a weight [out, in], fp32 or bf16, if this CPU has a layout."""
        self.shape = tuple(weight.shape)
        self._is_packed = _can_pack(weight.dtype)
        self._weight = weight.contiguous()
        if self._is_packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(self._weight, _PACKED_FOR_ROWS)

    def __call__(self, x: Tensor) -> Tensor:
        if self._is_packed:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, None, "none", [], "")
            return out
        return F.linear(x, self._weight)


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class PlainLinear:
    """A linear layer on any device, x [..., in] -> x W^T [..., out], not packed."""

    __slots__ = ("weight",)

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's shape, (out, in)."""
        return tuple(self.weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class TorchPacking(Packing):
    """The Packing for torch's operators on the CPU: it packs linear layers only."""

    keeps_fp8 = False
    keeps_bf16 = False
    keeps_heads = True

    def linear(self, weight: Tensor) -> LinearLayer:
        return Linear(weight)

    def head_weight(self, weight_HKN: Tensor) -> Tensor:
        return weight_HKN.contiguous()

    def gate_weight(self, weight_EX: Tensor) -> Tensor:
        return weight_EX


class PlainPacking(TorchPacking):
    """The Packing for weights on a GPU: nothing is laid out."""

    def __init__(self, keeps_fp8: bool = False) -> None:
        self.keeps_fp8 = keeps_fp8

    def linear(self, weight: Tensor) -> LinearLayer:
        return PlainLinear(weight)
