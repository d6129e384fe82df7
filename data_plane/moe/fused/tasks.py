"""The tasks of a fused MoE layer in Triton that carry rows and run experts.

A whole program calls each function. It stores numbers for others, then comes a barrier, then a
release, at the GPU's scope or, for peers, the system's.

Legend: fused/state.py's. A pair is an arrived row and one of its experts, with the number (source *
R + slot) * K + k, its place in `inner` and `product`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from data_plane.kernels.norm import gated_product
from data_plane.moe.fused.state import (
    OUTPUT,
    PAIRS_LEFT,
    PARTS_RETURNED,
    PARTS_SENT,
    RESERVED,
    RETURN,
    field,
    first_region,
    num_parts,
    of_source,
    publish,
    ready_at,
    rows_of,
    word,
)


@triton.jit
def announce(state, part, count, base, done_ptr, flag_ptr, epoch, S: tl.constexpr):
    """End a part of the `count` rows for a peer; the last part releases the flag.

    base: the peer's memory; 0 outside the term.
    """
    if part == 0:
        tl.atomic_add(state.statistic + 3, count, sem="relaxed", scope="gpu")
    # Only one thread releases. Without this barrier the stores of other threads could come after.
    tl.debug_barrier()
    done = tl.atomic_add(done_ptr, 1, sem="acq_rel", scope="sys")
    if (done == num_parts(count, S) - 1) & (base != 0):
        tl.atomic_xchg(flag_ptr, epoch, sem="release", scope="sys")


@triton.jit
def copy(from_ptr, to_ptr, width: tl.constexpr, block: tl.constexpr):
    """Copy `width` elements."""
    for begin in range(0, width, block):
        column = begin + tl.arange(0, block)
        values = tl.load(from_ptr + column, mask=column < width)
        tl.store(to_ptr + column, values, mask=column < width)


@triton.jit
def dispatch_task(target, part, state, rows, instance, epoch, S: tl.constexpr):
    """Send part of the rows for one target, each row once; nothing outside the term."""
    K: tl.constexpr = S.per_row
    X: tl.constexpr = S.hidden
    count = tl.load(state.count + target)
    base = tl.load(state.peer + target)
    region = first_region(epoch, S) + instance
    number_ptr = rows_of(base, S.dispatch_number, state.chosen, region, S, K)
    weight_ptr = rows_of(base, S.dispatch_weight, state.weight, region, S, K)
    hidden_ptr = rows_of(base, S.dispatch_hidden, rows.x, region, S, X)
    for slot in range(part, count, num_parts(count, S)):
        row = tl.load(state.row + target * S.max_rows + slot).to(tl.int64)
        copy(state.chosen + row * K, number_ptr + slot * K, K, S.pad_k)
        copy(state.weight + row * K, weight_ptr + slot * K, K, S.pad_k)
        copy(rows.x + row * X, hidden_ptr + slot * X, X, S.block_x)
    if (part == 0) & (base != 0):
        tl.store(field(base, S.dispatch_count, state.count) + region, count)
    done_ptr = of_source(state, PARTS_SENT, target, S)
    flag_ptr = field(base, S.dispatch_flag, state.epoch) + region
    announce(state, part, count, base, done_ptr, flag_ptr, epoch, S)


@triton.jit
def multiply(
    acc, x, weight_ptr, scale_ptr, expert, column, is_column, begin, k, width: tl.constexpr,
    num_columns: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Add the product of x [BLOCK_M, BLOCK_K] and a tile of an expert's weight to acc.

    The weight is [E, num_columns, width]; column [BLOCK_N] are its rows, k [BLOCK_K] its columns
    from `begin` on. A block's scale multiplies the exact product of e4m3.
    """
    line = expert * num_columns + column
    weight = tl.load(
        weight_ptr + line[None, :] * width + k[:, None],
        mask=is_column[None, :] & (k < width)[:, None],
        other=0.0,
    ).to(x.dtype)
    if S.scale_n:
        block_row = expert * tl.cdiv(num_columns, S.scale_n) + column // S.scale_n
        at = block_row * tl.cdiv(width, S.scale_x) + begin // S.scale_x
        scale = tl.load(scale_ptr + at, mask=is_column, other=0.0)
        acc += tl.dot(x, weight, input_precision="ieee") * scale[None, :]
    else:
        acc = tl.dot(x, weight, acc, input_precision="ieee")
    return acc


