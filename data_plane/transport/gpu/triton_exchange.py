"""The routed exchange in Triton: put rows as a table says, wait for flags, take the rows.

A field is [parity, source, slot, width] in the receiver's memory, at the same offset on every
instance; packed rows have a slot's fields side by side. Flags are [parity, source] int64. For
replays, epochs are on the device: a wait advances its channel's, a put takes its pair's
(cuda_ipc._FOLLOWS). (The paper's section 5.3.)

Only a dispatch's sender knows its rows. So that channel is COUNTED: every instance puts to every
one, and each flag has a count, [parity, source] int32.

Addresses come from peer_ptr [N + 2] int64 (cuda_ipc.GpuExchange.table). Of the host's two words,
the host writes the first, the last term that is over; a wait writes the second, the awaited
instance + 1, or 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from data_plane.transport.gpu.peer_memory import FAR

TERM_OVER = tl.constexpr(16)
"""Added to the error word's first number: the term was over."""
_FAR = tl.constexpr(FAR)
_POLLS_A_LOOK = tl.constexpr(64)
"""Polls of device memory between two looks at the host's."""


@triton.jit
def is_term_over(peer_ptr, num_instances):
    """Return 1 if the host has said that the term is over, else 0."""
    ended = tl.load(tl.load(peer_ptr + num_instances).to(peer_ptr.dtype), volatile=True)
    return (ended >= tl.load(peer_ptr + num_instances + 1)).to(tl.int32)


@triton.jit
def staged(peer_ptr, base, region, target, instance, stage):
    """Return (address, region) for storing rows for a target.

    For a far target that is this instance's memory, `stage` bytes behind the regions.
    """
    is_far = base == _FAR
    own = tl.load(peer_ptr + instance) + stage
    return tl.where(is_far, own, base), tl.where(is_far, target.to(tl.int64), region)


@triton.jit
def _field(
    base,
    offset,
    region,
    num_slots,
    slot,
    like_ptr,
    WIDTH: tl.constexpr,
    ROW_BYTES: tl.constexpr,
):
    """Return a pointer to a slot of a field, of the type of like_ptr.

    With its alignment of 16 bytes, else the compiler would store 2 bytes at a time.
    """
    field_ptr = tl.multiple_of((base + offset).to(like_ptr.dtype), 16)
    if ROW_BYTES:
        stride = ROW_BYTES // (like_ptr.dtype.element_ty.primitive_bitwidth // 8)
        return field_ptr + (region * num_slots + slot) * stride
    else:
        return field_ptr + (region * num_slots + slot) * WIDTH


