"""A mixture of experts as one launch on a GPU: the memory of an instance, launches, turns.

Enters: rows with their experts, a layer's weights, the exchange's memory. Leaves: sums over
experts. Does not know: tasks (fused_tasks.py, fused_kernel.py). The slow reference is
all_to_all_gpu.py.

Legend: B rows, X hidden, K experts a row, N instances, R rows of an instance at most, I expert
width, E experts here.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from data_plane.model.config import ModelConfig
from data_plane.model.layers import gated_mlp
from data_plane.moe.fused_kernel import fused_kernel
from data_plane.moe.fused_tasks import (
    NUM_QUEUES,
    NUM_WORDS,
    WORD,
    FusedExperts,
    FusedRows,
    FusedShape,
    FusedState,
)
from data_plane.moe.gate import gate
from data_plane.moe.gpu_weights import GpuWeights
from data_plane.moe.grouped import GroupedExperts
from data_plane.moe.triton_rows import route_rows
from data_plane.transport.cuda_ipc import GpuExchange
from data_plane.transport.exchange import Channel
from nanocp.experts import home_table

_UNLIMITED = 2**31 - 1
_RESERVED_SMS = 2
"""SMs left to others: elsewhere a resident grid on all of them has hung beside a second stream."""
_TURNS = 3
"""Launches of an epoch whose instances take turns: dispatch, experts, combine."""


class FusedTiles(NamedTuple):
    """How the work of a layer is cut, and what a program has."""

    rows: int
    columns: int
    depth: int
    copied: int
    """Columns that a copy or a sum takes at once."""
    parts: int
    """Tasks that send the rows for one target, or return those of one source."""
    num_warps: int
    num_stages: int

    def shared_bytes(self, itemsize: int) -> int:
        """Bound the shared memory of a program: rows, gate and up of each stage."""
        return self.num_stages * self.depth * (self.rows + 2 * self.columns) * itemsize


TILES_16_BIT = FusedTiles(64, 64, 64, 1024, 8, 4, 4)
TILES_FP8 = FusedTiles(64, 64, 64, 1024, 8, 8, 4)
"""More warps, because products and their scaled sums are both in registers."""
TILES_FP32 = FusedTiles(64, 64, 32, 1024, 8, 4, 2)


def tiles_for(dtype: torch.dtype, is_fp8: bool) -> FusedTiles:
    """Choose the tiles for rows of this dtype, and FP8 weights or plain ones."""
    if dtype == torch.float32:
        return TILES_FP32
    return TILES_FP8 if is_fp8 else TILES_16_BIT


def fused_obstacle(properties: Any, dtype: torch.dtype, expert_backend: str, num_nodes: int) -> str:
    """Say why a fused mixture cannot run; an empty string if it can.

    properties: torch's of the GPU. num_nodes: nodes of the cluster.
    """
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
    """One instance's end of a fused mixture; all layers share it."""

    def __init__(
        self,
        exchange: GpuExchange,
        *,
        num_instances: int,
        num_experts: int,
        num_here: int,
        per_row: int,
        hidden_size: int,
        expert_size: int,
        max_rows: int,
        dtype: torch.dtype,
        device: torch.device,
        fp8_block: tuple[int, int] | None = None,
        tiles: FusedTiles | None = None,
        num_programs: int | None = None,
    ) -> None:
        """Allocate what lives from launch to launch; the exchange may be attached later.

        num_here: most experts here in a layer. max_rows: the same on every instance. fp8_block: of
        FP8 weights. num_programs: of a launch; by default what the GPU holds at once.
        """
        self._exchange, self._device = exchange, device
        is_card = device.type != "cpu"
        self.tiles = tiles or tiles_for(dtype, fp8_block is not None)
        self.num_programs = num_programs or (_resident_programs(device) if is_card else 1)
        self.shape = _shape(
            exchange, self.tiles, num_instances, num_here, per_row, hidden_size, expert_size,
            max_rows, fp8_block or (0, 0), is_card,
        )  # fmt: skip
        seats = home_table(num_experts, num_instances).seats
        self._seat_E = torch.tensor(seats, dtype=torch.int64, device=device)

        def ints(*sizes: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*sizes, dtype=dtype, device=device)

        shape, num_pairs = self.shape, num_instances * max_rows * per_row
        self.epoch = ints(1, dtype=torch.int64)
        """[1] int64: epochs that are complete."""
        self.statistic = ints(6, dtype=torch.int64)
        """[6] int64: what FusedState.statistic counts, since the start."""
        self.counter = ints(shape.num_counters)
        """[num_counters] int32: the state of the epoch, zero between epochs."""
        self._tables = (
            ints(NUM_QUEUES.value, shape.max_items),
            ints(shape.max_items, 4),
            ints(shape.max_items, 3),
            ints(num_here, num_instances * max_rows),
            torch.zeros(num_pairs, expert_size, dtype=dtype, device=device),
            torch.zeros(num_pairs, hidden_size, dtype=dtype, device=device),
        )

    def place_experts(self, seats: Sequence[int]) -> None:
        """Set the instance of each expert, where captured steps read it."""
        self._seat_E.copy_(torch.tensor(seats, dtype=torch.int64))

    def route(
        self, x_BX: Tensor, expert_BK: Tensor, weight_BK: Tensor, live_B: Tensor
    ) -> FusedRows:
        """Find where the live rows go, and allocate their sums.

        expert_BK: int64 ids. weight_BK: fp32. live_B: bool.
        """
        count_N, row_NL, slot_NB = route_rows(
            expert_BK, live_B, self._seat_E, self.shape.num_instances, self.shape.max_rows
        )
        assert x_BX.is_contiguous() and weight_BK.is_contiguous()
        return FusedRows(
            x_BX, expert_BK, weight_BK, count_N, row_NL, slot_NB, torch.empty_like(x_BX)
        )

    def launch(
        self,
        rows: FusedRows,
        experts: FusedExperts,
        *,
        max_tasks: int = _UNLIMITED,
        max_idle: int | None = None,
        is_last: bool = True,
        num_programs: int | None = None,
        grid: int | None = None,
    ) -> None:
        """Launch the kernel, which ends with the epoch, or before it (fused_kernel.fused_kernel).

        max_tasks: of each program. max_idle: None for the exchange's limit. is_last: whether a peer
        that does not come is an error. num_programs: those that leave before the epoch may end;
        grid: those that this call launches, by default all of them.
        """
        exchange, programs = self._exchange, num_programs or self.num_programs
        if max_idle is None:
            max_idle = exchange.timeout_ns if self.shape.is_card else exchange.max_polls
        fused_kernel[(grid or programs,)](
            self.state(), rows, experts, exchange.memory.instance, len(rows.x), programs,
            max_tasks, max_idle, int(is_last), S=self.shape, num_warps=self.tiles.num_warps,
            num_stages=self.tiles.num_stages, launch_cooperative_grid=True,
        )  # fmt: skip

    def state(self) -> FusedState:
        """Name the memory of this instance as the kernel takes it; the exchange is attached."""
        peer, error = self._exchange.memory.address_N, self._exchange.error
        return FusedState(peer, error, self.epoch, self.counter, *self._tables, self.statistic)

    def turns(self, rows: FusedRows, experts: FusedExperts) -> Generator[None, None, None]:
        """Launch until the epoch is complete; yield where the other instances must launch too.

        In one thread and in turn no instance waits for a later one. A peer that is missing in the
        last turn is the error that GpuExchange.check raises.
        """
        before = int(self.epoch)
        for turn in range(_TURNS):
            if turn:
                yield
            if int(self.epoch) == before:
                self.launch(rows, experts, max_idle=1, is_last=turn == _TURNS - 1)


