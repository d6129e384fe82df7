"""Pairs of a row and an expert on a GPU, and their rows laid out by expert.

The slow reference is group_rows of tests/harness/kernels/slow_references.py. A pair's slot is
expert * S + place; row r of the exchange's memory is (parity * N + source) * slots + slot. Shared
experts follow the experts here; every row visits them.

Legend: B rows, K experts a row, N instances, E experts here, S slots of an expert, X hidden, V
shared experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from data_plane.kernels.fp8 import BLOCK, LEAST_SCALE, divided, padded_scales
from data_plane.kernels.norm import gated_product
from data_plane.transport.exchange import Channel
from data_plane.transport.gpu.cuda_ipc import GpuExchange, Region

_BLOCK_T = 128
_NUM_GATHERERS = 528
"""Programs that lay rows out: four a multiprocessor of a Hopper GPU."""


@triton.jit
def pairs_kernel(
    number_ptr, peer_ptr, epoch_ptr, source_count_ptr, row_ptr, slot_ptr, count_ptr, load_ptr,
    number_offset, instance, num_instances, num_rows, num_slots, num_routed, per_row, id_stride,
    num_shared,
    IN_REGION: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program e: give a slot to every row that visits local expert e, in row order.

    Writes int32 row_ptr [E + V, S], the row in each slot; slot_ptr [rows, K + V], -1 for an expert
    elsewhere; count_ptr [E + V]. Adds the counts to int64 load_ptr [E]. IN_REGION: rows and numbers
    are in the exchange's memory, num_rows slots for each source with its count; else they are this
    instance's num_rows rows.
    """
    e = tl.program_id(0)
    k = tl.arange(0, BLOCK_K)
    stride = per_row + num_shared
    done = 0
    total = num_rows
    first = instance * num_routed
    if IN_REGION:
        source = tl.arange(0, BLOCK_N)
        counts = tl.load(source_count_ptr + source, mask=source < num_instances, other=0)
        end = tl.cumsum(counts, 0)
        total = tl.sum(counts, 0)
        number_ptr = (tl.load(peer_ptr + instance) + number_offset).to(number_ptr.dtype)
        first_row = (tl.load(epoch_ptr) & 1).to(tl.int32) * num_instances * num_rows
    for begin in range(0, total, BLOCK_T):
        t = begin + tl.arange(0, BLOCK_T)
        is_row = t < total
        if IN_REGION:
            n = tl.sum((end[None, :] <= t[:, None]).to(tl.int32), 1)
            before = tl.where(source[None, :] == n[:, None], (end - counts)[None, :], 0)
            at = n * num_rows + t - tl.sum(before, 1)
            row = first_row + at
        else:
            at = t
            row = t
        pair = at[:, None] * stride + k[None, :]
        in_k = (k < per_row)[None, :]
        is_pair = is_row[:, None] & in_k
        number = tl.load(number_ptr + row[:, None] * id_stride + k[None, :], mask=is_pair, other=-1)
        place = number - first
        is_here = is_pair & (place == e)
        visits = tl.max(is_here.to(tl.int32), 1)
        if e >= num_routed:
            visits = (tl.max(number, 1) >= 0).to(tl.int32)
        slot = e * num_slots + done + tl.cumsum(visits, 0) - 1
        tl.store(row_ptr + slot, row, mask=visits > 0)
        if e >= num_routed:
            own = at * stride + per_row + e - num_routed
            tl.store(slot_ptr + own, tl.where(visits > 0, slot, -1), mask=is_row)
        else:
            slots = slot[:, None] + tl.zeros([BLOCK_T, BLOCK_K], tl.int32)
            tl.store(slot_ptr + pair, slots, mask=is_here)
        if e == 0:
            is_nowhere = is_pair & ((place < 0) | (place >= num_routed))
            tl.store(slot_ptr + pair, tl.full([BLOCK_T, BLOCK_K], -1, tl.int32), mask=is_nowhere)
        done += tl.sum(visits, 0)
    tl.store(count_ptr + e, done)
    tl.atomic_add(load_ptr + e, done, mask=e < num_routed, sem="relaxed", scope="gpu")


