"""The gate on a GPU in two launches: scores in pieces of the depth, then each row's slots.

The slow reference, with the legend, is moe/gate.py. A weight enters as the exact sum of three bf16
numbers, so a score's error is fp32's: at most (width + 3) * 2**-23 of the sum of the products'
magnitudes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from data_plane.model.config import ModelConfig
from data_plane.model.weights import MoeWeights
from nanocp.values.experts import MAX_REPLICAS


class ScoreTiles(NamedTuple):
    """The cut of the product."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


TILES_BF16 = ScoreTiles(64, 32, 64, 4, 3)
TILES_FP32 = ScoreTiles(32, 32, 16, 4, 2)
NUM_PROGRAMS = 128
"""About the multiprocessors of a Hopper GPU: the depth is cut for this number."""
MAX_PARTS = 32
_WIDTH = tl.constexpr(1 + MAX_REPLICAS)


@triton.jit
def scores_kernel(
    x_ptr, weight_ptr, score_ptr, num_rows, num_experts, width, depth, IS_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (expert tile, row tile, part): scores of a piece of the depth, [parts, B, E] fp32.

    IS_SPLIT: rows are bf16.
    """
    part = tl.program_id(2)
    expert = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in range(part * depth, tl.minimum((part + 1) * depth, width), BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        in_k = k < width
        x = tl.load(
            x_ptr + row[:, None] * width + k[None, :],
            mask=(row < num_rows)[:, None] & in_k[None, :],
            other=0.0,
        )
        weight = tl.load(
            weight_ptr + expert[None, :] * width + k[:, None],
            mask=(expert < num_experts)[None, :] & in_k[:, None],
            other=0.0,
        )
        if IS_SPLIT:
            high = weight.to(tl.bfloat16)
            rest = weight - high.to(tl.float32)
            middle = rest.to(tl.bfloat16)
            low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
            acc = tl.dot(x, low, acc)
            acc = tl.dot(x, middle, acc)
            acc = tl.dot(x, high, acc)
        else:
            acc = tl.dot(x.to(tl.float32), weight, acc, input_precision="ieee")
    tl.store(
        score_ptr + (part * num_rows + row)[:, None] * num_experts + expert[None, :],
        acc,
        mask=(row < num_rows)[:, None] & (expert < num_experts)[None, :],
    )


@triton.jit
def _best(value, is_left, number):
    """Find the number of the highest value left, of equal ones the first; NaN is allowed."""
    highest = tl.max(tl.max(tl.where(is_left, value, float("-inf")), 1), 0)
    is_lower = (value < highest) | (is_left == 0)
    return tl.min(tl.min(tl.where(is_lower, 2147483647, number), 1), 0)


@triton.jit
def name_slots(table_ptr, expert, row, is_live, inside):
    """Name a row's slots (rows.name_slots). row: its place plus the seat."""
    ptr = table_ptr + expert * _WIDTH
    replicas = tl.load(ptr, mask=inside, other=1)
    number = tl.load(ptr + 1 + row % replicas, mask=inside, other=0)
    return tl.where(is_live, number, -1).to(tl.int64)


@triton.jit
def choose_kernel(
    score_ptr, bias_ptr, live_ptr, table_ptr, number_ptr, weight_ptr, num_rows, seat, routed_scale,
    PARTS: tl.constexpr, E: tl.constexpr, K: tl.constexpr, G: tl.constexpr,
    GROUPS_A_ROW: tl.constexpr, IS_SOFTMAX: tl.constexpr, HAS_BIAS: tl.constexpr,
    IS_NORMALISED: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program b: choose row b's experts, as gate.gate does, and name their slots."""
    row = tl.program_id(0)
    IN_GROUP: tl.constexpr = E // G
    group, place = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_P)
    number = group[:, None] * IN_GROUP + place[None, :]
    is_expert = (group < G)[:, None] & (place < IN_GROUP)[None, :]
    logit = tl.zeros([BLOCK_G, BLOCK_P], tl.float32)
    for part in tl.static_range(PARTS):
        score_row = score_ptr + (part * num_rows + row) * E
        logit += tl.load(score_row + number, mask=is_expert, other=0.0)
    if IS_SOFTMAX:
        logit = tl.where(is_expert, logit, float("-inf"))
        score = tl.exp(logit - tl.max(tl.max(logit, 1), 0))
        score = score / tl.sum(tl.sum(score, 1), 0)
    else:
        score = 1.0 / (1.0 + tl.exp(-logit))
    choice = score
    if HAS_BIAS:
        choice += tl.load(bias_ptr + number, mask=is_expert, other=0.0)
    is_left = is_expert
    if GROUPS_A_ROW < G:
        highest = tl.max(tl.where(is_left, choice, float("-inf")), 1)
        group_score = highest
        if not IS_SOFTMAX:
            is_lower = (choice < highest[:, None]) | (is_left == 0)
            first = tl.min(tl.where(is_lower, 2147483647, number), 1)
            others = is_left & (number != first[:, None])
            group_score += tl.max(tl.where(others, choice, float("-inf")), 1)
        is_open = group < G
        is_in = group < 0
        for _ in tl.static_range(GROUPS_A_ROW):
            highest_group = tl.max(tl.where(is_open, group_score, float("-inf")), 0)
            is_lower_group = (group_score < highest_group) | (is_open == 0)
            best_group = tl.min(tl.where(is_lower_group, 2147483647, group), 0)
            is_open = is_open & (group != best_group)
            is_in = is_in | (group == best_group)
        is_left = is_left & is_in[:, None]
    k = tl.arange(0, BLOCK_K)
    chosen = k * 0
    weight = tl.zeros([BLOCK_K], tl.float32)
    for each in tl.static_range(K):
        best = _best(choice, is_left, number)
        is_left = is_left & (number != best)
        chosen = tl.where(k == each, best, chosen)
        # A place behind a group's last expert has the number of the next group's first.
        own = tl.sum(tl.sum(tl.where(is_expert & (number == best), score, 0.0), 1), 0)
        weight = tl.where(k == each, own, weight)
    if IS_NORMALISED:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    is_live = tl.load(live_ptr + row) != 0
    slot = name_slots(table_ptr, chosen, row + seat, is_live, k < K)
    tl.store(number_ptr + row * K + k, slot, mask=k < K)
    tl.store(weight_ptr + row * K + k, weight * routed_scale, mask=k < K)


def gate_scores(x_BX: Tensor, gate_EX: Tensor) -> Tensor:
    """Multiply rows with the gate's weight, in pieces of the depth: [parts, B, E] fp32."""
    (num_rows, width), num_experts = x_BX.shape, len(gate_EX)
    assert x_BX.is_contiguous() and gate_EX.is_contiguous()
    is_split = x_BX.dtype == torch.bfloat16
    tiles = TILES_BF16 if is_split else TILES_FP32
    columns = min(tiles.columns, max(16, triton.next_power_of_2(num_experts)))
    grid = triton.cdiv(num_experts, columns), triton.cdiv(num_rows, tiles.rows)
    steps = triton.cdiv(width, tiles.depth)
    steps_a_part = triton.cdiv(steps, min(MAX_PARTS, max(1, NUM_PROGRAMS // (grid[0] * grid[1]))))
    parts = triton.cdiv(steps, steps_a_part)
    score = gate_EX.new_empty(parts, num_rows, num_experts)
    scores_kernel[(*grid, parts)](
        x_BX, gate_EX, score, num_rows, num_experts, width, steps_a_part * tiles.depth,
        IS_SPLIT=is_split, BLOCK_M=tiles.rows, BLOCK_N=columns, BLOCK_K=tiles.depth,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return score


def gate(
    x_BX: Tensor, moe: MoeWeights, config: ModelConfig, live_B: Tensor, number_ER: Tensor, seat: int
) -> tuple[Tensor, Tensor]:
    """Return each row's slots [B, K] int64 (rows.name_slots) and their weights [B, K] fp32."""
    num_rows, per_row = len(x_BX), config.num_experts_per_token
    number_BK = x_BX.new_empty(num_rows, per_row, dtype=torch.int64)
    weight_BK = x_BX.new_empty(num_rows, per_row, dtype=torch.float32)
    if not num_rows:
        return number_BK, weight_BK
    score = gate_scores(x_BX, moe.gate)
    choose_kernel[(num_rows,)](
        score, moe.gate if moe.gate_bias is None else moe.gate_bias,
        live_B.view(torch.uint8), number_ER, number_BK, weight_BK, num_rows, seat,
        config.routed_scale, PARTS=len(score), E=config.num_experts, K=per_row,
        G=config.num_groups, GROUPS_A_ROW=config.num_groups_per_token,
        IS_SOFTMAX=config.softmax_gate, HAS_BIAS=moe.gate_bias is not None,
        IS_NORMALISED=config.weights_normalised,
        BLOCK_G=triton.next_power_of_2(config.num_groups),
        BLOCK_P=triton.next_power_of_2(config.num_experts // config.num_groups),
        BLOCK_K=triton.next_power_of_2(per_row), num_warps=1,
    )  # fmt: skip
    return number_BK, weight_BK
