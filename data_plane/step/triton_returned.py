"""LSE merge at the MoE binding on a GPU: peers' partials are read where the exchange put them.

The slow reference is attention/lse_merge.py. Legend: B rows, H heads, V width, N instances.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from data_plane.attention.triton_merge import add_partial
from data_plane.transport.exchange import Channel
from data_plane.transport.gpu.cuda_ipc import GpuExchange


@triton.jit
def merge_returned_kernel(
    out_ptr, lse_ptr, peer_ptr, epoch_ptr, slot_ptr, partial_offset, lse_offset, instance,
    num_instances, num_slots, partial_stride, lse_stride, WIDTH: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (row, head): merge the row's returned partials into out and lse, in place.

    slot_ptr [N, rows] int32: each row's slot at each peer, or -1.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    num_rows, num_heads = tl.num_programs(0), tl.num_programs(1)
    source = tl.arange(0, BLOCK_N)
    slots = tl.load(slot_ptr + source * num_rows + row, mask=source < num_instances, other=-1)
    if tl.max(slots) < 0:
        return
    base = tl.load(peer_ptr + instance)
    partial_ptr = tl.multiple_of((base + partial_offset).to(out_ptr.dtype), 16)
    partial_lse_ptr = tl.multiple_of((base + lse_offset).to(lse_ptr.dtype), 16)
    first_region = (tl.load(epoch_ptr) & 1).to(tl.int32) * num_instances
    column = tl.arange(0, BLOCK_V)
    inside = column < WIDTH
    own = row.to(tl.int64) * num_heads + head
    acc = tl.load(out_ptr + own * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    maximum = tl.load(lse_ptr + own)
    total = tl.where(maximum == float("-inf"), 0.0, 1.0)
    for n in range(num_instances):
        slot = tl.sum(tl.where(source == n, slots, 0))
        if slot >= 0:
            at = ((first_region + n) * num_slots + slot).to(tl.int64)
            row_ptr = partial_ptr + at * partial_stride + head * WIDTH
            partial = tl.load(row_ptr + column, mask=inside, other=0.0)
            partial_lse = tl.load(partial_lse_ptr + at * lse_stride + head)
            acc, total, maximum = add_partial(
                acc, total, maximum, partial.to(tl.float32), partial_lse
            )
    is_empty = total == 0.0
    total = tl.where(is_empty, 1.0, total)
    out = (acc / total).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + own * WIDTH + column, out, mask=inside)
    tl.store(lse_ptr + own, tl.where(is_empty, float("-inf"), maximum + tl.log(total)))


def merge_returned(out_BHV: Tensor, lse_BH: Tensor, exchange: GpuExchange, slot_NB: Tensor) -> None:
    """Merge the partials that a wait for RES found into the rows of out and lse, in place.

    slot_NB: [N, B] int32, each row's slot at each peer, or -1.
    """
    num_rows, num_heads, width = out_BHV.shape
    partial, lse = (exchange.region(Channel.RES, name) for name in ("partial", "lse"))
    assert out_BHV.is_contiguous() and lse_BH.is_contiguous()
    merge_returned_kernel[(num_rows, num_heads)](
        out_BHV, lse_BH, partial.table, partial.epoch, slot_NB, partial.offset, lse.offset,
        partial.instance, len(slot_NB), partial.num_slots, partial.stride_in(out_BHV),
        lse.stride_in(lse_BH), WIDTH=width, BLOCK_V=triton.next_power_of_2(width),
        BLOCK_N=triton.next_power_of_2(len(slot_NB)), num_warps=1,
    )  # fmt: skip
