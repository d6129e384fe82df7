"""Paged MLA attention over the frames of one instance, in plain torch: the fast CPU path and its slow reference.

Enters: absorbed queries, a layer's frames, a plan of which frames each row reads. Leaves: (partial_o, lse) per row:
lse natural log, fp32, and (0, -inf) for a row that reads nothing. Does not know: routes, other instances.

Legend: A attention rows, H heads, D latent KV width, R kv_lora_rank (the first R of D are the values),
F frames, S = 64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanocp.plan import PAGE_SIZE

_BATCHED_PAGES = 16
"""Rows of at most this many pages are gathered and computed together; longer ones are read in place, one by one."""


class AttentionPlan:
    """Which frames the rows of a step read: made once a step, used by every layer (plan, then run)."""

    def __init__(self, frames: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        """frames[a]: frames of row a in the order of its pages; lengths[a]: its local tokens, all frames but the last
        full."""
        self.num_rows = len(lengths)
        self.frames = frames
        self.lengths = lengths
        short = [row for row in range(self.num_rows) if 0 < len(frames[row]) <= _BATCHED_PAGES]
        self.long = [row for row in range(self.num_rows) if len(frames[row]) > _BATCHED_PAGES]
        self.runs = {row: _runs(frames[row], lengths[row]) for row in self.long}
        self.short = torch.tensor(short, dtype=torch.int64)
        if short:
            width = max(len(frames[row]) for row in short)
            # Frame 0 stands for the missing ones: the mask hides what it holds.
            self.frame_AW = torch.tensor([[*frames[row], *[0] * (width - len(frames[row]))] for row in short])
            length_A = torch.tensor([lengths[row] for row in short])
            self.mask_AT = torch.arange(width * PAGE_SIZE) >= length_A[:, None]


def paged_attention(
    q_AHD: Tensor, pool_FSD: Tensor, plan: AttentionPlan, scale: float, rank: int
) -> tuple[Tensor, Tensor]:
    """(partial_o [A, H, R] in q's dtype, lse [A, H] fp32)."""
    num_heads = q_AHD.shape[1]
    partial = q_AHD.new_zeros(len(q_AHD), num_heads, rank)
    lse = q_AHD.new_full((len(q_AHD), num_heads), float("-inf"), dtype=torch.float32)
    if len(plan.short):
        kv_ATD = pool_FSD[plan.frame_AW].flatten(1, 2)
        score_AHT = torch.bmm(q_AHD[plan.short], kv_ATD.transpose(1, 2)).float().mul_(scale)
        score_AHT.masked_fill_(plan.mask_AT[:, None], float("-inf"))
        lse[plan.short] = score_AHT.logsumexp(dim=-1)
        weight_AHT = score_AHT.softmax(dim=-1).to(q_AHD.dtype)
        partial[plan.short] = torch.bmm(weight_AHT, kv_ATD[..., :rank])
    slots = pool_FSD.flatten(0, 1)
    for row in plan.long:
        partial[row], lse[row] = _read_in_place(q_AHD[row], slots, plan.runs[row], scale, rank)
    return partial, lse


def reference_attention(
    q_AHD: Tensor, pool_FSD: Tensor, frames: Sequence[Sequence[int]], lengths: Sequence[int], scale: float, rank: int
) -> tuple[Tensor, Tensor]:
    """The same, slowly, in fp64: one row at a time, its tokens laid side by side."""
    partial = torch.zeros(len(q_AHD), q_AHD.shape[1], rank, dtype=torch.float64)
    lse = torch.full(q_AHD.shape[:2], float("-inf"), dtype=torch.float64)
    for row, length in enumerate(lengths):
        if length:
            kv_TD = torch.cat([pool_FSD[frame] for frame in frames[row]])[:length].double()
            score_HT = q_AHD[row].double() @ kv_TD.T * scale
            lse[row] = score_HT.logsumexp(dim=-1)
            partial[row] = score_HT.softmax(dim=-1) @ kv_TD[:, :rank]
    return partial.to(q_AHD.dtype), lse.float()


def _read_in_place(
    q_HD: Tensor, slots: Tensor, runs: list[tuple[int, int]], scale: float, rank: int
) -> tuple[Tensor, Tensor]:
    """One row over runs of adjacent slots: no KV is copied."""
    score_HT = torch.cat([q_HD @ slots[begin:end].T for begin, end in runs], dim=1).float().mul_(scale)
    lse_H = score_HT.logsumexp(dim=-1)
    weight_HT = (score_HT - lse_H[:, None]).exp_().to(q_HD.dtype)
    out_HR = q_HD.new_zeros(len(q_HD), rank)
    done = 0
    for begin, end in runs:
        out_HR.addmm_(weight_HT[:, done : done + end - begin], slots[begin:end, :rank])
        done += end - begin
    return out_HR, lse_H


def _runs(frames: Sequence[int], length: int) -> list[tuple[int, int]]:
    """Slots [begin, end) that hold the row's tokens in order, adjacent frames joined."""
    runs: list[tuple[int, int]] = []
    for index, frame in enumerate(frames):
        begin = frame * PAGE_SIZE
        end = begin + min(PAGE_SIZE, length - index * PAGE_SIZE)
        if runs and runs[-1][1] == begin:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((begin, end))
    return runs