def fused_experts(experts: GroupedExperts) -> FusedExperts:
    """Name the weights of a layer as the kernel takes them."""
    tensors = [experts.place_E]
    for weight in (experts.gate_up, experts.down):
        plain = isinstance(weight, Tensor)
        tensors += [weight, weight] if plain else [weight.values, weight.scale]
    return FusedExperts(*tensors)


class FusedMixtures:
    """The mixtures of one instance, each one launch: see mixture.MixtureOfExperts."""

    def __init__(self, fused: FusedMoe, model: ModelConfig, weights: GpuWeights) -> None:
        self.fused, self._model = fused, model
        self._layers, self._experts = weights.weights.layers, weights.experts
        self.takes_turns = weights.weights.embedding.device.type == "cpu"
        """Whether instances take turns in one thread, so that a launch must not wait for peers."""

    def meet(self, peers: Sequence[int]) -> None:
        """Do nothing: on a GPU a term has all instances."""

    def place_experts(self, seats: Sequence[int]) -> None:
        """Set the instance of each expert; captured steps read it anew."""
        self.fused.place_experts(seats)

    def phases(
        self, x_BX: Tensor, normed_BX: Tensor, live_B: Tensor, layer: int
    ) -> Generator[None, None, Tensor]:
        """Return x_BX plus the mixture of normed_BX; see mixture.MixtureOfExperts.phases."""
        moe, experts = self._layers[layer].moe, self._experts[layer]
        assert moe is not None and experts is not None, f"layer {layer} has no experts"
        rows = self.fused.route(normed_BX, *gate(normed_BX, moe, self._model), live_B)
        if self.takes_turns:
            yield from self.fused.turns(rows, fused_experts(experts))
        else:
            self.fused.launch(rows, fused_experts(experts))
        routed_BX: Tensor = rows.out
        return x_BX + (gated_mlp(normed_BX, moe.shared) + routed_BX if moe.shared else routed_BX)


