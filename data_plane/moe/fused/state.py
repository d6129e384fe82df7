"""The memory of a fused mixture in Triton: tuples of pointers, words, queues.

Enters: sizes, addresses. Leaves: pointers, published items. Does not know: what a task computes,
who claims it.

Legend: N instances, R rows of an instance at most (max_rows), K experts a row, X hidden, I expert
width, E experts here, G experts of all instances, B rows of a launch, V shared experts.
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
    num_shared: int
    """V; a shared expert is one more expert here, which every row of this instance visits."""
    num_experts: int
    """G."""
    softmax_gate: bool
    num_groups: int
    groups_per_row: int
    weights_normalised: bool
    routed_scale: float
    scale_n: int
    """Rows of an FP8 weight that share a scale; 0 for a plain weight."""
    scale_x: int
    block_m: int
    """Rows of a tile of a product."""
    block_n: int
    block_k: int
    gate_m: int
    """Rows of a tile of the gate's product, which is computed in fp32."""
    gate_n: int
    gate_k: int
    gate_parts: int
    """Pieces of the gate's depth, each a task of its own."""
    block_x: int
    """Columns that a copy or a sum takes at once."""
    parts: int
    """Most tasks that copy the rows for one target, or return those of one source."""
    pad_n: int
    """The power of two from num_instances up; pad_k, pad_e and pad_g likewise."""
    pad_k: int
    pad_e: int
    pad_g: int
    pad_groups: int
    num_pairs: int
    """Pairs that may arrive. Those of a shared expert have the numbers from here on."""
    max_items: int
    """Items of the longest queue, and one that is never published; of groups and row blocks too.

    Groups and row blocks of shared experts come after so many.
    """
    shared_blocks: int
    """Row blocks of a shared expert at most."""
    at_queue: int
    """[2, queues, max_items]: item + 1 of each place (0: not published), and its tasks drawn."""
    at_source: int
    """[4, N + 1]: taken in, pairs left, parts returned of a source; parts sent to a target.

    Source N is this instance's own rows at its shared experts.
    """
    at_expert: int
    """[E]: pairs of each expert so far."""
    at_block: int
    """[2, max_items + V * shared_blocks]: column tiles of `inner` and `product` done, by block."""
    at_gate: int
    """[ceil(R / gate_m)]: tiles done of a row block of the gate's product."""
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
    """[N + 2] int64: addresses of the instances' memory, and more; see GpuExchange.table."""
    error: Any
    """[4] int64: the error word of the exchange."""
    epoch: Any
    """[1] int64: epochs that are complete."""
    counter: Any
    """[num_counters] int32: zero between epochs."""
    seat: Any
    """[G] int64: the instance of each expert."""
    score: Any
    """[gate_parts, R, G] fp32: the gate's product, in pieces of its depth."""
    chosen: Any
    """[R, K] int64: the experts of each row."""
    weight: Any
    """[R, K] fp32."""
    count: Any
    """[N] int32: rows for each target."""
    row: Any
    """[N, R] int32: the rows for each target, ascending."""
    slot: Any
    """[N, R] int32: the place of each row at each target; -1 if it does not go there."""
    size: Any
    """[queues, max_items] int32: tasks of each item."""
    group: Any
    """[max_items + V, 4] int32: expert, first of its pairs, pairs, first row block."""
    block: Any
    """[max_items + V * shared_blocks, 3] int32: expert, first of its pairs, pairs."""
    pair: Any
    """[E + V, N * R] int32: pairs of each expert, in order of arrival; a shared one's are fixed."""
    inner: Any
    """[num_pairs + V * R, I], in the dtype of the rows."""
    product: Any
    """[num_pairs + V * R, X], in the dtype of the rows."""
    statistic: Any
    """[6] int64: sweeps, waves, polls without a task, rows sent to instances and back, and on a GPU
    the programs' nanoseconds in tasks and in launches."""


class FusedRows(NamedTuple):
    """The rows of one layer. Pointers."""

    x: Any
    """[B, X]: what the gate and the experts get."""
    residual: Any
    """[B, X]: what the sums are added to."""
    live: Any
    """[B] uint8: 0 for a row that visits no expert."""
    out: Any
    """[B, X]: the results."""


class FusedWeights(NamedTuple):
    """The gate and the experts of one layer. Pointers; a scale is not read for a plain weight."""

    gate: Any
    """[G, X] fp32."""
    gate_bias: Any
    """[G] fp32, for the choice only; not read for a softmax gate."""
    place: Any
    """[G] int64: the slot of each expert here, -1 if it is elsewhere."""
    gate_up: Any
    """[E + V, 2I, X]."""
    gate_up_scale: Any
    down: Any
    """[E + V, X, I]."""
    down_scale: Any


# Queues, in the order in which a program looks for a task.
RETURN = tl.constexpr(0)
DISPATCH = tl.constexpr(1)
ROUTE = tl.constexpr(2)
CHOOSE = tl.constexpr(3)
GATE = tl.constexpr(4)
OUTPUT = tl.constexpr(5)
INNER = tl.constexpr(6)
COMBINE = tl.constexpr(7)
SHARED = tl.constexpr(8)
"""Inner tiles of shared experts: a program sweeps before it takes one."""
NUM_QUEUES = tl.constexpr(9)
PAD_QUEUES = tl.constexpr(16)

# Words, each in a line of memory of its own.
WORD = tl.constexpr(32)
FIRST = tl.constexpr(0)
"""A word for each queue: the first item that may have a task left."""
RESERVED = tl.constexpr(9)
"""A word for each queue: its items."""
LOCK = tl.constexpr(18)
LEFT = tl.constexpr(19)
"""Programs that have left the launch."""
STARTED = tl.constexpr(20)
CHOSEN = tl.constexpr(21)
"""Rows whose experts are chosen."""
ROUTED = tl.constexpr(22)
"""Targets whose rows are known."""
TAKEN_IN = tl.constexpr(23)
"""Sources taken in."""
TO_RETURN = tl.constexpr(24)
"""Sources taken in that have rows."""
GROUPS = tl.constexpr(25)
BLOCKS = tl.constexpr(26)
COMBINING = tl.constexpr(27)
NUM_WORDS = tl.constexpr(28)

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
def word(state, index):
    """Point to a word of this epoch."""
    return state.counter + index * WORD


@triton.jit
def of_source(state, number: tl.constexpr, source, S: tl.constexpr):
    """Point to a number of a source, or of a target."""
    return state.counter + S.at_source + number * (S.num_instances + 1) + source


@triton.jit
def ready_at(state, place, S: tl.constexpr):
    """Point to the item + 1 at a place; a queue's places begin at queue * max_items."""
    return state.counter + S.at_queue + place


@triton.jit
def publish(state, queue: tl.constexpr, item, size, S: tl.constexpr):
    """Append an item of `size` tasks that can run."""
    slot = tl.atomic_add(word(state, RESERVED + queue), 1, sem="relaxed", scope="gpu")
    place = queue * S.max_items + slot
    tl.store(state.size + place, size)
    tl.debug_barrier()
    ready = slot * 0 + (item + 1)
    tl.atomic_xchg(ready_at(state, place, S), ready, sem="release", scope="gpu")


@triton.jit
def num_parts(count, S: tl.constexpr):
    """Count the tasks that copy `count` rows; without rows one is left, for the flag."""
    return tl.minimum(tl.maximum(count, 1), S.parts)
