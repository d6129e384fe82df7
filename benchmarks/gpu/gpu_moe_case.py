"""Both forms of a mixture on one GPU, at DeepSeek-V3's layer or a small one, with drawn weights.

Enters: shapes. Leaves: `MoeCase`. Does not know: what is measured.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

import torch
from torch import Tensor

from benchmarks.gpu.gpu_shapes import deepseek_v3
from data_plane.model.config import ModelConfig
from data_plane.model.fp8_weight import Fp8Weight
from data_plane.model.linear import PlainLinear
from data_plane.model.weights import MlpWeights, MoeWeights
from data_plane.moe.fused.mixture import FusedMoe, FusedTiles, GateTiles, fused_weights
from data_plane.moe.fused.state import FusedRows, FusedWeights
from data_plane.moe.gpu.all_to_all_gpu import (
    GpuAllToAll,
    GpuAlone,
    GpuExpertExchange,
    GpuMixtures,
)
from data_plane.moe.gpu.gemm import TritonGemm
from data_plane.moe.gpu.gpu_weights import GpuWeights
from data_plane.moe.gpu.grouped import GroupedExperts
from data_plane.moe.mixture import SlotNames
from data_plane.step.probe import no_probe
from data_plane.transport.gpu.cuda_ipc import GpuExchange
from data_plane.transport.gpu.peer_memory import PeerMemory, RegionPlaces
from data_plane.transport.regions import mixture_layout
from harness.kernels.kernel_cases import in_fp8
from nanocp.values.experts import home_table


@dataclass(frozen=True)
class MoeShapes:
    """What is measured: DeepSeek-V3's layer, or a small one."""

    layer: ModelConfig
    """The model, whatever its number of experts."""
    local_experts: tuple[int, ...]
    instances: tuple[int, ...]
    rows: tuple[int, ...]
    max_rows: int
    """Bound of the fused form: one variant, which takes long to compile, serves all rows."""
    forms: tuple[str, ...]
    """bf16, fp32 or fp8: dtype of the weights; with fp8 rows are bf16, or fp32 if tiny."""
    replays: int
    tiles: FusedTiles | None
    timeout_ms: float

    def model(self, num_experts: int) -> ModelConfig:
        """The model with so many experts; a gate of few has no groups."""
        num_groups = 8 if num_experts >= 64 else 1
        return replace(
            self.layer,
            num_experts=num_experts,
            num_experts_per_token=min(self.layer.num_experts_per_token, num_experts),
            num_groups=num_groups,
            num_groups_per_token=-(-num_groups // 2),
        )


FULL = MoeShapes(
    replace(deepseek_v3(), fp8_block=(128, 128)), (8, 32), (1, 2, 4), (1, 8, 32, 128, 256),
    256, ("bf16", "fp8"), 1000, None, 1000.0,
)  # fmt: skip
TINY = MoeShapes(
    replace(
        deepseek_v3(), hidden_size=32, expert_size=16, num_experts_per_token=2, fp8_block=(16, 64)
    ),
    (2,), (1, 2), (2,), 4, ("fp32", "fp8"), 2,
    FusedTiles(4, 16, 16, 32, 1, 4, 1, GateTiles(4, 4, 16, 2)), 0.02,
)  # fmt: skip


class MoeCase:
    """Instances on this card, each with a layer's rows and weights, in both forms."""

    def __init__(
        self, shapes: MoeShapes, num_instances: int, num_here: int, num_rows: int, form: str
    ) -> None:
        self.shapes, self.num_rows, self.num_here = shapes, num_rows, num_here
        self.is_card = torch.cuda.is_available()
        self.device = torch.device("cuda", 0) if self.is_card else torch.device("cpu")
        is_wide = form == "fp32" or not self.is_card
        self.dtype = torch.float32 if is_wide else torch.bfloat16
        self.everyone = range(num_instances)
        home = home_table(num_instances * num_here, num_instances)
        self.model = model = shapes.model(num_instances * num_here)
        value, per_row = "float32" if is_wide else "uint16", model.num_experts_per_token
        sizes: dict[str, Any] = {
            "num_instances": num_instances, "num_here": num_here, "device": self.device,
        }  # fmt: skip
        # Epochs of the two forms differ, so each has memory of its own. The split path, whose time
        # grows with its bound, gets the least one.
        ends: list[list[GpuExchange]] = [[], []]
        for own, bound in zip(ends, (num_rows, shapes.max_rows), strict=True):
            layout = mixture_layout(bound, per_row, model.hidden_size, value)
            places = RegionPlaces(layout, num_instances)
            for memory in PeerMemory.create_all(places, self.device):
                own.append(GpuExchange(places, self.device, shapes.timeout_ms))
                own[-1].attach(memory)
        self.exchanges = [exchange for own in ends for exchange in own]
        gate = torch.randn(model.num_experts, model.hidden_size, device=self.device)
        self.gate = gate * model.hidden_size**-0.5
        self.split, self.fused, self.weights, self.experts = [], [], [], []
        for i, (exchange, other) in enumerate(zip(*ends, strict=True)):
            moe, fused_experts = self._weights(form)
            layers: Any = SimpleNamespace(layers=[SimpleNamespace(moe=moe)])
            names = SlotNames(home, layers.layers, model.num_experts, self.device)
            self.weights.append(fused_weights(moe, fused_experts, names, 0))
            self.fused.append(
                FusedMoe(
                    other, model, is_fp8=form == "fp8", tiles=shapes.tiles,
                    max_rows=shapes.max_rows, dtype=self.dtype, **sizes,
                )
            )  # fmt: skip
            programs = self.fused[-1].num_programs // num_instances
            self.fused[-1].num_programs = max(1, programs)
            all_to_all: GpuAllToAll = GpuAlone()
            if num_instances > 1:
                all_to_all = GpuExpertExchange(exchange, max_rows=num_rows, **sizes)
            split = GpuWeights(layers, (self.experts[i],))
            self.split.append(GpuMixtures(all_to_all, model, split, names, exchange))
        self.x = torch.randn(num_instances, num_rows, model.hidden_size, device=self.device)
        self.x = self.x.to(self.dtype)
        self.residual = torch.zeros_like(self.x)
        self.live = torch.ones(num_instances, num_rows, dtype=torch.bool, device=self.device)

    def _weights(self, form: str) -> tuple[MoeWeights, GroupedExperts]:
        """Draw a layer's weights: what both forms read, and the experts with the shared one."""
        model, num_here = self.model, self.num_here

        def weight(rows: int, columns: int) -> Tensor | Fp8Weight:
            drawn = torch.randn(num_here + 1, rows, columns, device=self.device) * columns**-0.5
            return in_fp8(drawn, model.fp8_block) if form == "fp8" else drawn.to(self.dtype)

        def part(weight: Tensor | Fp8Weight, which: slice | int) -> Tensor | Fp8Weight:
            if isinstance(weight, Tensor):
                return weight[which]
            return weight._replace(values=weight.values[which], scale=weight.scale[which])

        width = model.expert_size
        both = weight(2 * width, model.hidden_size), weight(model.hidden_size, width)
        routed = [part(each, slice(num_here)) for each in both]
        self.experts.append(GroupedExperts(TritonGemm(), *routed))
        plain = [
            each if isinstance(each, Tensor) else each.dequantised().to(self.dtype)
            for each in (part(each, num_here) for each in both)
        ]
        shared = MlpWeights(*map(PlainLinear, plain))
        bias = torch.zeros(model.num_experts, device=self.device)
        moe = MoeWeights(self.gate, bias, [], [], shared)
        return moe, GroupedExperts(TritonGemm(), *both)

    def _phases(self, mixture: GpuMixtures, i: int) -> Any:
        rows = self.residual[i], self.x[i], self.live[i]
        return mixture.phases(*rows, 0, self.x[i][0], no_probe)

    def run_split(self) -> list[Tensor]:
        """Run a layer of all instances by its parts, in turn."""
        found = in_turn([self._phases(mixture, i) for i, mixture in enumerate(self.split)])
        return [rows for rows, _ in found]

    def arguments(self, instance: int) -> tuple[FusedRows, FusedWeights]:
        """What a fused launch of an instance takes."""
        i = instance
        rows = self.fused[i].rows(self.residual[i], self.x[i], self.live[i])
        return rows, self.weights[i]

    def run_fused(self) -> list[Tensor]:
        """Run a layer of all instances as one launch each, in turns."""
        arguments = [self.arguments(i) for i in self.everyone]
        in_turn([self.fused[i].turns(*arguments[i]) for i in self.everyone])
        return [rows.out for rows, _ in arguments]

    def layer(self, instance: int) -> Callable[[], Any]:
        """Make what one instance does in a layer, to be captured: it waits for its peers."""
        return lambda: self.fused[instance].launch(*self.arguments(instance))

    def check(self) -> None:
        """Raise what ended a wait."""
        for exchange in self.exchanges:
            exchange.check()

    def expert_bytes(self) -> int:
        """Bytes of an expert's weights."""
        weights = self.weights[0]
        return weights.gate_up[0].nbytes + weights.down[0].nbytes


def in_turn(generators: Sequence[Generator[None, None, Any]]) -> list[Any]:
    """Run generators to their ends, each as far as it gets without the others: their values."""
    values: dict[int, Any] = {}
    while len(values) < len(generators):
        for number, each in enumerate(generators):
            if number not in values:
                try:
                    next(each)
                except StopIteration as ended:
                    values[number] = ended.value
    return [values[number] for number in range(len(generators))]
