"""The gate, the experts and the rows on their way to them in compiled code.

The slow references, with legends: the functions of the same name in moe/gate.py, moe/experts.py,
moe/rows.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from data_plane.model.config import ModelConfig
from data_plane.model.weights import MoeWeights
from data_plane.moe.rows import Region
from data_plane.native.calls import LONG, POINTER
from data_plane.native.packing import packed_address

_NOWHERE = (None,) * 7


def region_places(region: Region) -> list[int | None]:
    """Return the addresses of a region's count, numbers, weights and hidden rows (rows.h)."""
    places = [region["count"].data_ptr() if "count" in region else None]
    for rows in map(region.get, ("number", "weight", "hidden")):
        places += (None, None) if rows is None else (rows.data_ptr(), rows.stride(0))
    return places


class _Experts(NamedTuple):
    gate_up: Any
    down: Any
    inner: int
    """The width between the two weights."""


class NativeExpertKernels:
    """Runs experts and moves their rows; an all_to_all_cpu.ExpertKernels."""

    def __init__(self, calls: SimpleNamespace) -> None:
        self._calls = calls
        # Addresses that are the same in every step, by the id of the object that has them. The
        # object is kept too, so that no other can get its id.
        self._experts: dict[int, tuple[MoeWeights, _Experts]] = {}
        self._known_regions: dict[int, tuple[Region, list[int | None]]] = {}

    def gate(self, x_BX: Tensor, moe: MoeWeights, config: ModelConfig) -> tuple[Tensor, Tensor]:
        """Return the experts [B, K] of each row and their weights [B, K]."""
        x_BX = x_BX.contiguous()
        rows, size = x_BX.shape
        expert_BK = torch.empty(rows, config.num_experts_per_token, dtype=torch.int64)
        weight_BK = torch.empty(rows, config.num_experts_per_token)
        bias = None if moe.gate_bias is None else moe.gate_bias.data_ptr()
        sizes = rows, size, config.num_experts, config.num_groups, config.num_groups_per_token
        rules = config.softmax_gate, config.weights_normalised, config.routed_scale
        self._calls.gate(
            *(x_BX.data_ptr(), moe.gate.data_ptr(), bias, *sizes, config.num_experts_per_token),
            *(*rules, expert_BK.data_ptr(), weight_BK.data_ptr()),
        )
        return expert_BK, weight_BK

    def visit_experts(
        self,
        x_BX: Tensor,
        number_BK: Tensor,
        weight_BK: Tensor,
        own: Tensor,
        peers: Sequence[tuple[Region, Region]],
        moe: MoeWeights,
        first: int = 0,
        load_S: Tensor | None = None,
    ) -> tuple[Tensor, list[int]]:
        """Run the experts on own and arrived rows, read and written in place."""
        own, x_BX = own.contiguous(), x_BX.contiguous()
        number_BK, weight_BK = number_BK.contiguous(), weight_BK.contiguous()
        num_own, size, counts = own.shape[0], x_BX.shape[1], (LONG * len(peers))()
        own_sum = x_BX.new_empty(num_own, size)
        experts = self.addresses_of_experts(moe)
        rows = x_BX.data_ptr(), number_BK.data_ptr(), weight_BK.data_ptr(), own.data_ptr(), num_own
        arrived, answers = (self._regions([peer[side] for peer in peers]) for side in (0, 1))
        sizes = len(experts.gate_up), size, experts.inner, moe.limit
        here = experts.gate_up, experts.down, first, *sizes
        load = None if load_S is None else load_S.data_ptr()
        self._calls.visit_experts(
            *(*rows, number_BK.shape[1], len(peers), arrived, answers),
            *(*here, load, own_sum.data_ptr(), counts),
        )
        return own_sum, list(counts)

    def addresses_of_experts(self, moe: MoeWeights) -> _Experts:
        """Return the addresses of a layer's experts, looked up once."""
        known = self._experts.get(id(moe))
        if known is None:
            # A thread that loads experts may append some meanwhile.
            mlps = [*moe.mlps]
            array = POINTER * len(mlps)
            experts = _Experts(
                gate_up=array(*(packed_address(mlp.gate_up) for mlp in mlps)),
                down=array(*(packed_address(mlp.down) for mlp in mlps)),
                inner=mlps[0].down.shape[1] if mlps else 0,
            )
            known = self._experts[id(moe)] = moe, experts
        return known[1]

    def experts_changed(self) -> None:
        """Forget the experts' addresses."""
        self._experts.clear()

    def forget_experts(self, moe: MoeWeights) -> None:
        """Forget this layer's experts: they are given up."""
        self._experts.pop(id(moe), None)

    def name_slots(self, expert_BK: Tensor, live_B: Tensor, number_ER: Tensor, seat: int) -> Tensor:
        """Name slots in place."""
        expert_BK, live_B = expert_BK.contiguous(), live_B.contiguous()
        tables = expert_BK.data_ptr(), live_B.data_ptr(), number_ER.data_ptr()
        self._calls.name_slots(*tables, *expert_BK.shape, seat)
        return expert_BK

    def pack_rows(
        self,
        x_BX: Tensor,
        number_BK: Tensor,
        weight_BK: Tensor,
        num_slots: int,
        regions: Sequence[Region | None],
    ) -> tuple[Tensor, list[int]]:
        """Write rows into the regions of their slots' instances."""
        x_BX, number_BK = x_BX.contiguous(), number_BK.contiguous()
        weight_BK, num_regions = weight_BK.contiguous(), len(regions)
        rows, size = x_BX.shape
        rows_NB, counts = torch.empty(num_regions, rows, dtype=torch.int64), (LONG * num_regions)()
        sizes = rows, number_BK.shape[1], size, num_slots, num_regions
        self._calls.pack_rows(
            *(x_BX.data_ptr(), number_BK.data_ptr(), weight_BK.data_ptr(), *sizes),
            *(self._regions(regions), rows_NB.data_ptr(), counts),
        )
        return rows_NB, list(counts)

    def combine_sums(
        self,
        x_BX: Tensor,
        shared_BX: Tensor | None,
        own_sum: Tensor,
        rows_NB: Tensor,
        counts: Sequence[int],
        regions: Sequence[Region | None],
    ) -> Tensor:
        """Add the experts' sums to each row; bf16 is rounded once."""
        (num_regions, rows), size = rows_NB.shape, own_sum.shape[1]
        x_BX = x_BX.contiguous()
        out_BX = torch.empty_like(x_BX)
        shared = None if shared_BX is None else shared_BX.data_ptr()
        self._calls.combine_sums(
            *(x_BX.data_ptr(), shared, own_sum.data_ptr(), self._regions(regions)),
            *(rows_NB.data_ptr(), (LONG * num_regions)(*counts)),
            *(num_regions, rows, size, out_BX.data_ptr()),
        )
        return out_BX

    def _regions(self, regions: Sequence[Region | None]) -> Any:
        places: list[int | None] = []
        for region in regions:
            known = self._known_regions.get(id(region))
            if known is None and region is not None:
                known = self._known_regions[id(region)] = region, region_places(region)
            places += _NOWHERE if known is None else known[1]
        return (POINTER * len(places))(*places)