@triton.jit
def first_row_of(x_ptr, peer_ptr, offset, instance, IN_REGION: tl.constexpr):
    """Return a pointer to the first row: in x, or in an aligned field of this instance's memory."""
    if IN_REGION:
        return tl.multiple_of((tl.load(peer_ptr + instance) + offset).to(x_ptr.dtype), 16)
    else:
        return x_ptr


@triton.jit
def count_tiles(count_ptr, num_experts, BLOCK_E: tl.constexpr, BLOCK_S: tl.constexpr):
    """Count row tiles: (experts, their counts, their tiles, ends of those, all tiles)."""
    e = tl.arange(0, BLOCK_E)
    counts = tl.load(count_ptr + e, mask=e < num_experts, other=0)
    tiles = (counts + BLOCK_S - 1) // BLOCK_S
    return e, counts, tiles, tl.cumsum(tiles, 0), tl.sum(tiles, 0)


@triton.jit
def lay_out_kernel(
    x_ptr, peer_ptr, row_ptr, count_ptr, out_ptr, scale_ptr, offset, instance, num_experts,
    num_slots, scale_slots, width, stride, GATHERS: tl.constexpr, IN_REGION: tl.constexpr,
    IS_GATED: tl.constexpr, IS_FP8: tl.constexpr, BLOCK_G: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Program (p, column block) of P: lay out the rows of slots p, p + P, ... of all that have one.

    GATHERS: the row of a slot is row_ptr's, else the slot's own. IS_GATED: silu(gate) * up of a row
    [gate, up] is laid out. IS_FP8: e4m3, with an fp32 scale for each GROUP columns, in scale_ptr
    [E, X / GROUP, scale_slots].
    """
    e, counts, _, ends, total = count_tiles(count_ptr, num_experts, BLOCK_E, 1)
    x_base = first_row_of(x_ptr, peer_ptr, offset, instance, IN_REGION)
    group = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = at < width
    for pair in range(tl.program_id(0), total, tl.num_programs(0)):
        expert = tl.sum((ends <= pair).to(tl.int32), 0)
        place = pair - tl.sum(tl.where(e == expert, ends - counts, 0), 0)
        slot = expert.to(tl.int64) * num_slots + place
        row = slot
        if GATHERS:
            row = tl.load(row_ptr + slot).to(tl.int64)
        if IS_GATED:
            gate = tl.load(x_base + row * stride + at, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(x_base + row * stride + width + at, mask=inside, other=0.0)
            x = gated_product(gate, up.to(tl.float32))
        else:
            x = tl.load(x_base + row * stride + at, mask=inside, other=0.0).to(tl.float32)
        if IS_FP8:
            x, scale = divided(x, LEAST_SCALE)
            first_scale = expert.to(tl.int64) * tl.cdiv(width, GROUP) * scale_slots + place
            tl.store(
                scale_ptr + first_scale + group * scale_slots, scale, mask=group * GROUP < width
            )
        tl.store(out_ptr + slot * width + at, x.to(out_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class Pairs:
    """The pairs of a layer, on the device."""

    x: Tensor
    """The rows [B, X]; if they are in a region, a batch for its dtype only."""
    region: Region | None
    row_ES: Tensor
    """[E + V, S] int32: the row in each used slot."""
    count_E: Tensor
    """[E + V] int32: used slots."""
    slot: Tensor
    """[rows, K + V] int32, -1 for an expert elsewhere; rows of a region by source, then slot."""

    @property
    def place(self) -> tuple[Tensor, int, int, int]:
        """The place of the rows for a kernel: (table, offset, instance, elements of a row)."""
        if self.region is None:
            return self.row_ES, 0, 0, self.x.shape[1]
        region = self.region
        return region.table, region.offset, region.instance, region.stride_in(self.x)


def find_pairs(
    x_BX: Tensor,
    number_BK: Tensor,
    load_E: Tensor,
    num_shared: int = 0,
) -> Pairs:
    """Find the pairs of the rows of a batch with the E slots of an instance alone.

    number_BK: int64, of `gate`. load_E: SlotLoads.of. num_shared: experts that every live row
    visits.
    """
    (num_rows, per_row), num_here = number_BK.shape, len(load_E)
    row_ES, slot, count_E = _tables(x_BX, num_here + num_shared, num_rows, slot_shape=(
        num_rows, per_row + num_shared
    ))  # fmt: skip
    if num_rows:
        pairs_kernel[(num_here + num_shared,)](
            number_BK, number_BK, number_BK, count_E, row_ES, slot, count_E, load_E, 0, 0, 0,
            num_rows, num_rows, num_here, per_row, per_row, num_shared,
            IN_REGION=False, BLOCK_T=_BLOCK_T, BLOCK_K=triton.next_power_of_2(per_row), BLOCK_N=1,
        )  # fmt: skip
    else:
        count_E.zero_()
    return Pairs(x_BX, None, row_ES, count_E, slot)


def find_arrived_pairs(
    x_BX: Tensor, number_BK: Tensor, exchange: GpuExchange, count_N: Tensor, load_E: Tensor
) -> Pairs:
    """Find the pairs of the rows that a wait for DISPATCH found in the exchange's memory.

    x_BX, number_BK: a batch, for dtypes. count_N: [N] int32, rows from each instance. load_E:
    SlotLoads.of.
    """
    ids, hidden = (exchange.region(Channel.DISPATCH, name) for name in ("number", "hidden"))
    num_instances, per_row, num_here = len(count_N), number_BK.shape[1], len(load_E)
    most = num_instances * ids.num_slots
    row_ES, slot, count_E = _tables(x_BX, num_here, most, slot_shape=(most, per_row))
    pairs_kernel[(num_here,)](
        number_BK, ids.table, ids.epoch, count_N, row_ES, slot, count_E, load_E, ids.offset,
        ids.instance, num_instances, ids.num_slots, most, num_here, per_row,
        ids.stride_in(number_BK), 0,
        IN_REGION=True, BLOCK_T=_BLOCK_T, BLOCK_K=triton.next_power_of_2(per_row),
        BLOCK_N=triton.next_power_of_2(num_instances),
    )  # fmt: skip
    return Pairs(x_BX, hidden, row_ES, count_E, slot)


def _tables(
    x: Tensor, num_experts: int, num_slots: int, slot_shape: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty(num_experts, num_slots, dtype=torch.int32),
        x.new_empty(slot_shape, dtype=torch.int32),
        x.new_empty(num_experts, dtype=torch.int32),
    )


def lay_out(
    x: Tensor, count_E: Tensor, num_slots: int, pairs: Pairs | None = None, *,
    is_gated: bool = False, is_fp8: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Lay rows out as [E, S, X] for a GEMM: (values, scales). Unused slots stay unwritten.

    x: [E * S, X] by slot, or the rows of `pairs`; with is_gated [gate, up], of which silu(gate) *
    up is laid out. FP8 scales are [E, S, X / 128] fp32, slots side by side and padded to a multiple
    of 4, for TMA; else scales mean nothing.
    """
    num_experts, width = len(count_E), x.shape[-1] // (2 if is_gated else 1)
    groups, padded = triton.cdiv(width, BLOCK), padded_scales(num_slots)
    out = x.new_empty(
        num_experts, num_slots, width, dtype=torch.float8_e4m3fn if is_fp8 else x.dtype
    )
    scale = x.new_empty(num_experts, groups, padded, dtype=torch.float32) if is_fp8 else count_E
    table, offset, instance, stride = pairs.place if pairs else (count_E, 0, 0, x.shape[-1])
    block = min(8, triton.next_power_of_2(groups))
    if num_slots:
        grid = min(num_experts * num_slots, _NUM_GATHERERS), triton.cdiv(groups, block)
        lay_out_kernel[grid](
            x, table, pairs.row_ES if pairs else count_E, count_E, out, scale, offset, instance,
            num_experts, num_slots, padded, width, stride, GATHERS=pairs is not None,
            IN_REGION=pairs is not None and pairs.region is not None, IS_GATED=is_gated,
            IS_FP8=is_fp8, BLOCK_G=block, GROUP=BLOCK, BLOCK_E=triton.next_power_of_2(num_experts),
        )  # fmt: skip
    return out, scale.transpose(1, 2)[:, :num_slots] if is_fp8 else scale
