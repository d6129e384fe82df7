"""The tasks of a fused mixture in Triton: what each does once it can run, and what it publishes.

Enters: a task's item and number, the state of an epoch, rows, weights. Leaves: rows at peers, sums,
items of the next queue. Does not know: who claims tasks, in what order (fused_kernel.py).

Every function is called by a program as a whole. A number that others read is stored, a barrier
follows, and then something is released: at the GPU's scope for programs of this instance, at the
system's for peers.

Legend: N instances, R slots of a source (max_rows), K experts a row, X hidden, I expert width, E
slots for experts here. A pair is a row that arrived and one of its experts: its number is (source *
R + slot) * K + k, so it has a place of its own in `inner` and `product`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class FusedShape(NamedTuple):
    """What is the same in every launch: sizes, tiles, places in memory. A kernel's constant."""

    num_instances: int
    max_rows: int
    per_row: int
    hidden: int
    width: int
    """Columns between an expert's two products, I."""
    num_here: int
    """E."""
    scale_n: int
    """Rows of an FP8 weight that share a scale; 0 for a plain weight."""
    scale_x: int
    block_m: int
    """Rows of a tile of a product."""
    block_n: int
    block_k: int
    block_x: int
    """Columns that a copy or a sum takes at once."""
    parts: int
    """Tasks that copy the rows for one target, or return those of one source."""
    pad_n: int
    """The power of two from num_instances up; pad_k and pad_e likewise."""
    pad_k: int
    pad_e: int
    max_items: int
    """Items of the longest queue, and one that is never published."""
    at_queue: int
    """Where queues begin in `counter`: a word each is 0 to at_queue."""
    at_source: int
    """[4, N]: taken in, pairs left, parts returned of a source; parts sent to a target."""
    at_expert: int
    """[E]: pairs of each expert so far."""
    at_block: int
    """[2, max_items]: column tiles done of a row block, of `inner` and of `product`."""
    num_counters: int
    dispatch_flag: int
    """Bytes from the start of an instance's memory, as the other places of regions."""
    dispatch_count: int
    dispatch_expert: int
    dispatch_weight: int
    dispatch_hidden: int
    combine_flag: int
    combine_hidden: int
    is_card: bool
    """Compiled for a GPU; the interpreter has no clock and nothing to sleep on."""


class FusedState(NamedTuple):
    """The memory of an instance that lives from launch to launch. Pointers."""

    peer: Any
    """[N] int64: addresses of the instances' memory."""
    error: Any
    """[4] int64: the error word of the exchange."""
    epoch: Any
    """[1] int64: epochs that are complete."""
    counter: Any
    """[num_counters] int32: zero between epochs."""
    size: Any
    """[queues, max_items] int32: tasks of each item."""
    group: Any
    """[max_items, 4] int32: expert, first of its pairs, pairs, first row block."""
    block: Any
    """[max_items, 3] int32: expert, first of its pairs, pairs."""
    pair: Any
    """[E, N * R] int32: pairs of each expert, in order of arrival."""
    inner: Any
    """[pairs, I], in the dtype of the rows."""
    product: Any
    """[pairs, X], in the dtype of the rows."""
    statistic: Any
    """[6] int64: sweeps, waves, polls without a task, rows sent to instances and back, and on a GPU
    the programs' nanoseconds in tasks and in launches."""


class FusedRows(NamedTuple):
    """The rows of one layer. Pointers."""

    x: Any
    """[B, X]."""
    expert: Any
    """[B, K] int64."""
    weight: Any
    """[B, K] fp32."""
    count: Any
    """[N] int32: rows for each target; row and slot as triton_rows.route_rows gives them."""
    row: Any
    slot: Any
    out: Any
    """[B, X]: the sums."""


class FusedExperts(NamedTuple):
    """The experts of one layer. Pointers; a scale is not read for a plain weight."""

    place: Any
    """[num_experts] int64: the slot of each expert here, -1 if it is elsewhere."""
    gate_up: Any
    """[E, 2I, X]."""
    gate_up_scale: Any
    down: Any
    """[E, X, I]."""
    down_scale: Any


