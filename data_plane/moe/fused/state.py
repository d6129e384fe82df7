"""The memory of a fused MoE layer in Triton: tuples of pointers, words, queues.

Legend: N instances, R rows of an instance at most (max_rows), K experts a row, X hidden, I expert
width, E experts here, G experts of all instances, B rows of a launch, V shared experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class FusedShape(NamedTuple):
    """Constants of a kernel: sizes, tiles, places in memory."""

    num_instances: int
    max_rows: int
    per_row: int
    hidden: int
    width: int
    """I."""
    num_here: int
    """E, slots of every instance."""
    num_shared: int
    """V; each is one more expert here, visited by all rows of this instance."""
    num_experts: int
    """G."""
    softmax_gate: bool
    num_groups: int
    groups_per_row: int
    weights_normalised: bool
    routed_scale: float
    scale_n: int
    """Rows of an FP8 weight that share a scale; 0: plain."""
    scale_x: int
    block_m: int
    block_n: int
    block_k: int
    gate_m: int
    gate_n: int
    gate_k: int
    gate_parts: int
    """Pieces of the gate's depth, a task each."""
    block_x: int
    parts: int
    """Most tasks of one target's rows, or one source's."""
    pad_n: int
    """The power of two from num_instances up; pad_k, pad_e and pad_g likewise."""
    pad_k: int
    pad_e: int
    pad_g: int
    pad_groups: int
    num_pairs: int
    """Pairs of arrived rows; shared experts' pairs follow."""
    max_items: int
    """Bound of items, groups and row blocks, which shared experts' follow."""
    shared_blocks: int
    at_queue: int
    """[2, queues, max_items]: item + 1 (0: not published), and its drawn tasks."""
    at_source: int
    """[4, N + 1]: of a source: taken in, pairs left, parts returned; of a target: parts sent.
    Source N is this instance.
    """
    at_expert: int
    """[E]: pairs of each expert so far."""
    at_block: int
    """[2, max_items + V * shared_blocks]: done column tiles of `inner` and `product`."""
    at_gate: int
    """[ceil(R / gate_m)]: done tiles."""
    num_counters: int
    dispatch_flag: int
    dispatch_count: int
    dispatch_number: int
    dispatch_weight: int
    dispatch_hidden: int
    combine_flag: int
    combine_hidden: int
    is_card: bool
    """Compiled for a GPU; the interpreter has neither clock nor sleep."""


class FusedState(NamedTuple):
    """Pointers to an instance's memory that outlives launches."""

    peer: Any
    """[N + 2] int64: GpuExchange.table."""
    error: Any
    """[4] int64: the exchange's error word."""
    epoch: Any
    """[1] int64: complete epochs."""
    counter: Any
    """[num_counters] int32: zero between epochs."""
    score: Any
    """[gate_parts, R, G] fp32."""
    chosen: Any
    """[R, K] int64: the slots that each row names; -1: it is not live."""
    weight: Any
    """[R, K] fp32."""
    count: Any
    """[N] int32: rows for each target."""
    row: Any
    """[N, R] int32, ascending."""
    slot: Any
    """[N, R] int32: -1: the row does not go there."""
    size: Any
    """[queues, max_items] int32: tasks of each item."""
    group: Any
    """[max_items + V, 4] int32: expert, first of its pairs, pairs, first row block."""
    block: Any
    """[max_items + V * shared_blocks, 3] int32: expert, first of its pairs, pairs."""
    pair: Any
    """[E + V, N * R] int32, in order of arrival; a shared expert's are fixed."""
    inner: Any
    """[num_pairs + V * R, I], in the dtype of the rows."""
    product: Any
    """[num_pairs + V * R, X], in the dtype of the rows."""
    statistic: Any
    """[6] int64: sweeps, waves, polls without a task, rows sent and returned; on a GPU nanoseconds
    in tasks and launches.
    """


class FusedRows(NamedTuple):
    """Pointers to the rows of one layer."""

    x: Any
    """[B, X]: the input."""
    residual: Any
    """[B, X]: the sums are added to it."""
    live: Any
    """[B] uint8: 0 for a row that visits no expert."""
    out: Any


class FusedWeights(NamedTuple):
    """Pointers to the gate and the experts of one layer."""

    gate: Any
    """[G, X] fp32."""
    gate_bias: Any
    """[G] fp32, only for the choice."""
    number: Any
    """[G, 64] int32: SlotNames.of the layer."""
    load: Any
    """[E] int64: SlotLoads.of."""
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
"""Inner tiles of shared experts; a sweep goes before."""
NUM_QUEUES = tl.constexpr(9)
PAD_QUEUES = tl.constexpr(16)

# Words, each in a line of memory of its own.
WORD = tl.constexpr(32)
FIRST = tl.constexpr(0)
"""By queue: the first item that may have a task left."""
RESERVED = tl.constexpr(9)
"""By queue: its number of items."""
LOCK = tl.constexpr(18)
LEFT = tl.constexpr(19)
STARTED = tl.constexpr(20)
CHOSEN = tl.constexpr(21)
ROUTED = tl.constexpr(22)
TAKEN_IN = tl.constexpr(23)
TO_RETURN = tl.constexpr(24)
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
    """Return the first region of an epoch's parity."""
    return (epoch & 1) * S.num_instances


@triton.jit
def field(base, offset, like_ptr):
    """Return a pointer to a field, of the type of like_ptr."""
    return (base + offset).to(like_ptr.dtype)


@triton.jit
def rows_of(base, offset, like_ptr, region, S: tl.constexpr, WIDTH: tl.constexpr):
    """Return a pointer to the rows of a region in a field of this width, with its alignment.

    The compiler forgets it on a pointer of address plus constant, and with 64-bit offsets.
    """
    return tl.multiple_of(field(base, offset, like_ptr) + region * (S.max_rows * WIDTH), 16)


@triton.jit
def word(state, index):
    """Return a pointer to a word of this epoch."""
    return state.counter + index * WORD


@triton.jit
def of_source(state, number: tl.constexpr, source, S: tl.constexpr):
    """Return a pointer to a number of a source or a target."""
    return state.counter + S.at_source + number * (S.num_instances + 1) + source


@triton.jit
def ready_at(state, place, S: tl.constexpr):
    """Return a pointer to the item + 1 at a place."""
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
    """Count the tasks that copy `count` rows; at least one, for the flag."""
    return tl.minimum(tl.maximum(count, 1), S.parts)
