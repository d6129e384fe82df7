"""The gated delta rule of linear attention, all in fp32 (Yang et al., arXiv 2412.06464).

A token decays the state S, asks it for its key, and adds the correction u: S' = e^decay S; u = beta
(v - S'k); S = S' + k u; its output is Sq.

Legend: B rows, T tokens, J key heads, H value heads, K width of a key, V of a value, D decays of a
head (1 or K).
"""

from __future__ import annotations

import torch
from torch import Tensor

_HEAD_TOKENS = 64
"""Tokens of a piece whose products are made at once; one decay a head."""
_CHANNEL_TOKENS = 16
"""Tokens of a piece with a decay a channel: products take K times the memory."""


def of_heads(x: Tensor, num_heads: int) -> Tensor:
    """Give each value head its key head's vector: [..., J, K] becomes [..., H, K]."""
    return x.repeat_interleave(num_heads // x.shape[-2], dim=-2)


def add_token(state_BHKV: Tensor, decay_BHD: Tensor, key_BHK: Tensor, u_BHV: Tensor) -> Tensor:
    """Return the states after one more token with the known correction u."""
    return state_BHKV * decay_BHD.exp()[..., None] + key_BHK[..., None] * u_BHV[..., None, :]


def correction(
    state_BHKV: Tensor, decay_BHD: Tensor, key_BHK: Tensor, value_BHV: Tensor, beta_BH: Tensor
) -> Tensor:
    """Return u [B, H, V], a token's correction of the states before it."""
    decayed_key = key_BHK * decay_BHD.exp()
    said_BHV = (state_BHKV * decayed_key[..., None]).sum(dim=-2)
    return (value_BHV - said_BHV) * beta_BH[..., None]


def token_output(
    state_BHKV: Tensor, decay_BHD: Tensor, q_BHK: Tensor, key_BHK: Tensor, u_BHV: Tensor
) -> Tensor:
    """Return [B, H, V], the query's output after a token; state_BHKV is the state before."""
    decayed_q = q_BHK * decay_BHD.exp()
    own_BH1 = (q_BHK * key_BHK).sum(dim=-1, keepdim=True)
    return (state_BHKV * decayed_q[..., None]).sum(dim=-2) + own_BH1 * u_BHV


def many_tokens(
    state_HKV: Tensor,
    q_THK: Tensor,
    key_THK: Tensor,
    value_THV: Tensor,
    decay_THD: Tensor,
    beta_TH: Tensor,
) -> tuple[Tensor, Tensor]:
    """Run tokens of one sequence: (outputs [T, H, V], the state after them)."""
    size = _HEAD_TOKENS if decay_THD.shape[-1] == 1 else _CHANNEL_TOKENS
    outputs = []
    for begin in range(0, len(q_THK), size):
        piece = slice(begin, begin + size)
        q, key, value, decay = (
            x[piece].transpose(0, 1) for x in (q_THK, key_THK, value_THV, decay_THD)
        )
        out_HTV, state_HKV = _piece(state_HKV, q, key, value, decay, beta_TH[piece].T)
        outputs.append(out_HTV.transpose(0, 1))
    return torch.cat(outputs), state_HKV


def _piece(
    state_HKV: Tensor,
    q_HTK: Tensor,
    key_HTK: Tensor,
    value_HTV: Tensor,
    decay_HTD: Tensor,
    beta_HT: Tensor,
) -> tuple[Tensor, Tensor]:
    until_HTD = decay_HTD.cumsum(dim=1)
    from_state = until_HTD.exp()
    beta = beta_HT[..., None]
    said_HTV = (key_HTK * from_state) @ state_HKV
    before = _products(key_HTK, key_HTK, until_HTD).tril(-1) * beta
    u_HTV = torch.linalg.solve_triangular(
        before, (value_HTV - said_HTV) * beta, upper=False, unitriangular=True
    )
    among = _products(q_HTK, key_HTK, until_HTD).tril()
    out_HTV = (q_HTK * from_state) @ state_HKV + among @ u_HTV
    last = until_HTD[:, -1:]
    added = (key_HTK * (last - until_HTD).exp()).transpose(1, 2) @ u_HTV
    return out_HTV, state_HKV * last.exp().transpose(1, 2) + added


def _products(a_HTK: Tensor, b_HTK: Tensor, until_HTD: Tensor) -> Tensor:
    """Return [H, T, T]: token j's b decayed until token i, times a of i; only j <= i is of use."""
    between = (until_HTD[:, :, None] - until_HTD[:, None]).clamp(max=0.0).exp()
    if until_HTD.shape[-1] == 1:
        return (a_HTK @ b_HTK.transpose(1, 2)) * between[..., 0]
    return (a_HTK[:, :, None] * b_HTK[:, None] * between).sum(dim=-1)
