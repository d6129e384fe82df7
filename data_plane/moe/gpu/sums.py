"""Sums of pairs' products on a GPU: back to their instances, into the next layer's rows.

The slow reference is ungroup_rows of tests/harness/kernels/slow_references.py. Legend: pairs.py's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from data_plane.kernels.norm import store_normed
from data_plane.moe.gpu.pairs import Pairs, first_row_of
from data_plane.transport.exchange import Channel
from data_plane.transport.gpu.cuda_ipc import GpuExchange
from data_plane.transport.gpu.peer_memory import FAR
from data_plane.transport.gpu.triton_exchange import staged

_NUM_WARPS = 8
_FAR = tl.constexpr(FAR)


@triton.jit
def _weighted(acc, y_ptr, slot, weight, column, inside, width):
    y = tl.load(
        y_ptr + tl.maximum(slot, 0).to(tl.int64) * width + column,
        mask=tl.where(inside, slot, -1) >= 0,
        other=0.0,
    )
    return acc + weight * y.to(tl.float32)


@triton.jit
def _store_row(
    acc, x_ptr, shared_ptr, norm_ptr, out_ptr, normed_ptr, row, column, inside, width, eps,
    HAS_SHARED: tl.constexpr,
):  # fmt: skip
    """Add a MoE layer's sum to row b, and the shared experts'; write it, and it normed."""
    at = row.to(tl.int64) * width + column
    if HAS_SHARED:
        acc += tl.load(shared_ptr + at, mask=inside, other=0.0).to(tl.float32)
    acc += tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    rounded = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, rounded, mask=inside)
    store_normed(
        rounded.to(tl.float32), norm_ptr, normed_ptr, column, inside, row.to(tl.int64), width, eps
    )


@triton.jit
def return_kernel(
    peer_ptr, epoch_ptr, error_ptr, count_ptr, done_ptr, y_ptr, slot_ptr, weight_ptr, flag_offset,
    hidden_offset, weight_offset, instance, num_rows, width, hidden_stride, weight_stride, stage,
    IS_PACKED: tl.constexpr, K: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """Program (source, p) of P, a power of two: sum rows p, p + P, ... of a source over its pairs.

    Stores the sums at the source and then releases its flag, as put_kernel does. epoch_ptr: of the
    last wait for DISPATCH and of this put. A source without a row, or outside the term, gets
    nothing. A far one's sums stay here (triton_exchange.staged); IS_PACKED: there may be one.
    """
    source, program = tl.program_id(0), tl.program_id(1)
    num_instances, num_programs = tl.num_programs(0), tl.num_programs(1)
    count = tl.load(count_ptr + source)
    base = tl.load(peer_ptr + source)
    if (count == 0) | (base == 0) | (tl.load(error_ptr) != 0):
        return
    epoch = tl.load(epoch_ptr)
    parity = (epoch & 1) * num_instances
    own = tl.load(peer_ptr + instance) + weight_offset
    pair_weight_ptr = own.to(weight_ptr.dtype) + (parity + source) * num_rows * weight_stride
    region = parity + instance
    is_far = base == _FAR
    if IS_PACKED:
        base, region = staged(peer_ptr, base, region, source, instance, stage)
    sum_ptr = tl.multiple_of((base + hidden_offset).to(y_ptr.dtype), 16)
    sum_ptr += region * num_rows * hidden_stride
    for row in range(program, count, num_programs):
        at = (source * num_rows + row) * K
        for begin in range(0, width, BLOCK_X):
            column = begin + tl.arange(0, BLOCK_X)
            inside = column < width
            acc = tl.zeros([BLOCK_X], tl.float32)
            for k in tl.static_range(K):
                slot = tl.load(slot_ptr + at + k)
                weight = tl.load(pair_weight_ptr + row * weight_stride + k)
                acc = _weighted(acc, y_ptr, slot, weight, column, inside, width)
            to = sum_ptr + row * hidden_stride + column
            tl.store(to, acc.to(y_ptr.dtype.element_ty), mask=inside)
    if is_far & IS_PACKED:
        return
    # The order of flags is that of put_kernel in transport/gpu/triton_exchange.py.
    tl.debug_barrier()
    num_done = tl.atomic_add(done_ptr + source, 1, sem="acq_rel", scope="sys") + 1
    if (num_done & (num_programs - 1)) == 0:
        flag_ptr = (base + flag_offset).to(epoch_ptr.dtype) + parity + instance
        tl.atomic_xchg(flag_ptr, epoch, sem="release", scope="sys")


@triton.jit
def sum_pairs_kernel(
    x_ptr, y_ptr, slot_ptr, weight_ptr, shared_ptr, norm_ptr, out_ptr, normed_ptr, width, eps,
    K: tl.constexpr, V: tl.constexpr, HAS_SHARED: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """Program b: add to row b the products of its pairs, weighted; write the sum, and it normed."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK_X)
    inside = column < width
    acc = tl.zeros([BLOCK_X], tl.float32)
    for k in tl.static_range(K + V):
        slot = tl.load(slot_ptr + row * (K + V) + k)
        weight = 1.0
        if k < K:
            weight = tl.load(weight_ptr + row * K + k)
        acc = _weighted(acc, y_ptr, slot, weight, column, inside, width)
    _store_row(
        acc, x_ptr, shared_ptr, norm_ptr, out_ptr, normed_ptr, row, column, inside, width, eps,
        HAS_SHARED,
    )  # fmt: skip


