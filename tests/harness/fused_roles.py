"""The slow reference of a fused mixture: a launch for each role, with the same task bodies.

One program runs all tasks of a kind before the next kind begins, so nothing overlaps and nothing is
awaited. The lint of releases reads these kernels too, because there a store and the release that
announces it follow each other in the listing.
"""

import triton
import triton.language as tl

from data_plane.moe.fused_kernel import claim, run_task, sweep, take_in
from data_plane.moe.fused_tasks import (
    INNER,
    OUTPUT,
    RETURN,
    FusedState,
    combine_task,
    dispatch_task,
    field,
    first_region,
)


@triton.jit
def dispatch_role(state, rows, instance, S: tl.constexpr):
    """Send all rows."""
    epoch = tl.load(state.epoch) + 1
    for task in range(S.num_instances * S.parts):
        dispatch_task(task, state, rows, instance, epoch, S)


@triton.jit
def take_in_role(state, rows, experts, instance, S: tl.constexpr):
    """Make one wave of all that has come."""
    epoch = tl.load(state.epoch) + 1
    own = tl.load(state.peer + instance)
    source = tl.arange(0, S.pad_n)
    count_ptr = field(own, S.dispatch_count, rows.count) + first_region(epoch, S)
    is_new = source < S.num_instances
    count = tl.load(count_ptr + source, mask=is_new, other=0)
    take_in(state, experts, own, source, is_new, count, epoch, S)


@triton.jit
def queue_role(state, rows, experts, instance, num_rows, QUEUE: tl.constexpr, S: tl.constexpr):
    """Run all tasks of a queue that are published."""
    epoch = tl.load(state.epoch) + 1
    own = tl.load(state.peer + instance)
    item, task = claim(state, QUEUE, S)
    while item >= 0:
        run_task(QUEUE, item, task, state, rows, experts, own, instance, num_rows, epoch, S)
        item, task = claim(state, QUEUE, S)


@triton.jit
def combine_role(state, rows, instance, num_rows, S: tl.constexpr):
    """Sum what came back for all rows."""
    epoch = tl.load(state.epoch) + 1
    own = tl.load(state.peer + instance)
    for row in range(num_rows):
        combine_task(row + num_rows * 0, state, rows, own, num_rows, epoch, S)


@triton.jit
def sweep_role(state, rows, experts, instance, num_rows, S: tl.constexpr):
    """Make one sweep; for the lint."""
    epoch = tl.load(state.epoch) + 1
    own = tl.load(state.peer + instance)
    sweep(state, rows, experts, own, num_rows, 0, epoch, S)


def run_roles(case):
    """Run the next epoch of every instance, role by role."""
    everyone = range(len(case.fused))
    states = [case.fused[i].state() for i in everyone]
    rows = [case.rows(i) for i in everyone]
    experts = case.experts
    shapes = [case.fused[i].shape for i in everyone]
    for i in everyone:
        dispatch_role[(1,)](states[i], rows[i], i, S=shapes[i])
    for i in everyone:
        take_in_role[(1,)](states[i], rows[i], experts[i], i, S=shapes[i])
        for queue in (INNER, OUTPUT, RETURN):
            queue_role[(1,)](
                states[i], rows[i], experts[i], i, len(rows[i].x), QUEUE=queue.value, S=shapes[i]
            )
    for i in everyone:
        combine_role[(1,)](states[i], rows[i], i, len(rows[i].x), S=shapes[i])
        case.fused[i].counter.zero_()
        case.fused[i].epoch += 1


def state_types(dtype):
    """The types of a FusedState's pointers, for compile_kernel."""
    numbers = dict.fromkeys(FusedState._fields, "*i32")
    numbers |= dict.fromkeys(("peer", "error", "epoch", "statistic"), "*i64")
    numbers |= dict.fromkeys(("inner", "product"), f"*{dtype}")
    return FusedState(**numbers)
