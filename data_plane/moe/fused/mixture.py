"""A MoE layer as one launch on a GPU: the memory of an instance, launches, turns.

The slow reference is all_to_all_gpu.py. Legend: B rows, X hidden.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from data_plane.graph.lane_parts import EXPERTS, LanePart
from data_plane.kernels.norm import add_norm
from data_plane.model.config import ModelConfig
from data_plane.model.weights import MoeWeights
from data_plane.moe.fused.kernel import fused_kernel
from data_plane.moe.fused.state import (
    NUM_QUEUES,
    NUM_WORDS,
    WORD,
    FusedRows,
    FusedShape,
    FusedState,
    FusedWeights,
)
from data_plane.moe.gpu.gpu_weights import GpuWeights
from data_plane.moe.gpu.grouped import GroupedExperts
from data_plane.moe.mixture import MoeProbe, NormedMixture, SlotNames
from data_plane.transport.exchange import Channel
from data_plane.transport.gpu.cuda_ipc import GpuExchange
from nanocp.values.experts import ExpertTable

_UNLIMITED = 2**31 - 1
_RESERVED_SMS = 2
"""A resident grid on all SMs has hung beside a second stream elsewhere."""
_TURNS = 3
"""Dispatch, experts, combine."""
_TURN_NS = 20_000
"""A program's search for a task in a turn: another may publish it."""


class GateTiles(NamedTuple):
    """The cut of the gate's product."""

    rows: int
    columns: int
    depth: int
    parts: int
    """Pieces of the depth, each a task."""


class FusedTiles(NamedTuple):
    """The cut of a layer's work, and a program's resources."""

    rows: int
    columns: int
    depth: int
    copied: int
    parts: int
    """Most tasks of one target's rows, or one source's."""
    num_warps: int
    num_stages: int
    gate: GateTiles = GateTiles(32, 32, 16, 8)

    def shared_bytes(self, itemsize: int) -> int:
        return self.num_stages * self.depth * (self.rows + 2 * self.columns) * itemsize


TILES_16_BIT = FusedTiles(64, 64, 64, 1024, 8, 4, 4)
TILES_FP8 = FusedTiles(64, 64, 64, 1024, 8, 8, 4)
"""More warps: registers hold both products and their scaled sums."""
TILES_FP32 = FusedTiles(64, 64, 32, 1024, 8, 4, 2)


def tiles_for(dtype: torch.dtype, is_fp8: bool) -> FusedTiles:
    """Choose the tiles by dtype and kind of weights."""
    if dtype == torch.float32:
        return TILES_FP32
    return TILES_FP8 if is_fp8 else TILES_16_BIT


def fused_obstacle(properties: Any, dtype: torch.dtype, expert_backend: str, num_nodes: int) -> str:
    """Return why a fused MoE layer cannot run; empty if it can."""
    if num_nodes > 1:
        return f"its kernel writes to the GPUs of one node, and the cluster has {num_nodes}"
    if expert_backend not in ("auto", "triton"):
        return f"it brings its own GEMM, and expert_backend is {expert_backend}"
    if properties.major < 8:
        return (
            "it needs a cooperative launch and ordered atomics, compute capability 8.0 or later; "
            f"this GPU has {properties.major}.{properties.minor}"
        )
    tiles = tiles_for(dtype, is_fp8=False)
    need, limit = tiles.shared_bytes(dtype.itemsize), properties.shared_memory_per_block_optin
    if need > limit:
        return f"a program needs {need} bytes of shared memory, and this GPU gives it {limit}"
    return ""


