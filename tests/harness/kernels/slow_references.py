"""Slow references of fast paths: plain functions that say what is right, for tests only.

Legend: Q partials, B rows, A attention rows, H heads, D width of a query, V and O width of a
partial, F frames, S slots of a frame or of an expert, W width of KV, T rows or tokens, X hidden,
K experts a row, E experts here, N columns.
"""

import torch
import torch.nn.functional as F


def reference_lse_merge(partial_QBHV, lse_QBH):
    """Merge as lse_merge does, but slowly: two partials at a time, in fp64."""
    out = torch.zeros(partial_QBHV.shape[1:], dtype=torch.float64)
    lse = torch.full(lse_QBH.shape[1:], float("-inf"), dtype=torch.float64)
    for partial, other in zip(partial_QBHV.double(), lse_QBH.double(), strict=True):
        both = torch.logaddexp(lse, other)
        safe = torch.where(both == float("-inf"), 0.0, both)
        out = out * (lse - safe).exp()[..., None] + partial * (other - safe).exp()[..., None]
        lse = both
    return out.float(), lse.float()


def reference_attention(q_AHD, pool_FSW, frames, lengths, scale, layout):
    """Attend as paged_attention does, but slowly, in fp64: one row after the other.

    frames, lengths: as AttentionPlan takes them.
    """
    partial = torch.zeros(len(q_AHD), q_AHD.shape[1], layout.out_width, dtype=torch.float64)
    lse = torch.full(q_AHD.shape[:2], float("-inf"), dtype=torch.float64)
    for row, length in enumerate(lengths):
        if length:
            kv_TW = torch.cat([pool_FSW[frame] for frame in frames[row]])[:length].double()
            key_HTD, value_HTD = layout.chunk_heads(kv_TW, q_AHD.shape[1])
            value_HTO = value_HTD[..., : layout.out_width]
            score_HT = (key_HTD @ q_AHD[row].double()[..., None])[..., 0] * scale
            lse[row] = score_HT.logsumexp(dim=-1)
            partial[row] = (score_HT.softmax(dim=-1)[:, None] @ value_HTO)[:, 0]
    return partial.to(q_AHD.dtype), lse.float()


def slots_of(experts, num_experts):
    """Put these experts into slots 0, 1, ...: [num_experts] int64, -1 for all others."""
    slot_E = torch.full((num_experts,), -1)
    slot_E[list(experts)] = torch.arange(len(experts))
    return slot_E


def reference_experts_forward(x_TX, slot_TK, weight_TK, moe):
    """Run the experts as experts_forward does, but slowly: one row and one expert at a time."""
    y_TX = torch.zeros_like(x_TX)
    for row, (slots, weights) in enumerate(zip(slot_TK.tolist(), weight_TK, strict=True)):
        for slot, weight in zip(slots, weights, strict=True):
            if 0 <= slot < len(moe.mlps):
                mlp = moe.mlps[slot]
                gate, up = mlp.gate_up(x_TX[row]).chunk(2)
                opened = torch.minimum(F.silu(gate), torch.tensor(moe.limit))
                up = torch.clamp(up, min=-moe.limit, max=moe.limit)
                y_TX[row] += weight.to(x_TX.dtype) * mlp.down((opened * up)[None])[0]
    return y_TX


def group_rows(x_TX, local_TK, num_here, num_slots):
    """Lay rows out by expert: (x [E, S, X], count [E] int32, slot [T, K] int64).

    local_TK: int64, the number of each expert among the num_here that are here, any other if it is
    elsewhere. A slot is the place of a pair of row and expert in x.flatten(0, 1); E * S if the
    expert is not here. Rows of an expert keep their order. num_slots: S, at least T, since a row
    visits an expert at most once.
    """
    num_experts, num_rows = num_here, len(x_TX)
    assert num_slots >= num_rows, (num_slots, num_rows)
    is_here_TK = (local_TK >= 0) & (local_TK < num_here)
    # A last column takes the pairs whose expert is elsewhere.
    visits_TE = torch.zeros(num_rows, num_experts + 1, dtype=torch.int32, device=x_TX.device)
    visits_TE.scatter_(1, torch.where(is_here_TK, local_TK, num_experts), 1)
    visits_TE = visits_TE[:, :num_experts]
    before_TE = visits_TE.cumsum(dim=0) - visits_TE
    expert = local_TK.clamp(0, num_experts - 1)
    slot_TK = torch.where(
        is_here_TK, expert * num_slots + before_TE.gather(1, expert), num_experts * num_slots
    )
    # One more row takes what has no place.
    x_grouped = x_TX.new_zeros(num_experts * num_slots + 1, x_TX.shape[1])
    x_grouped.index_copy_(0, slot_TK.flatten(), x_TX.repeat_interleave(local_TK.shape[1], dim=0))
    return (
        x_grouped[:-1].view(num_experts, num_slots, x_TX.shape[1]),
        visits_TE.sum(dim=0, dtype=torch.int32),
        slot_TK,
    )


def ungroup_rows(y_ESX, slot_TK, weight_TK):
    """Sum each row over its experts that are here, weighted: [T, X] in the dtype of y."""
    num_slots = y_ESX.shape[0] * y_ESX.shape[1]
    is_here_TK = slot_TK < num_slots
    y_TKX = y_ESX.flatten(0, 1)[slot_TK.clamp_max(num_slots - 1)].float()
    y_TKX = y_TKX.masked_fill(~is_here_TK[..., None], 0.0)
    return torch.einsum("tkx,tk->tx", y_TKX, weight_TK.float()).to(y_ESX.dtype)


class ReferenceGemm:
    """Grouped GEMM, slowly: one expert at a time, its count read by the host."""

    def prepare(self, weight_ENX):
        """Take the weights as they are, as GroupedGemm.prepare says."""
        return weight_ENX

    def run(self, x_ESX, prepared, count_E):
        """Multiply in fp64, as GroupedGemm.run says; rows that are not defined are NaN."""
        y_ESN = x_ESX.new_full((*x_ESX.shape[:2], prepared.shape[1]), float("nan"))
        for expert, count in enumerate(count_E.tolist()):
            y_ESN[expert, :count] = (
                x_ESX[expert, :count].double() @ prepared[expert].double().T
            ).to(x_ESX.dtype)
        return y_ESN
