"""A linear layer whose weight is laid out once for this CPU's GEMM.

Enters: a weight as a checkpoint stores it. Leaves: a function of rows. Does not know: layers,
checkpoints.

Decode multiplies a few rows with every weight of the model, so a step's time is the time to read
them. The packed layout reads them 1.4 to 2.2 times as fast as the plain one does at 4 to 16 rows,
fp32 and bf16 alike (docs/log.md).
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

_PACKED_FOR_ROWS = 16
"""The batch that the layout is chosen for; it is as good from 1 to 512."""


class LinearLayer(Protocol):
    """x [..., in] -> x W^T [..., out]."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(out, in)."""

    def __call__(self, x: Tensor) -> Tensor:
        """Of rows."""


class Packing(Protocol):
    """How weights are laid out for whatever multiplies with them. Nothing else can read what it
    returns."""

    @property
    def keeps_fp8_experts(self) -> bool:
        """Whether experts that a checkpoint has in FP8 stay so (Fp8Linear), instead of passing
        through `linear`."""

    def linear(self, weight: Tensor) -> LinearLayer:
        """Of a weight [out, in]."""

    def head_weight(self, weight_HKN: Tensor) -> Tensor:
        """Of a weight for every head, [H, in, out]."""

    def gate_weight(self, weight_EX: Tensor) -> Tensor:
        """Of a gate, [experts, hidden] fp32."""


class Linear:
    """x [..., in] -> x W^T [..., out]."""

    __slots__ = ("_is_packed", "_weight", "shape")

    def __init__(self, weight: Tensor) -> None:
        """weight: [out, in], fp32 or bf16. It is copied where this CPU has a packed layout for its
        dtype, else kept."""
        self.shape = tuple(weight.shape)
        """(out, in)."""
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
    """As Linear, of a weight that stays as it is, wherever it is."""

    __slots__ = ("weight",)

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    @property
    def shape(self) -> tuple[int, ...]:
        """(out, in)."""
        return tuple(self.weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class PlainPacking:
    """Nothing is laid out: for weights that go to a GPU."""

    def __init__(self, keeps_fp8_experts: bool = False) -> None:
        self.keeps_fp8_experts = keeps_fp8_experts
        """See Packing."""

    def linear(self, weight: Tensor) -> LinearLayer:
        """See Packing."""
        return PlainLinear(weight)

    def head_weight(self, weight_HKN: Tensor) -> Tensor:
        """See Packing."""
        return weight_HKN.contiguous()

    def gate_weight(self, weight_EX: Tensor) -> Tensor:
        """See Packing."""
        return weight_EX


class TorchPacking:
    """What torch's operators take: heads and gates stay as they are."""

    keeps_fp8_experts = False

    def linear(self, weight: Tensor) -> LinearLayer:
        """See Packing."""
        return Linear(weight)

    def head_weight(self, weight_HKN: Tensor) -> Tensor:
        """See Packing."""
        return weight_HKN.contiguous()

    def gate_weight(self, weight_EX: Tensor) -> Tensor:
        """See Packing."""
        return weight_EX