class FusedMoe:
    """One instance's end of a fused MoE layer; all layers share it."""

    def __init__(
        self,
        exchange: GpuExchange,
        model: ModelConfig,
        *,
        num_instances: int,
        num_here: int,
        max_rows: int,
        dtype: torch.dtype,
        device: torch.device,
        is_fp8: bool = False,
        tiles: FusedTiles | None = None,
        num_programs: int | None = None,
    ) -> None:
        """num_here: slots in a layer, without shared experts.

        Like max_rows, it is the same on every instance. is_fp8: of experts. num_programs: of a
        launch, by default as many as fit the GPU.
        """
        self._exchange, self._device = exchange, device
        is_card = device.type != "cpu"
        self.tiles = tiles or tiles_for(dtype, is_fp8)
        self.num_programs = num_programs or (_resident_programs(device) if is_card else 1)
        block = model.fp8_block if is_fp8 else None
        self.shape = shape = _shape(
            exchange, self.tiles, model, num_instances, num_here, max_rows, block or (0, 0), is_card
        )

        def ints(*sizes: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*sizes, dtype=dtype, device=device)

        def rows(*sizes: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(*sizes, dtype=dtype, device=device)

        self.epoch = ints(1, dtype=torch.int64)
        """[1] int64: complete epochs."""
        self.statistic = ints(6, dtype=torch.int64)
        """[6] int64: FusedState.statistic since the start."""
        self.counter = ints(shape.num_counters)
        """[num_counters] int32: the state of the epoch, zero between epochs."""
        num_shared = shape.num_shared
        num_products = shape.num_pairs + num_shared * max_rows
        pair = torch.zeros(num_here + num_shared, num_instances * max_rows, dtype=torch.int32)
        own = torch.arange(num_shared * max_rows, dtype=torch.int32).view(num_shared, max_rows)
        pair[num_here:, :max_rows] = own + shape.num_pairs
        self._tables = {
            "score": rows(shape.gate_parts, max_rows, model.num_experts, dtype=torch.float32),
            "chosen": ints(max_rows, shape.per_row, dtype=torch.int64),
            "weight": rows(max_rows, shape.per_row, dtype=torch.float32),
            "count": ints(num_instances),
            "row": ints(num_instances, max_rows),
            "slot": ints(num_instances, max_rows),
            "size": ints(NUM_QUEUES.value, shape.max_items),
            "group": ints(shape.max_items + num_shared, 4),
            "block": ints(shape.max_items + num_shared * shape.shared_blocks, 3),
            "pair": pair.to(device),
            "inner": rows(num_products, model.expert_size),
            "product": rows(num_products, model.hidden_size),
        }

    def begin_term(self) -> None:
        """Begin at epoch 1 again, as the exchange does; no launch may run."""
        self.epoch.zero_()
        self.counter.zero_()

    def rows(self, x_BX: Tensor, normed_BX: Tensor, live_B: Tensor) -> FusedRows:
        """Return a layer's rows in the kernel's form, with new results.

        The MoE layer of normed_BX is added to x_BX. live_B: bool.
        """
        assert x_BX.is_contiguous() and normed_BX.is_contiguous()
        return FusedRows(normed_BX, x_BX, live_B.view(torch.uint8), torch.empty_like(x_BX))

    def launch(
        self,
        rows: FusedRows,
        weights: FusedWeights,
        *,
        max_tasks: int = _UNLIMITED,
        max_idle: int | None = None,
        is_last: bool = True,
        num_programs: int | None = None,
        grid: int | None = None,
    ) -> None:
        """Launch the kernel, which ends with the epoch, or before it (fused_kernel.fused_kernel).

        max_tasks: of each program. max_idle: None for the exchange's limit. is_last: a missing peer
        is an error. num_programs: programs that must leave to end the epoch; grid: those of this
        call.
        """
        exchange, programs = self._exchange, num_programs or self.num_programs
        if max_idle is None:
            max_idle = exchange.timeout_ns if self.shape.is_card else exchange.max_polls
        fused_kernel[(grid or programs,)](
            self.state(), rows, weights, exchange.memory.instance, len(rows.x), programs,
            max_tasks, max_idle, int(is_last), S=self.shape, num_warps=self.tiles.num_warps,
            num_stages=self.tiles.num_stages, launch_cooperative_grid=True,
        )  # fmt: skip

    def state(self) -> FusedState:
        """Return this instance's memory in the kernel's form."""
        peer, error = self._exchange.table, self._exchange.error
        return FusedState(
            peer=peer, error=error, epoch=self.epoch, counter=self.counter,
            statistic=self.statistic, **self._tables,
        )  # fmt: skip

    def turns(self, rows: FusedRows, weights: FusedWeights) -> Generator[LanePart, None, None]:
        """Launch until the epoch is complete; yield where the other instances must launch too."""
        before, max_idle = int(self.epoch), _TURN_NS if self.shape.is_card else 1
        for turn in range(_TURNS):
            if turn:
                yield EXPERTS
            if int(self.epoch) == before:
                self.launch(rows, weights, max_idle=max_idle, is_last=turn == _TURNS - 1)


def fused_weights(
    moe: MoeWeights, experts: GroupedExperts, names: SlotNames, layer: int
) -> FusedWeights:
    """Return a layer's weights in the kernel's form."""
    gate_bias = moe.gate if moe.gate_bias is None else moe.gate_bias
    tensors = [moe.gate, gate_bias, names.of(layer), names.loads.of(layer)]
    for weight in (experts.gate_up, experts.down):
        plain = isinstance(weight, Tensor)
        tensors += [weight, weight] if plain else [weight.values, weight.scale]
    return FusedWeights(*tensors)


class FusedMixtures(NormedMixture):
    """The MoE layers of one instance, each one launch."""

    parts = ()

    def __init__(
        self, fused: FusedMoe, weights: GpuWeights, norm_eps: float, names: SlotNames
    ) -> None:
        """weights: placed for a fused MoE layer (gpu_weights.place_weights)."""
        self.fused, self._eps, self._names = fused, norm_eps, names
        self._layers, self._experts = weights.weights.layers, weights.experts
        self.takes_turns = weights.weights.embedding.device.type == "cpu"
        """True if instances share one thread, so no launch may wait for peers."""

    def meet(self, peers: Sequence[int]) -> None:
        self.fused.begin_term()

    def place_experts(self, table: ExpertTable) -> None:
        self._names.place(table)

    def loads(self) -> Tensor:
        return self._names.loads.take()

    def phases(
        self,
        x_BX: Tensor,
        normed_BX: Tensor,
        live_B: Tensor,
        layer: int,
        norm_X: Tensor,
        probe: MoeProbe,
    ) -> Generator[LanePart, None, tuple[Tensor, Tensor]]:
        probe("expert")  # One launch is all of it.
        moe, experts = self._layers[layer].moe, self._experts[layer]
        assert moe is not None and experts is not None, f"layer {layer} has no experts"
        rows = self.fused.rows(x_BX, normed_BX, live_B)
        weights = fused_weights(moe, experts, self._names, layer)
        if self.takes_turns:
            yield from self.fused.turns(rows, weights)
        else:
            self.fused.launch(rows, weights)
        return add_norm(rows.out, norm_X, self._eps)


def _resident_programs(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count - _RESERVED_SMS


def _gate_parts(tiles: FusedTiles, model: ModelConfig) -> int:
    num_steps = -(-model.hidden_size // tiles.gate.depth)
    return -(-num_steps // -(-num_steps // tiles.gate.parts))


def _shape(
    exchange: GpuExchange,
    tiles: FusedTiles,
    model: ModelConfig,
    num_instances: int,
    num_here: int,
    max_rows: int,
    fp8_block: tuple[int, int],
    is_card: bool,
) -> FusedShape:
    places, power_of_two = exchange.places.channels, triton.next_power_of_2
    dispatch, combine = places[Channel.DISPATCH], places[Channel.COMBINE]
    offset = {field.name: field.offset for field in dispatch.fields}
    per_row, num_shared = model.num_experts_per_token, model.num_shared_experts
    # Every wave has a source, and ends with at most one row block of each expert that is not full.
    num_here_pairs = num_instances * max_rows * min(per_row, num_here)
    num_groups = min(num_instances * num_here, num_here_pairs)
    num_blocks = num_groups + num_here_pairs // tiles.rows
    shared_blocks = triton.cdiv(max_rows, tiles.rows)
    gate_blocks = triton.cdiv(max_rows, tiles.gate.rows)
    max_items = max(num_blocks + num_shared * shared_blocks, num_instances, gate_blocks) + 1
    sections = (
        NUM_WORDS.value * WORD.value,
        2 * NUM_QUEUES.value * max_items,
        4 * (num_instances + 1),
        num_here,
        2 * (max_items + num_shared * shared_blocks),
        gate_blocks,
    )
    starts = [sum(sections[:index]) for index in range(len(sections) + 1)]
    return FusedShape(
        num_instances=num_instances,
        max_rows=max_rows,
        per_row=per_row,
        hidden=model.hidden_size,
        width=model.expert_size,
        num_here=num_here,
        num_shared=num_shared,
        num_experts=model.num_experts,
        softmax_gate=model.softmax_gate,
        num_groups=model.num_groups,
        groups_per_row=model.num_groups_per_token,
        weights_normalised=model.weights_normalised,
        routed_scale=model.routed_scale,
        scale_n=fp8_block[0],
        scale_x=fp8_block[1],
        block_m=tiles.rows,
        block_n=tiles.columns,
        block_k=tiles.depth,
        gate_m=tiles.gate.rows,
        gate_n=tiles.gate.columns,
        gate_k=tiles.gate.depth,
        gate_parts=_gate_parts(tiles, model),
        block_x=min(tiles.copied, power_of_two(model.hidden_size)),
        parts=tiles.parts,
        pad_n=power_of_two(num_instances),
        pad_k=power_of_two(per_row),
        pad_e=power_of_two(num_here),
        pad_g=power_of_two(model.num_experts),
        pad_groups=power_of_two(model.num_groups),
        num_pairs=num_instances * max_rows * per_row,
        max_items=max_items,
        shared_blocks=shared_blocks,
        at_queue=starts[1],
        at_source=starts[2],
        at_expert=starts[3],
        at_block=starts[4],
        at_gate=starts[5],
        num_counters=starts[6],
        dispatch_flag=dispatch.flag_offset,
        dispatch_count=dispatch.cell_offset,
        dispatch_number=offset["number"],
        dispatch_weight=offset["weight"],
        dispatch_hidden=offset["hidden"],
        combine_flag=combine.flag_offset,
        combine_hidden=combine.fields[0].offset,
        is_card=is_card,
    )
