"""The experts of one instance on a GPU: grouped GEMMs over rows laid out by expert.

The layout is [E, S, X] and a count for each expert, also of DeepEP and DeepGEMM; slots after a
count are neither read nor written. The CPU's sibling is experts.py.

Legend: T rows, X hidden, K experts a row, E experts here, S slots of an expert, I expert width, N
columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from data_plane.model.fp8_weight import Fp8Weight

if TYPE_CHECKING:  # Triton is there on GPUs only
    from data_plane.moe.gpu.pairs import Pairs


class GroupedGemm(Protocol):
    """One weight for each expert, applied to that expert's rows."""

    def prepare(self, weight_ENX: Tensor) -> Any:
        """Lay the weights out for `run`; called once."""

    def run(self, x_ESX: Tensor, prepared: Any, count_E: Tensor) -> Tensor:
        """Multiply: x W^T [E, S, N], in the dtype of x.

        count_E: [E] int32 on the device; only the first count_E[e] rows of expert e are defined.
        """


@runtime_checkable
class Fp8GroupedGemm(GroupedGemm, Protocol):
    """A grouped GEMM that also takes weights in FP8, as checkpoints publish them."""

    def fp8_obstacle(self, block: tuple[int, int]) -> str:
        """Return the obstacle of blocks of (rows, columns), or an empty string."""

    def prepare_fp8(self, weight: Fp8Weight) -> Any:
        """Lay FP8 weights [E, N, X] out for `run`; nothing is de-quantised."""


@runtime_checkable
class PairsGemm(Fp8GroupedGemm, Protocol):
    """A grouped GEMM that also runs whole MLPs on pairs, read where their rows are."""

    def run_pairs(self, pairs: Pairs, gate_up: Any, down: Any) -> Tensor:
        """Run every expert on its rows: [E * S, X] by slot, not weighted, in the dtype of x."""


class GroupedExperts:
    """The experts of one instance in one layer, as grouped GEMMs."""

    def __init__(
        self,
        gemm: GroupedGemm,
        gate_up_ENX: Tensor | Fp8Weight,
        down_EXI: Tensor | Fp8Weight,
        num_shared: int = 0,
    ) -> None:
        """FP8 weights need a gemm that takes them.

        gate_up_ENX: [E, 2I, X]. down_EXI: [E, X, I]. num_shared: shared experts behind those.
        """
        self._gemm, self.num_shared = gemm, num_shared
        self.num_here = _num_experts(gate_up_ENX) - num_shared
        self.gate_up, self.down = _prepared(gemm, gate_up_ENX), _prepared(gemm, down_EXI)

    def put(self, slot: int, gate_up_NX: Tensor | Fp8Weight, down_XI: Tensor | Fp8Weight) -> None:
        """Write another expert's weights into a slot; no slot moves in memory."""
        for held, weight in ((self.gate_up, gate_up_NX), (self.down, down_XI)):
            one = weight[None] if isinstance(weight, Tensor) else Fp8Weight.stack([weight])
            one = _prepared(self._gemm, one)
            for target, source in zip(_tensors(held), _tensors(one), strict=True):
                target[slot].copy_(source[0])

    def run_pairs(self, pairs: Pairs) -> Tensor:
        """Run every expert, shared ones too: [E * S, X] by slot, not weighted."""
        if isinstance(self._gemm, PairsGemm):
            return self._gemm.run_pairs(pairs, self.gate_up, self.down)
        from data_plane.moe.gpu.pairs import lay_out

        x_ESX, _ = lay_out(pairs.x, pairs.count_E, pairs.row_ES.shape[1], pairs)
        return self.run_grouped(x_ESX, pairs.count_E).flatten(0, 1)

    def run_grouped(self, x_ESX: Tensor, count_E: Tensor) -> Tensor:
        """Run every expert on its own rows: [E, S, X], not weighted."""
        assert len(count_E) == self.num_here + self.num_shared, "an expert without a count"
        gate_ESI, up_ESI = self._gemm.run(x_ESX, self.gate_up, count_E).chunk(2, dim=-1)
        return self._gemm.run(F.silu(gate_ESI) * up_ESI, self.down, count_E)


def _num_experts(weight: Tensor | Fp8Weight) -> int:
    return len(weight if isinstance(weight, Tensor) else weight.values)


def _tensors(prepared: Any) -> list[Tensor]:
    parts = [prepared] if isinstance(prepared, Tensor) else prepared
    return [part for part in parts if isinstance(part, Tensor)]


def _prepared(gemm: GroupedGemm, weight: Tensor | Fp8Weight) -> Any:
    if isinstance(weight, Tensor):
        return gemm.prepare(weight)
    assert isinstance(gemm, Fp8GroupedGemm), "moe.backend.fp8_experts was not asked"
    return gemm.prepare_fp8(weight)


class GroupedMm(GroupedGemm):
    """Grouped GEMM by torch's grouped_mm, which needs rows moved together and back."""

    def prepare(self, weight_ENX: Tensor) -> Tensor:
        return weight_ENX.contiguous().transpose(1, 2)

    def run(self, x_ESX: Tensor, prepared: Tensor, count_E: Tensor) -> Tensor:
        num_experts, num_slots, _ = x_ESX.shape
        is_row = torch.arange(num_slots, device=x_ESX.device) < count_E[:, None]
        order = is_row.flatten().logical_not().to(torch.int8).argsort(stable=True)
        y = F.grouped_mm(
            x_ESX.flatten(0, 1)[order], prepared, offs=count_E.cumsum(0, dtype=torch.int32)
        )
        y_ESN: Tensor = (
            torch.empty_like(y).index_copy_(0, order, y).view(num_experts, num_slots, y.shape[1])
        )
        return y_ESN
