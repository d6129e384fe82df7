"""The slow reference of a fused mixture: a launch for each role, with the same task bodies."""

import triton
import triton.language as tl

from data_plane.moe.fused.kernel import next_task, run_task, start, sweep, take_in
from data_plane.moe.fused.state import (
    CHOOSE,
    DISPATCH,
    GATE,
    INNER,
    OUTPUT,
    RETURN,
    ROUTE,
    SHARED,
    FusedState,
    field,
    first_region,
    num_parts,
)
from data_plane.moe.fused.tasks import combine_task, dispatch_task


@triton.jit(do_not_specialize=["num_rows"])
def start_role(state, num_rows, S: tl.constexpr):
    """Publish what needs no peer."""
    start(state, num_rows, S)


@triton.jit
def dispatch_role(state, rows, instance, S: tl.constexpr):
    """Send all rows; their routes are known. For the lint."""
    epoch = tl.load(state.epoch) + 1
    for target in range(S.num_instances):
        for part in range(num_parts(tl.load(state.count + target), S)):
            dispatch_task(target, part, state, rows, instance, epoch, S)


@triton.jit
def take_in_role(state, weights, instance, S: tl.constexpr):
    """Make one wave of all that has come."""
    epoch = tl.load(state.epoch) + 1
    own = tl.load(state.peer + instance)
    source = tl.arange(0, S.pad_n)
    count_ptr = field(own, S.dispatch_count, state.count) + first_region(epoch, S)
    is_new = source < S.num_instances
    count = tl.load(count_ptr + source, mask=is_new, other=0)
    take_in(state, weights, instance, own, source, is_new, count, epoch, S)


@triton.jit(do_not_specialize=["instance", "num_rows"])
def queue_role(state, rows, weights, instance, num_rows, QUEUE: tl.constexpr, S: tl.constexpr):
    """Run all tasks of a queue that are published."""
    epoch = tl.load(state.epoch) + 1
    own = tl.load(state.peer + instance)
    _, item, task = next_task(state, QUEUE, QUEUE + 1, S)
    while item >= 0:
        run_task(QUEUE, item, task, state, rows, weights, own, instance, num_rows, epoch, S)
        _, item, task = next_task(state, QUEUE, QUEUE + 1, S)


@triton.jit
def combine_role(state, rows, instance, num_rows, S: tl.constexpr):
    """Add up all rows."""
    epoch = tl.load(state.epoch) + 1
    own = tl.load(state.peer + instance)
    for row in range(num_rows):
        combine_task(row + num_rows * 0, state, rows, own, epoch, S)


@triton.jit
def sweep_role(state, weights, instance, num_rows, S: tl.constexpr):
    """Make one sweep; for the lint."""
    epoch = tl.load(state.epoch) + 1
    own = tl.load(state.peer + instance)
    sweep(state, weights, instance, own, num_rows, 0, 0, epoch, S)


def run_queues(case, instance, *queues):
    """Run all tasks of these queues of an instance's next epoch, one queue after the other."""
    fused, (rows, weights) = case.fused[instance], case.arguments(instance)
    for queue in queues:
        queue_role[(1,)](
            fused.state(), rows, weights, instance, len(rows.x), QUEUE=queue.value, S=fused.shape
        )


def run_gate(case, instance):
    """Run the gate of an instance's next epoch."""
    num_rows, fused = len(case.arguments(instance)[0].x), case.fused[instance]
    start_role[(1,)](fused.state(), num_rows, S=fused.shape)
    run_queues(case, instance, GATE, CHOOSE)


def run_roles(case):
    """Run the next epoch of every instance, role by role."""
    everyone = range(len(case.fused))
    for i in everyone:
        run_gate(case, i)
        run_queues(case, i, ROUTE, DISPATCH)
    for i in everyone:
        fused, (_, weights) = case.fused[i], case.arguments(i)
        take_in_role[(1,)](fused.state(), weights, i, S=fused.shape)
        run_queues(case, i, INNER, SHARED, OUTPUT, RETURN)
    for i in everyone:
        fused, (rows, _) = case.fused[i], case.arguments(i)
        combine_role[(1,)](fused.state(), rows, i, len(rows.x), S=fused.shape)
        fused.counter.zero_()
        fused.epoch += 1


def state_types(dtype):
    """The types of a FusedState's pointers, for compile_kernel."""
    numbers = dict.fromkeys(FusedState._fields, "*i32")
    numbers |= dict.fromkeys(("peer", "error", "epoch", "statistic", "chosen"), "*i64")
    numbers |= dict.fromkeys(("score", "weight"), "*fp32")
    numbers |= dict.fromkeys(("inner", "product"), f"*{dtype}")
    return FusedState(**numbers)