@triton.jit
def inner_task(item, task, state, rows, weights, own, epoch, S: tl.constexpr):
    """Compute a tile of silu(gate) * up of an expert's rows in one wave, or a shared expert's."""
    M: tl.constexpr = S.block_m
    N: tl.constexpr = S.block_n
    X: tl.constexpr = S.hidden
    I: tl.constexpr = S.width  # noqa: E741
    expert = tl.load(state.group + item * 4).to(tl.int64)
    count = tl.load(state.group + item * 4 + 2)
    num_blocks = tl.cdiv(count, M)
    # Row blocks of one column tile run side by side, and share its weights.
    tile, index = task // num_blocks, task % num_blocks
    block = tl.load(state.group + item * 4 + 3) + index
    row = index * M + tl.arange(0, M)
    first = tl.load(state.group + item * 4 + 1)
    pair_ptr = state.pair + expert * S.num_instances * S.max_rows + first
    pair = tl.load(pair_ptr + row, mask=row < count, other=0).to(tl.int64)
    x_ptr = rows_of(own, S.dispatch_hidden, state.inner, first_region(epoch, S), S, X)
    # A shared expert gets this instance's rows, each at its place.
    is_shared = expert >= S.num_here
    x_ptr = tl.multiple_of(tl.where(is_shared, rows.x, x_ptr), 16)
    x_row = x_ptr + tl.where(is_shared, row, pair // S.per_row)[:, None] * X
    column = tile * N + tl.arange(0, N)
    gate = tl.zeros([M, N], tl.float32)
    up = tl.zeros([M, N], tl.float32)
    BK: tl.constexpr = S.block_k
    for begin in range(0, X, BK):
        k = begin + tl.arange(0, S.block_k)
        x = tl.load(x_row + k[None, :], mask=(row < count)[:, None] & (k < X)[None, :], other=0.0)
        gate = multiply(
            gate, x, weights.gate_up, weights.gate_up_scale, expert, column, column < I, begin, k,
            X, 2 * I, S,
        )  # fmt: skip
        up = multiply(
            up, x, weights.gate_up, weights.gate_up_scale, expert, I + column, column < I, begin,
            k, X, 2 * I, S,
        )  # fmt: skip
    inner = gated_product(gate, up)
    tl.store(
        state.inner + pair[:, None] * I + column[None, :],
        inner.to(state.inner.dtype.element_ty),
        mask=(row < count)[:, None] & (column < I)[None, :],
    )
    tl.debug_barrier()
    done_ptr = state.counter + S.at_block + block
    done = tl.atomic_add(done_ptr, 1, sem="acq_rel", scope="gpu")
    if done == tl.cdiv(I, N) - 1:
        publish(state, OUTPUT, block, tl.cdiv(X, N), S)


@triton.jit
def output_task(item, task, state, weights, own, epoch, S: tl.constexpr):
    """Compute a tile of the outputs of a row block with complete inner values."""
    M: tl.constexpr = S.block_m
    N: tl.constexpr = S.block_n
    X: tl.constexpr = S.hidden
    I: tl.constexpr = S.width  # noqa: E741
    expert = tl.load(state.block + item * 3).to(tl.int64)
    first, count = tl.load(state.block + item * 3 + 1), tl.load(state.block + item * 3 + 2)
    row = tl.arange(0, M)
    pair_ptr = state.pair + expert * S.num_instances * S.max_rows + first
    pair = tl.load(pair_ptr + row, mask=row < count, other=0).to(tl.int64)
    column = task * N + tl.arange(0, N)
    acc = tl.zeros([M, N], tl.float32)
    BK: tl.constexpr = S.block_k
    for begin in range(0, I, BK):
        k = begin + tl.arange(0, S.block_k)
        x = tl.load(
            state.inner + pair[:, None] * I + k[None, :],
            mask=(row < count)[:, None] & (k < I)[None, :],
            other=0.0,
        )
        acc = multiply(
            acc, x, weights.down, weights.down_scale, expert, column, column < X, begin, k, I, X, S
        )
    tl.store(
        state.product + pair[:, None] * X + column[None, :],
        acc.to(state.product.dtype.element_ty),
        mask=(row < count)[:, None] & (column < X)[None, :],
    )
    tl.debug_barrier()
    done_ptr = state.counter + S.at_block + S.max_items + S.num_shared * S.shared_blocks + item
    done = tl.atomic_add(done_ptr, 1, sem="acq_rel", scope="gpu")
    if done == tl.cdiv(X, N) - 1:
        source = (pair // (S.max_rows * S.per_row)).to(tl.int32)
        source = tl.minimum(source, S.num_instances)
        left_ptr = of_source(state, PAIRS_LEFT, source, S)
        left = tl.atomic_add(left_ptr, -1, mask=row < count, sem="acq_rel", scope="gpu")
        is_due = (row < count) & (left == 1) & (source < S.num_instances)
        publish_returns(state, source, is_due, own, epoch, S)


@triton.jit
def publish_returns(state, source, is_due, own, epoch, S: tl.constexpr):
    """Publish the return to each due source. source, is_due: blocks of one size."""
    one = is_due.to(tl.int32)
    reserved = word(state, RESERVED + RETURN) + source * 0
    slot = tl.atomic_add(reserved, one, mask=is_due, sem="relaxed", scope="gpu")
    count_ptr = field(own, S.dispatch_count, state.count) + first_region(epoch, S) + source
    count = tl.load(count_ptr, mask=is_due, other=0)
    place = RETURN * S.max_items + slot
    tl.store(state.size + place, num_parts(count, S), mask=is_due)
    tl.debug_barrier()
    ready_ptr = ready_at(state, place, S)
    tl.atomic_xchg(ready_ptr, source + 1, mask=is_due, sem="release", scope="gpu")


@triton.jit
def return_task(item, task, state, rows, own, instance, epoch, S: tl.constexpr):
    """Sum part of a source's rows over their experts here, ascending k, and return the sums."""
    R: tl.constexpr = S.max_rows
    K: tl.constexpr = S.per_row
    X: tl.constexpr = S.hidden
    BX: tl.constexpr = S.block_x
    from_region = first_region(epoch, S) + item
    count = tl.load(field(own, S.dispatch_count, state.count) + from_region)
    number_ptr = rows_of(own, S.dispatch_number, state.chosen, from_region, S, K)
    weight_ptr = rows_of(own, S.dispatch_weight, state.weight, from_region, S, K)
    base = tl.load(state.peer + item)
    to_region = first_region(epoch, S) + instance
    sum_ptr = rows_of(base, S.combine_hidden, rows.x, to_region, S, X)
    for slot in range(task, count, num_parts(count, S)):
        pair = (item * R + slot).to(tl.int64) * K
        for begin in range(0, X, BX):
            column = begin + tl.arange(0, S.block_x)
            acc = tl.zeros([BX], tl.float32)
            for k in range(K):
                place = tl.load(number_ptr + slot * K + k).to(tl.int32) - instance * S.num_here
                if (place >= 0) & (place < S.num_here):
                    product = tl.load(
                        state.product + (pair + k) * X + column, mask=column < X, other=0.0
                    )
                    acc += tl.load(weight_ptr + slot * K + k) * product.to(tl.float32)
            tl.store(sum_ptr + slot * X + column, acc.to(rows.x.dtype.element_ty), mask=column < X)
    done_ptr = of_source(state, PARTS_RETURNED, item, S)
    flag_ptr = field(base, S.combine_flag, state.epoch) + to_region
    announce(state, task, count, base, done_ptr, flag_ptr, epoch, S)


@triton.jit
def combine_task(row, state, rows, own, epoch, S: tl.constexpr):
    """Add up a row: instances ascending, then the shared experts, then the residual."""
    X: tl.constexpr = S.hidden
    BX: tl.constexpr = S.block_x
    part_ptr = rows_of(own, S.combine_hidden, rows.x, first_region(epoch, S), S, X)
    for begin in range(0, X, BX):
        column = begin + tl.arange(0, S.block_x)
        acc = tl.zeros([BX], tl.float32)
        for n in range(S.num_instances):
            slot = tl.load(state.slot + n * S.max_rows + row)
            if slot >= 0:
                at = (n * S.max_rows + slot) * X
                acc += tl.load(part_ptr + at + column, mask=column < X, other=0.0).to(tl.float32)
        shared = tl.zeros([BX], tl.float32)
        for v in range(S.num_shared):
            pair = (S.num_pairs + v * S.max_rows + row).to(tl.int64)
            product = tl.load(state.product + pair * X + column, mask=column < X, other=0.0)
            shared += product.to(tl.float32)
        at = row.to(tl.int64) * X + column
        residual = tl.load(rows.residual + at, mask=column < X, other=0.0).to(tl.float32)
        acc = residual + (shared + acc)
        tl.store(
            rows.out + at,
            acc.to(rows.out.dtype.element_ty),
            mask=column < X,
        )