# Queues, in the order in which a program looks for a task.
RETURN = tl.constexpr(0)
OUTPUT = tl.constexpr(1)
INNER = tl.constexpr(2)
DISPATCH = tl.constexpr(3)
COMBINE = tl.constexpr(4)
NUM_QUEUES = tl.constexpr(5)

# Words, each in a line of memory of its own.
WORD = tl.constexpr(32)
FIRST = tl.constexpr(0)
"""Five words: the first item of each queue that may have a task left."""
RESERVED = tl.constexpr(5)
"""Five words: items of each queue."""
LOCK = tl.constexpr(10)
LEFT = tl.constexpr(11)
"""Programs that have left the launch."""
STARTED = tl.constexpr(12)
TAKEN_IN = tl.constexpr(13)
"""Sources taken in."""
TO_RETURN = tl.constexpr(14)
"""Sources taken in that have rows."""
GROUPS = tl.constexpr(15)
BLOCKS = tl.constexpr(16)
COMBINING = tl.constexpr(17)
NUM_WORDS = tl.constexpr(18)

# Rows of the section of sources.
IS_TAKEN_IN = tl.constexpr(0)
PAIRS_LEFT = tl.constexpr(1)
PARTS_RETURNED = tl.constexpr(2)
PARTS_SENT = tl.constexpr(3)


@triton.jit
def first_region(epoch, S: tl.constexpr):
    """Number the first region of an epoch's parity; the regions of its sources follow."""
    return (epoch & 1) * S.num_instances


@triton.jit
def field(base, offset, like_ptr):
    """Point to a field of an instance's memory, of the type of like_ptr."""
    return (base + offset).to(like_ptr.dtype)


@triton.jit
def rows_of(base, offset, like_ptr, region, S: tl.constexpr, WIDTH: tl.constexpr):
    """Point to the rows of a region in a field of this width.

    They are as aligned as a row is, which the compiler cannot see. It forgets a hint on a pointer
    that is made of an address and a constant, and on one to which 64-bit offsets are added.
    """
    return tl.multiple_of(field(base, offset, like_ptr) + region * (S.max_rows * WIDTH), 16)


@triton.jit
def word(state, index: tl.constexpr):
    """Point to a word of this epoch."""
    return state.counter + index * WORD


@triton.jit
def queue_slot(state, queue: tl.constexpr, is_drawn: tl.constexpr, slot, S: tl.constexpr):
    """Point to a slot of a queue: its item + 1 (0: not published), or how many tasks were drawn."""
    return state.counter + S.at_queue + (2 * queue + is_drawn) * S.max_items + slot


@triton.jit
def publish(state, queue: tl.constexpr, item, size, S: tl.constexpr):
    """Append an item of `size` tasks that can run."""
    slot = tl.atomic_add(word(state, RESERVED + queue), 1, sem="relaxed", scope="gpu")
    tl.store(state.size + queue * S.max_items + slot, size)
    tl.debug_barrier()
    tl.atomic_xchg(
        queue_slot(state, queue, 0, slot, S), (item + 1).to(tl.int32), sem="release", scope="gpu"
    )


@triton.jit
def announce(state, part, count, done_ptr, flag_ptr, epoch, S: tl.constexpr):
    """End a part of the `count` rows for a peer; the last part releases the flag."""
    if part == 0:
        tl.atomic_add(state.statistic + 3, count, sem="relaxed", scope="gpu")
    # Only one thread releases. Without this barrier the stores of other threads could come after.
    tl.debug_barrier()
    done = tl.atomic_add(done_ptr, 1, sem="acq_rel", scope="sys")
    if done == S.parts - 1:
        tl.atomic_xchg(flag_ptr, epoch, sem="release", scope="sys")


@triton.jit
def copy(from_ptr, to_ptr, width: tl.constexpr, block: tl.constexpr):
    """Copy `width` elements."""
    for begin in range(0, width, block):
        column = begin + tl.arange(0, block)
        values = tl.load(from_ptr + column, mask=column < width)
        tl.store(to_ptr + column, values, mask=column < width)