def _resident_programs(device: torch.device) -> int:
    """Count the programs of a launch: one for each multiprocessor but those that are reserved."""
    return torch.cuda.get_device_properties(device).multi_processor_count - _RESERVED_SMS


def _shape(
    exchange: GpuExchange,
    tiles: FusedTiles,
    num_instances: int,
    num_here: int,
    per_row: int,
    hidden_size: int,
    expert_size: int,
    max_rows: int,
    fp8_block: tuple[int, int],
    is_card: bool,
) -> FusedShape:
    places = exchange.places.channels
    dispatch, combine = places[Channel.DISPATCH], places[Channel.COMBINE]
    offset = {field.name: field.offset for field in dispatch.fields}
    # Every wave has a source, and ends with at most one row block of each expert that is not full.
    num_pairs = num_instances * max_rows * min(per_row, num_here)
    num_groups = min(num_instances * num_here, num_pairs)
    max_items = max(num_groups + num_pairs // tiles.rows, num_instances, 1) + 1
    sections = (
        NUM_WORDS.value * WORD.value,
        2 * NUM_QUEUES.value * max_items,
        4 * num_instances,
        num_here,
        2 * max_items,
    )
    starts = [sum(sections[:index]) for index in range(len(sections) + 1)]
    return FusedShape(
        num_instances=num_instances,
        max_rows=max_rows,
        per_row=per_row,
        hidden=hidden_size,
        width=expert_size,
        num_here=num_here,
        scale_n=fp8_block[0],
        scale_x=fp8_block[1],
        block_m=tiles.rows,
        block_n=tiles.columns,
        block_k=tiles.depth,
        block_x=min(tiles.copied, triton.next_power_of_2(hidden_size)),
        parts=tiles.parts,
        pad_n=triton.next_power_of_2(num_instances),
        pad_k=triton.next_power_of_2(per_row),
        pad_e=triton.next_power_of_2(num_here),
        max_items=max_items,
        at_queue=starts[1],
        at_source=starts[2],
        at_expert=starts[3],
        at_block=starts[4],
        num_counters=starts[5],
        dispatch_flag=dispatch.flag_offset,
        dispatch_count=dispatch.cell_offset,
        dispatch_expert=offset["expert"],
        dispatch_weight=offset["weight"],
        dispatch_hidden=offset["hidden"],
        combine_flag=combine.flag_offset,
        combine_hidden=combine.fields[0].offset,
        is_card=is_card,
    )