@triton.jit
def sum_returned_kernel(
    x_ptr, peer_ptr, epoch_ptr, slot_ptr, shared_ptr, norm_ptr, out_ptr, normed_ptr, offset,
    instance, num_instances, num_slots, stride, width, eps, HAS_SHARED: tl.constexpr,
    BLOCK_X: tl.constexpr,
):  # fmt: skip
    """Program b: add the returned sums to row b; write the sum, and it normed.

    Parts are read in place. slot_ptr [N, B]: rows.target_kernel's.
    """
    row, num_rows = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK_X)
    inside = column < width
    base = first_row_of(x_ptr, peer_ptr, offset, instance, True)
    first_region = (tl.load(epoch_ptr) & 1).to(tl.int32) * num_instances
    acc = tl.zeros([BLOCK_X], tl.float32)
    for n in range(num_instances):
        slot = tl.load(slot_ptr + n * num_rows + row)
        if slot >= 0:
            at = ((first_region + n) * num_slots + slot).to(tl.int64)
            acc += tl.load(base + at * stride + column, mask=inside, other=0.0).to(tl.float32)
    _store_row(
        acc, x_ptr, shared_ptr, norm_ptr, out_ptr, normed_ptr, row, column, inside, width, eps,
        HAS_SHARED,
    )  # fmt: skip


def return_sums(
    y: Tensor, pairs: Pairs, count_N: Tensor, weight_BK: Tensor, exchange: GpuExchange
) -> None:
    """Sum each arrived row over its experts here, weighted, and put it back to its instance.

    y: [E * S, X]. count_N: [N] int32, rows from each instance. weight_BK: of a batch, for the
    dtype.
    """
    weights = exchange.region(Channel.DISPATCH, "weight")
    hidden, place = (
        exchange.region(Channel.COMBINE, "hidden"),
        exchange.places.channels[Channel.COMBINE],
    )
    num_instances, width = len(count_N), y.shape[1]
    most = max(16, 256 // num_instances)
    programs = min(triton.next_power_of_2(hidden.num_slots), 1 << (most.bit_length() - 1))
    return_kernel[(num_instances, programs)](
        weights.table, weights.epoch, exchange.error, count_N, exchange.done(Channel.COMBINE), y,
        pairs.slot, weight_BK, place.flag_offset, hidden.offset, weights.offset, weights.instance,
        hidden.num_slots, width, hidden.stride_in(y), weights.stride_in(weight_BK),
        place.stage_offset - place.offset, IS_PACKED=exchange.places.is_packed,
        K=pairs.slot.shape[1], BLOCK_X=min(2048, triton.next_power_of_2(width)),
        num_warps=_NUM_WARPS,
    )  # fmt: skip
    exchange.forward(Channel.COMBINE, count_N)


def sum_pairs(
    x_BX: Tensor, y: Tensor, pairs: Pairs, weight_BK: Tensor, shared_BX: Tensor | None,
    norm_X: Tensor, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Add to rows the products of a batch's pairs, weighted, and the shared experts' sums.

    y: [E * S, X]. Returns (the rows, the rows normed).
    """
    out, normed = torch.empty_like(x_BX), torch.empty_like(x_BX)
    (num_rows, width), per_row = x_BX.shape, weight_BK.shape[1]
    if num_rows:
        sum_pairs_kernel[(num_rows,)](
            x_BX, y, pairs.slot, weight_BK, x_BX if shared_BX is None else shared_BX, norm_X, out,
            normed, width, eps, K=per_row, V=pairs.slot.shape[1] - per_row,
            HAS_SHARED=shared_BX is not None, BLOCK_X=triton.next_power_of_2(width),
            num_warps=_NUM_WARPS,
        )  # fmt: skip
    return out, normed


def sum_returned(
    x_BX: Tensor, exchange: GpuExchange, slot_NB: Tensor, shared_BX: Tensor | None,
    norm_X: Tensor, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Add to rows their sums that a wait for COMBINE found, and the shared experts' sums.

    slot_NB: [N, B] int32, each row's slot at each instance, or -1. Returns (the rows, the rows
    normed).
    """
    out, normed = torch.empty_like(x_BX), torch.empty_like(x_BX)
    (num_instances, num_rows), width = slot_NB.shape, x_BX.shape[1]
    hidden = exchange.region(Channel.COMBINE, "hidden")
    if num_rows:
        sum_returned_kernel[(num_rows,)](
            x_BX, hidden.table, hidden.epoch, slot_NB, x_BX if shared_BX is None else shared_BX,
            norm_X, out, normed, hidden.offset, hidden.instance, num_instances, hidden.num_slots,
            hidden.stride_in(x_BX), width, eps, HAS_SHARED=shared_BX is not None,
            BLOCK_X=triton.next_power_of_2(width), num_warps=_NUM_WARPS,
        )  # fmt: skip
    return out, normed