@triton.jit
def dispatch_task(task, state, rows, instance, epoch, S: tl.constexpr):
    """Send part of the rows for one target: one copy of a row, whatever it visits there.

    This instance comes last among the targets, and each begins with another, so that not all send
    to the same one.
    """
    N: tl.constexpr = S.num_instances
    K: tl.constexpr = S.per_row
    X: tl.constexpr = S.hidden
    part, target = task // N, (instance + 1 + task % N) % N
    count = tl.load(rows.count + target)
    base = tl.load(state.peer + target)
    region = first_region(epoch, S) + instance
    expert_ptr = rows_of(base, S.dispatch_expert, rows.expert, region, S, K)
    weight_ptr = rows_of(base, S.dispatch_weight, rows.weight, region, S, K)
    hidden_ptr = rows_of(base, S.dispatch_hidden, rows.x, region, S, X)
    for slot in range(part, count, S.parts):
        row = tl.load(rows.row + target * S.max_rows + slot).to(tl.int64)
        copy(rows.expert + row * K, expert_ptr + slot * K, K, S.pad_k)
        copy(rows.weight + row * K, weight_ptr + slot * K, K, S.pad_k)
        copy(rows.x + row * X, hidden_ptr + slot * X, X, S.block_x)
    if part == 0:
        tl.store(field(base, S.dispatch_count, rows.count) + region, count)
    done_ptr = state.counter + S.at_source + PARTS_SENT * N + target
    flag_ptr = field(base, S.dispatch_flag, state.epoch) + region
    announce(state, part, count, done_ptr, flag_ptr, epoch, S)


