"""The first tasks of a fused MoE layer in Triton: the gate's product, its choice, the routes.

The slow reference is gate.gate, then kernels.rows.route_rows. Legend: see fused/state.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from data_plane.moe.fused.state import (
    CHOOSE,
    CHOSEN,
    DISPATCH,
    ROUTE,
    ROUTED,
    num_parts,
    publish,
    word,
)
from data_plane.moe.gpu.gate import name_slots

_BLOCK_ROWS = tl.constexpr(64)


@triton.jit
def gate_task(task, state, rows, weights, num_rows, S: tl.constexpr):
    """Compute a tile of the gate's product over a piece of its depth, in fp32."""
    M: tl.constexpr = S.gate_m
    N: tl.constexpr = S.gate_n
    X: tl.constexpr = S.hidden
    G: tl.constexpr = S.num_experts
    DEPTH: tl.constexpr = (X + S.gate_k * S.gate_parts - 1) // (S.gate_k * S.gate_parts) * S.gate_k
    # Row blocks of one tile of the weight run side by side.
    num_blocks = tl.cdiv(num_rows, M)
    block, tile = task % num_blocks, task // num_blocks
    part = tile % S.gate_parts
    row = block * M + tl.arange(0, M)
    expert = tile // S.gate_parts * N + tl.arange(0, N)
    acc = tl.zeros([M, N], tl.float32)
    GK: tl.constexpr = S.gate_k
    for begin in range(part * DEPTH, tl.minimum((part + 1) * DEPTH, X), GK):
        k = begin + tl.arange(0, S.gate_k)
        x = tl.load(
            rows.x + row[:, None] * X + k[None, :],
            mask=(row < num_rows)[:, None] & (k < X)[None, :],
            other=0.0,
        )
        weight = tl.load(
            weights.gate + expert[None, :] * X + k[:, None],
            mask=(expert < G)[None, :] & (k < X)[:, None],
            other=0.0,
        )
        acc = tl.dot(x.to(tl.float32), weight, acc, input_precision="ieee")
    tl.store(
        state.score + (part * S.max_rows + row)[:, None] * G + expert[None, :],
        acc,
        mask=(row < num_rows)[:, None] & (expert < G)[None, :],
    )
    tl.debug_barrier()
    done = tl.atomic_add(state.counter + S.at_gate + block, 1, sem="acq_rel", scope="gpu")
    if done == tl.cdiv(G, N) * S.gate_parts - 1:
        publish(state, CHOOSE, block, tl.minimum(num_rows - block * M, M), S)


@triton.jit
def best_of(value, is_left, number):
    """Find the highest of the values left, of equal ones the first: (value, its number)."""
    highest = tl.max(tl.where(is_left, value, float("-inf")), 0)
    is_lower = (value < highest) | (is_left == 0)
    return highest, tl.min(tl.where(is_lower, 2147483647, number), 0)


@triton.jit
def in_best_groups(choice, expert, is_expert, S: tl.constexpr):
    """Find the experts of the best groups, by the sum of their best two or by their best: bool."""
    group_of = expert // (S.num_experts // S.num_groups)
    group = tl.arange(0, S.pad_groups)
    PAD_GROUPS: tl.constexpr = S.pad_groups
    score = tl.full([PAD_GROUPS], float("-inf"), tl.float32)
    for each in range(S.num_groups):
        own = is_expert & (group_of == each)
        total, best = best_of(choice, own, expert)
        if not S.softmax_gate:
            second, _ = best_of(choice, own & (expert != best), expert)
            total += second
        score = tl.where(group == each, total, score)
    is_left = group < S.num_groups
    is_in = expert < 0
    for _ in range(S.groups_per_row):
        _, best = best_of(score, is_left, group)
        is_left = is_left & (group != best)
        is_in = is_in | (group_of == best)
    return is_in


@triton.jit
def choose_task(item, task, state, rows, weights, instance, num_rows, S: tl.constexpr):
    """Choose a row's experts, as gate.gate does, and name their slots; ties go to the lowest."""
    G: tl.constexpr = S.num_experts
    row = item * S.gate_m + task
    expert = tl.arange(0, S.pad_g)
    is_expert = expert < G
    PAD_G: tl.constexpr = S.pad_g
    logit = tl.zeros([PAD_G], tl.float32)
    for part in range(S.gate_parts):
        score_ptr = state.score + (part * S.max_rows + row) * G + expert
        logit += tl.load(score_ptr, mask=is_expert, other=0.0)
    if S.softmax_gate:
        logit = tl.where(is_expert, logit, float("-inf"))
        score = tl.exp(logit - tl.max(logit, 0))
        score = score / tl.sum(score, 0)
        choice = score
    else:
        score = 1.0 / (1.0 + tl.exp(-logit))
        choice = score + tl.load(weights.gate_bias + expert, mask=is_expert, other=0.0)
    if S.groups_per_row < S.num_groups:
        is_in = in_best_groups(choice, expert, is_expert, S)
        choice = tl.where(is_in, choice, float("-inf"))
    k = tl.arange(0, S.pad_k)
    chosen = k * 0
    PAD_K: tl.constexpr = S.pad_k
    weight = tl.zeros([PAD_K], tl.float32)
    is_left = is_expert
    for each in range(S.per_row):
        _, best = best_of(choice, is_left, expert)
        is_left = is_left & (expert != best)
        chosen = tl.where(k == each, best, chosen)
        weight = tl.where(k == each, tl.sum(tl.where(expert == best, score, 0.0), 0), weight)
    if S.weights_normalised:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    is_live = tl.load(rows.live + row) != 0
    number = name_slots(weights.number, chosen, row + instance, is_live, k < S.per_row)
    tl.store(state.chosen + row * S.per_row + k, number, mask=k < S.per_row)
    tl.store(state.weight + row * S.per_row + k, weight * S.routed_scale, mask=k < S.per_row)
    tl.debug_barrier()
    done = tl.atomic_add(word(state, CHOSEN), 1, sem="acq_rel", scope="gpu")
    if done == num_rows - 1:
        publish(state, ROUTE, 0, S.num_instances, S)


@triton.jit
def route_task(task, state, instance, num_rows, S: tl.constexpr):
    """Find the rows that name a slot of one target, and publish their dispatch.

    Targets' order differs by instance, so not all send to one at a time.
    """
    target = (instance + 1 + task) % S.num_instances
    k = tl.arange(0, S.pad_k)
    count, first = target * 0, target * S.num_here
    for begin in range(0, num_rows, _BLOCK_ROWS):
        row = begin + tl.arange(0, _BLOCK_ROWS)
        is_pair = (row < num_rows)[:, None] & (k < S.per_row)[None, :]
        pair_ptr = state.chosen + row[:, None] * S.per_row + k[None, :]
        number = tl.load(pair_ptr, mask=is_pair, other=-1)
        is_there = (number >= first) & (number < first + S.num_here)
        visits = tl.max(is_there.to(tl.int32), 1) > 0
        slot = count + tl.cumsum(visits.to(tl.int32), 0) - 1
        tl.store(state.row + target * S.max_rows + slot, row, mask=visits)
        slot_ptr = state.slot + target * S.max_rows + row
        tl.store(slot_ptr, tl.where(visits, slot, -1), mask=row < num_rows)
        count += tl.sum(visits.to(tl.int32), 0)
    tl.store(state.count + target, count)
    publish(state, DISPATCH, target, num_parts(count, S), S)
    tl.atomic_add(word(state, ROUTED), 1, sem="release", scope="gpu")