@triton.jit
def _copy(from_ptr, to_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    for begin in range(0, WIDTH, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        tl.store(
            to_ptr + column, tl.load(from_ptr + column, mask=column < WIDTH), mask=column < WIDTH
        )


@triton.jit
def put_kernel(
    peer_ptr,
    epoch_ptr,
    error_ptr,
    count_ptr,
    row_ptr,
    done_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    flag_offset,
    cell_offset,
    a_offset,
    b_offset,
    c_offset,
    d_offset,
    instance,
    num_slots,
    num_listed,
    cell_stride,
    stage,
    AHEAD: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    COUNTED: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Store rows in the slots at every target, then release its flag.

    Program (target, p) of P, a power of two, stores slots p, p + P, ... of the target. A, B, C, D:
    widths of the fields. HAS_ROWS: row_ptr [N, num_listed] has the row of each slot; else rows are
    dense, by target, then slot. ROW_BYTES: of a packed row, else 0. A target outside the term gets
    nothing; a far one's rows stay here (`staged`).
    """
    target, program = tl.program_id(0), tl.program_id(1)
    num_instances, num_programs = tl.num_programs(0), tl.num_programs(1)
    count = tl.load(count_ptr + target)
    base = tl.load(peer_ptr + target)
    # After an error the rows of this instance are worthless, and peers must not merge them.
    if ((count == 0) & (not COUNTED)) | (base == 0) | (tl.load(error_ptr) != 0):
        return
    epoch = tl.load(epoch_ptr) + AHEAD
    region = (epoch & 1) * num_instances + instance
    is_far = base == _FAR
    if ROW_BYTES:
        base, region = staged(peer_ptr, base, region, target, instance, stage)
    lower = tl.arange(0, BLOCK_N)
    first = tl.sum(tl.load(count_ptr + lower, mask=lower < target, other=0))
    for slot in range(program, count, num_programs):
        if HAS_ROWS:
            row = tl.load(row_ptr + target * num_listed + slot).to(tl.int64)
        else:
            row = (first + slot).to(tl.int64)
        to_ptr = _field(base, a_offset, region, num_slots, slot, a_ptr, A, ROW_BYTES)
        _copy(a_ptr + row * A, to_ptr, A, BLOCK)
        if B:
            to_ptr = _field(base, b_offset, region, num_slots, slot, b_ptr, B, ROW_BYTES)
            _copy(b_ptr + row * B, to_ptr, B, BLOCK)
        if C:
            to_ptr = _field(base, c_offset, region, num_slots, slot, c_ptr, C, ROW_BYTES)
            _copy(c_ptr + row * C, to_ptr, C, BLOCK)
        if D:
            to_ptr = _field(base, d_offset, region, num_slots, slot, d_ptr, D, ROW_BYTES)
            _copy(d_ptr + row * D, to_ptr, D, BLOCK)
    if COUNTED and program == 0:
        tl.store((base + cell_offset + region * cell_stride).to(count_ptr.dtype), count)
    if is_far & (ROW_BYTES > 0):
        return
    # Only one thread releases the flag. Without this barrier the stores of other threads could come
    # after it.
    tl.debug_barrier()
    num_done = tl.atomic_add(done_ptr + target, 1, sem="acq_rel", scope="sys") + 1
    if (num_done & (num_programs - 1)) == 0:
        flag_ptr = (base + flag_offset).to(epoch_ptr.dtype) + region
        tl.atomic_xchg(flag_ptr, epoch, sem="release", scope="sys")


@triton.jit
def wait_kernel(
    peer_ptr,
    epoch_ptr,
    error_ptr,
    count_ptr,
    flag_offset,
    cell_offset,
    instance,
    num_instances,
    channel,
    max_polls,
    cell_stride,
    COUNTED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Advance the channel's epoch and poll until the flag of every source with a count has come.

    One program. COUNTED: it awaits every source of the term and writes their counts to count_ptr,
    zeros for the others and after an error. A newer flag, max_polls or the term's end stops the
    wait. The error word [code, source, epoch awaited, epoch found] int64 keeps the first error,
    after which nothing is awaited; code: channel + 1, plus TERM_OVER.
    """
    epoch = tl.load(epoch_ptr) + 1
    error = tl.load(error_ptr)
    source = tl.arange(0, BLOCK_N)
    address = tl.load(peer_ptr + source, mask=source < num_instances, other=0)
    is_awaited = tl.where(error == 0, address, 0) != 0
    if not COUNTED:
        count = tl.load(count_ptr + source, mask=source < num_instances, other=0)
        is_awaited = tl.where(is_awaited, count, 0) > 0
    base = tl.load(peer_ptr + instance)
    host_ptr = tl.load(peer_ptr + num_instances).to(peer_ptr.dtype)
    flag_ptr = (base + flag_offset).to(epoch_ptr.dtype)
    source_flag_ptr = flag_ptr + (epoch & 1) * num_instances + source
    found = tl.zeros([BLOCK_N], tl.int64)
    num_missing = tl.sum(is_awaited.to(tl.int32))
    num_polls = 0
    is_over = 0
    while (num_missing > 0) & (num_polls < max_polls) & (is_over == 0):
        # Adding zero is the only ordered load that every supported Triton has.
        found = tl.atomic_add(
            source_flag_ptr,
            tl.zeros([BLOCK_N], tl.int64),
            mask=is_awaited,
            sem="acquire",
            scope="sys",
        )
        num_missing = tl.sum((is_awaited & (found < epoch)).to(tl.int32))
        num_polls += 1
        if (num_polls % _POLLS_A_LOOK == 0) | (num_polls == max_polls):
            is_over = is_term_over(peer_ptr, num_instances)
            missing = tl.min(tl.where(is_awaited & (found < epoch), source + 1, BLOCK_N + 1))
            tl.store(host_ptr + 1, tl.where(num_missing > 0, missing, 0).to(tl.int64))
    if (num_polls >= _POLLS_A_LOOK) | (num_polls == max_polls):
        tl.store(host_ptr + 1, epoch * 0)
    is_wrong = is_awaited & (found != epoch)
    first_wrong = tl.min(tl.where(is_wrong, source, BLOCK_N))
    tl.debug_barrier()
    tl.store(epoch_ptr, epoch)
    if COUNTED:
        is_counted = tl.where(first_wrong == BLOCK_N, is_awaited.to(tl.int32), 0) > 0
        region = (epoch & 1) * num_instances + source
        cell_ptr = (base + cell_offset + region * cell_stride).to(count_ptr.dtype)
        came = tl.load(cell_ptr, mask=is_counted, other=0)
        tl.store(count_ptr + source, came, mask=source < num_instances)
    if first_wrong < BLOCK_N:
        tl.store(error_ptr + 1, first_wrong)
        tl.store(error_ptr + 2, epoch)
        tl.store(error_ptr + 3, tl.sum(tl.where(source == first_wrong, found, 0)))
        tl.store(error_ptr, channel + 1 + is_over * TERM_OVER)


@triton.jit
def take_kernel(
    peer_ptr,
    epoch_ptr,
    count_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    a_offset,
    b_offset,
    c_offset,
    d_offset,
    instance,
    num_slots,
    A: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Copy the awaited slots to dense rows, by source and slot."""
    source, program = tl.program_id(0), tl.program_id(1)
    count = tl.load(count_ptr + source)
    if count == 0:
        return
    region = (tl.load(epoch_ptr) & 1) * tl.num_programs(0) + source
    base = tl.load(peer_ptr + instance)
    lower = tl.arange(0, BLOCK_N)
    first = tl.sum(tl.load(count_ptr + lower, mask=lower < source, other=0))
    for slot in range(program, count, tl.num_programs(1)):
        row = (first + slot).to(tl.int64)
        from_ptr = _field(base, a_offset, region, num_slots, slot, a_ptr, A, ROW_BYTES)
        _copy(from_ptr, a_ptr + row * A, A, BLOCK)
        if B:
            from_ptr = _field(base, b_offset, region, num_slots, slot, b_ptr, B, ROW_BYTES)
            _copy(from_ptr, b_ptr + row * B, B, BLOCK)
        if C:
            from_ptr = _field(base, c_offset, region, num_slots, slot, c_ptr, C, ROW_BYTES)
            _copy(from_ptr, c_ptr + row * C, C, BLOCK)
        if D:
            from_ptr = _field(base, d_offset, region, num_slots, slot, d_ptr, D, ROW_BYTES)
            _copy(from_ptr, d_ptr + row * D, D, BLOCK)