@triton.jit
def multiply(
    acc, x, weight_ptr, scale_ptr, expert, column, is_column, begin, k, width: tl.constexpr,
    num_columns: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Add the product of x [BLOCK_M, BLOCK_K] and a tile of an expert's weight to acc.

    The weight is [E, num_columns, width], column [BLOCK_N] are its rows, k [BLOCK_K] its columns
    from `begin` on. e4m3 is exact in bf16; a block's scale multiplies the product.
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
def inner_task(item, task, state, experts, own, epoch, S: tl.constexpr):
    """Compute a tile of silu(gate) * up of an expert's rows in one wave.

    The last column tile of a row block publishes the block's outputs.
    """
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
    x_row = x_ptr + (pair // S.per_row)[:, None] * X
    column = tile * N + tl.arange(0, N)
    gate = tl.zeros([M, N], tl.float32)
    up = tl.zeros([M, N], tl.float32)
    for begin in range(0, X, S.block_k):
        k = begin + tl.arange(0, S.block_k)
        x = tl.load(x_row + k[None, :], mask=(row < count)[:, None] & (k < X)[None, :], other=0.0)
        gate = multiply(
            gate, x, experts.gate_up, experts.gate_up_scale, expert, column, column < I, begin, k,
            X, 2 * I, S,
        )  # fmt: skip
        up = multiply(
            up, x, experts.gate_up, experts.gate_up_scale, expert, I + column, column < I, begin,
            k, X, 2 * I, S,
        )  # fmt: skip
    inner = gate / (1.0 + tl.exp(-gate)) * up
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
def output_task(item, task, state, experts, S: tl.constexpr):
    """Compute a tile of the outputs of a row block, whose inner values are complete.

    The last tile counts the block's pairs as done, and whoever does a source's last pair publishes
    the return to this source.
    """
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
    for begin in range(0, I, S.block_k):
        k = begin + tl.arange(0, S.block_k)
        x = tl.load(
            state.inner + pair[:, None] * I + k[None, :],
            mask=(row < count)[:, None] & (k < I)[None, :],
            other=0.0,
        )
        acc = multiply(
            acc, x, experts.down, experts.down_scale, expert, column, column < X, begin, k, I, X, S
        )
    tl.store(
        state.product + pair[:, None] * X + column[None, :],
        acc.to(state.product.dtype.element_ty),
        mask=(row < count)[:, None] & (column < X)[None, :],
    )
    tl.debug_barrier()
    done_ptr = state.counter + S.at_block + S.max_items + item
    done = tl.atomic_add(done_ptr, 1, sem="acq_rel", scope="gpu")
    if done == tl.cdiv(X, N) - 1:
        source = (pair // (S.max_rows * S.per_row)).to(tl.int32)
        left_ptr = state.counter + S.at_source + PAIRS_LEFT * S.num_instances + source
        left = tl.atomic_add(left_ptr, -1, mask=row < count, sem="acq_rel", scope="gpu")
        publish_returns(state, source, (row < count) & (left == 1), S)


@triton.jit
def publish_returns(state, source, is_due, S: tl.constexpr):
    """Publish the return to each source that is due. source, is_due: blocks of one size."""
    one = is_due.to(tl.int32)
    reserved = word(state, RESERVED + RETURN) + source * 0
    slot = tl.atomic_add(reserved, one, mask=is_due, sem="relaxed", scope="gpu")
    tl.store(state.size + RETURN * S.max_items + slot, one * S.parts, mask=is_due)
    tl.debug_barrier()
    ready_ptr = queue_slot(state, RETURN, 0, slot, S)
    tl.atomic_xchg(ready_ptr, source + 1, mask=is_due, sem="release", scope="gpu")


@triton.jit
def return_task(item, task, state, rows, experts, own, instance, epoch, S: tl.constexpr):
    """Sum part of a source's rows over their experts here, ascending k, and send the sums back."""
    R: tl.constexpr = S.max_rows
    K: tl.constexpr = S.per_row
    X: tl.constexpr = S.hidden
    from_region = first_region(epoch, S) + item
    count = tl.load(field(own, S.dispatch_count, rows.count) + from_region)
    expert_ptr = rows_of(own, S.dispatch_expert, rows.expert, from_region, S, K)
    weight_ptr = rows_of(own, S.dispatch_weight, rows.weight, from_region, S, K)
    base = tl.load(state.peer + item)
    to_region = first_region(epoch, S) + instance
    sum_ptr = rows_of(base, S.combine_hidden, rows.x, to_region, S, X)
    for slot in range(task, count, S.parts):
        pair = (item * R + slot).to(tl.int64) * K
        for begin in range(0, X, S.block_x):
            column = begin + tl.arange(0, S.block_x)
            acc = tl.zeros([S.block_x], tl.float32)
            for k in range(K):
                place = tl.load(experts.place + tl.load(expert_ptr + slot * K + k))
                if place >= 0:
                    product = tl.load(
                        state.product + (pair + k) * X + column, mask=column < X, other=0.0
                    )
                    acc += tl.load(weight_ptr + slot * K + k) * product.to(tl.float32)
            tl.store(sum_ptr + slot * X + column, acc.to(rows.x.dtype.element_ty), mask=column < X)
    done_ptr = state.counter + S.at_source + PARTS_RETURNED * S.num_instances + item
    flag_ptr = field(base, S.combine_flag, state.epoch) + to_region
    announce(state, task, count, done_ptr, flag_ptr, epoch, S)


@triton.jit
def combine_task(row, state, rows, own, num_rows, epoch, S: tl.constexpr):
    """Sum what the instances returned for a row, ascending; 0 if it went nowhere."""
    X: tl.constexpr = S.hidden
    part_ptr = rows_of(own, S.combine_hidden, rows.x, first_region(epoch, S), S, X)
    for begin in range(0, X, S.block_x):
        column = begin + tl.arange(0, S.block_x)
        acc = tl.zeros([S.block_x], tl.float32)
        for n in range(S.num_instances):
            slot = tl.load(rows.slot + n * num_rows + row)
            if slot >= 0:
                at = (n * S.max_rows + slot) * X
                acc += tl.load(part_ptr + at + column, mask=column < X, other=0.0).to(tl.float32)
        tl.store(
            rows.out + row.to(tl.int64) * X + column,
            acc.to(rows.out.dtype.element_ty),
            mask=column < X,
        )
