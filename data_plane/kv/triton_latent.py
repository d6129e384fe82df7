"""Rows of latent attention in one launch each: norms, rotations, the append to frames.

The slow reference is model/attention_kinds/mla.py, and for FP8 attention/fp8_latent.py. Legend: B
rows, C q latent, R kv_lora_rank, P rope, W = R + P, H heads, N nope.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from data_plane.attention.fp8_latent import views
from data_plane.kernels.fp8 import divided
from data_plane.model.rope import RopeTable
from data_plane.model.sizes import NUM_SCALES, token_bytes

GROUPS = tl.constexpr(NUM_SCALES)
_TINY = tl.constexpr(1.1754943508222875e-38)
_BLOCK_H = 16


@triton.jit
def _store_token(
    c, group, column, slot, value_ptr, scale_ptr, R: tl.constexpr, TOKEN: tl.constexpr,
    IS_FP8: tl.constexpr, IN_GROUP: tl.constexpr,
):  # fmt: skip
    """Write c_kv to a slot. c: fp32 [GROUPS, BLOCK_G], rounded to the dtype of KV."""
    inside = (group < GROUPS)[:, None] & (column < IN_GROUP)[None, :]
    at = group[:, None] * IN_GROUP + column[None, :]
    kind = value_ptr.dtype.element_ty
    if IS_FP8:
        scaled, scale = divided(c, _TINY)
        tl.store(value_ptr + slot * TOKEN + at, scaled.to(kind), mask=inside)
        tl.store(scale_ptr + slot * (TOKEN // 4) + group, scale)
    else:
        tl.store(value_ptr + slot * TOKEN + at, c.to(kind), mask=inside)


@triton.jit
def _pair_at(pair, HALF: tl.constexpr, IS_INTERLEAVED: tl.constexpr):
    if IS_INTERLEAVED:
        return 2 * pair, 2 * pair + 1
    else:
        return pair, HALF + pair


@triton.jit
def latent_kernel(
    down_ptr, q_norm_ptr, kv_norm_ptr, cos_ptr, sin_ptr, position_ptr, slot_ptr, q_ptr, kv_ptr,
    value_ptr, scale_ptr, key_ptr, eps, C: tl.constexpr, R: tl.constexpr, P: tl.constexpr,
    TOKEN: tl.constexpr, HAS_Q: tl.constexpr, KEEPS_KV: tl.constexpr, IS_FP8: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Program b: norm row b's q latent and c_kv, rotate its key, append its latent KV to its slot.

    HAS_Q: a row's first C columns are its q latent. KEEPS_KV: latent KV goes to kv_ptr [B, R + P]
    too, for peers. TOKEN: elements of a slot, its bytes in FP8.
    """
    row = tl.program_id(0).to(tl.int64)
    down_row = down_ptr + row * (C + R + P)
    if HAS_Q:
        c_column = tl.arange(0, BLOCK_C)
        in_c = c_column < C
        q = tl.load(down_row + c_column, mask=in_c, other=0.0).to(tl.float32)
        q_kind = q_ptr.dtype.element_ty
        q = (q * tl.rsqrt(tl.sum(q * q, 0) / C + eps)).to(q_kind).to(tl.float32)
        q_weight = tl.load(q_norm_ptr + c_column, mask=in_c, other=0.0).to(tl.float32)
        tl.store(q_ptr + row * C + c_column, (q_weight * q).to(q_kind), mask=in_c)
    IN_GROUP: tl.constexpr = R // GROUPS
    HALF: tl.constexpr = P // 2
    group, column = tl.arange(0, GROUPS), tl.arange(0, BLOCK_G)
    in_r = (group < GROUPS)[:, None] & (column < IN_GROUP)[None, :]
    at = group[:, None] * IN_GROUP + column[None, :]
    kind = down_ptr.dtype.element_ty
    c = tl.load(down_row + C + at, mask=in_r, other=0.0).to(tl.float32)
    c = (c * tl.rsqrt(tl.sum(tl.sum(c * c, 1), 0) / R + eps)).to(kind).to(tl.float32)
    c = (tl.load(kv_norm_ptr + at, mask=in_r, other=0.0).to(tl.float32) * c).to(kind)
    slot = tl.load(slot_ptr + row)
    _store_token(
        c.to(tl.float32), group, column, slot, value_ptr, scale_ptr, R, TOKEN, IS_FP8, IN_GROUP
    )
    pair = tl.arange(0, BLOCK_P)
    in_p = pair < HALF
    first_at, second_at = _pair_at(pair, HALF, IS_INTERLEAVED)
    turn = tl.load(position_ptr + row) * HALF + pair
    cos = tl.load(cos_ptr + turn, mask=in_p, other=0.0)
    sin = tl.load(sin_ptr + turn, mask=in_p, other=0.0)
    rope = down_row + C + R
    first = tl.load(rope + first_at, mask=in_p, other=0.0).to(tl.float32)
    second = tl.load(rope + second_at, mask=in_p, other=0.0).to(tl.float32)
    turned = (first * cos - second * sin).to(kind)
    other = (second * cos + first * sin).to(kind)
    STRIDE: tl.constexpr = TOKEN // 2 if IS_FP8 else TOKEN
    key_row = key_ptr + slot * STRIDE
    key_kind = key_ptr.dtype.element_ty
    tl.store(key_row + first_at, turned.to(key_kind), mask=in_p)
    tl.store(key_row + second_at, other.to(key_kind), mask=in_p)
    if KEEPS_KV:
        kv_row = kv_ptr + row * (R + P)
        tl.store(kv_row + at, c, mask=in_r)
        tl.store(kv_row + R + first_at, turned, mask=in_p)
        tl.store(kv_row + R + second_at, other, mask=in_p)


@triton.jit
def append_kernel(
    kv_ptr, slot_ptr, value_ptr, scale_ptr, key_ptr, R: tl.constexpr, P: tl.constexpr,
    TOKEN: tl.constexpr, IS_FP8: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Program a: append a peer's latent KV to its slot."""
    row = tl.program_id(0).to(tl.int64)
    IN_GROUP: tl.constexpr = R // GROUPS
    group, column = tl.arange(0, GROUPS), tl.arange(0, BLOCK_G)
    in_r = (group < GROUPS)[:, None] & (column < IN_GROUP)[None, :]
    at = group[:, None] * IN_GROUP + column[None, :]
    kv_row = kv_ptr + row * (R + P)
    slot = tl.load(slot_ptr + row)
    c = tl.load(kv_row + at, mask=in_r, other=0.0).to(tl.float32)
    _store_token(c, group, column, slot, value_ptr, scale_ptr, R, TOKEN, IS_FP8, IN_GROUP)
    p = tl.arange(0, BLOCK_P)
    key = tl.load(kv_row + R + p, mask=p < P, other=0.0)
    STRIDE: tl.constexpr = TOKEN // 2 if IS_FP8 else TOKEN
    tl.store(key_ptr + slot * STRIDE + p, key.to(key_ptr.dtype.element_ty), mask=p < P)


@triton.jit
def rotate_kernel(
    q_ptr, cos_ptr, sin_ptr, position_ptr, out_ptr, num_heads, N: tl.constexpr, P: tl.constexpr,
    R: tl.constexpr, IS_INTERLEAVED: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Program (row, head tile): rotate the last P columns of q_ptr [B, H, N + P] into out_ptr's."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    HALF: tl.constexpr = P // 2
    pair = tl.arange(0, BLOCK_P)
    in_p = pair < HALF
    turn = tl.load(position_ptr + row) * HALF + pair
    cos = tl.load(cos_ptr + turn, mask=in_p, other=0.0)[None, :]
    sin = tl.load(sin_ptr + turn, mask=in_p, other=0.0)[None, :]
    is_head = (head < num_heads)[:, None]
    q_row = q_ptr + (row * num_heads + head)[:, None] * (N + P) + N
    out_row = out_ptr + (row * num_heads + head)[:, None] * (R + P) + R
    kind = out_ptr.dtype.element_ty
    if IS_INTERLEAVED and HALF == BLOCK_P:
        # Both of a pair in one access: each thread reads and writes whole pairs.
        p = tl.arange(0, P)
        x = tl.load(q_row + p[None, :], mask=is_head, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(x, [BLOCK_H, HALF, 2]))
        turned = tl.join(first * cos - second * sin, second * cos + first * sin)
        tl.store(out_row + p[None, :], tl.reshape(turned, [BLOCK_H, P]).to(kind), mask=is_head)
    else:
        first_at, second_at = _pair_at(pair, HALF, IS_INTERLEAVED)
        inside = is_head & in_p[None, :]
        first = tl.load(q_row + first_at[None, :], mask=inside, other=0.0).to(tl.float32)
        second = tl.load(q_row + second_at[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(out_row + first_at[None, :], (first * cos - second * sin).to(kind), mask=inside)
        tl.store(out_row + second_at[None, :], (second * cos + first * sin).to(kind), mask=inside)


class LatentFrames:
    """A layer's slots [S, D] for the kernels: plain, or in FP8."""

    def __init__(self, slots_SD: Tensor, rank: int, rope_dim: int) -> None:
        """slots_SD: FramePool.slots of a layer; uint8 [S, bytes of a token] in FP8."""
        self.is_fp8, self.rank, self.rope_dim = slots_SD.dtype == torch.uint8, rank, rope_dim
        self.token = token_bytes(rank, rope_dim) if self.is_fp8 else rank + rope_dim
        self.value, self.scale, self.key = (
            views(slots_SD, rank) if self.is_fp8 else (slots_SD, slots_SD, slots_SD[:, rank:])
        )


def start_rows(
    down_BY: Tensor, q_norm_C: Tensor | None, kv_norm_R: Tensor, rope: RopeTable,
    position_B: Tensor, slot_B: Tensor, frames: LatentFrames, eps: float, keeps_kv: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (normed q latent [B, C], latent KV [B, R + P]); the latter is in the frames too.

    down_BY: [B, C + R + P]; without q_norm [B, R + P], and the first result is empty. Without
    keeps_kv the second is.
    """
    num_rows, rank, rope_dim = len(down_BY), frames.rank, frames.rope_dim
    latent = 0 if q_norm_C is None else len(q_norm_C)
    q_BC = down_BY.new_empty(num_rows, latent)
    kv_BW = down_BY.new_empty(num_rows if keeps_kv else 0, rank + rope_dim)
    assert down_BY.is_contiguous() and down_BY.shape[1] == latent + rank + rope_dim
    assert rank % NUM_SCALES == 0, rank
    latent_kernel[(num_rows,)](
        down_BY, kv_norm_R if q_norm_C is None else q_norm_C, kv_norm_R, rope.cos, rope.sin,
        position_B, slot_B, q_BC, kv_BW, frames.value, frames.scale, frames.key, eps, C=latent,
        R=rank, P=rope_dim, TOKEN=frames.token, HAS_Q=latent > 0, KEEPS_KV=keeps_kv,
        IS_FP8=frames.is_fp8, IS_INTERLEAVED=rope.is_interleaved,
        BLOCK_C=triton.next_power_of_2(max(latent, 1)),
        BLOCK_G=triton.next_power_of_2(rank // NUM_SCALES),
        BLOCK_P=triton.next_power_of_2(rope_dim // 2), num_warps=4,
    )  # fmt: skip
    return q_BC, kv_BW


def append_rows(kv_AW: Tensor, slot_A: Tensor, frames: LatentFrames) -> None:
    """Append peers' latent KV to its slots."""
    rank, rope_dim = frames.rank, frames.rope_dim
    assert kv_AW.is_contiguous()
    append_kernel[(len(kv_AW),)](
        kv_AW, slot_A, frames.value, frames.scale, frames.key, R=rank, P=rope_dim,
        TOKEN=frames.token, IS_FP8=frames.is_fp8,
        BLOCK_G=triton.next_power_of_2(rank // NUM_SCALES),
        BLOCK_P=triton.next_power_of_2(rope_dim), num_warps=2,
    )  # fmt: skip


def absorbed_queries(
    q_BY: Tensor, position_B: Tensor, rope: RopeTable, k_up_HNR: Tensor, rope_dim: int
) -> Tensor:
    """Make absorbed queries [B, H, R + P] of queries [B, H * (N + P)] without a copy."""
    (num_heads, nope, rank), num_rows = k_up_HNR.shape, len(q_BY)
    assert q_BY.is_contiguous()
    out_BHD = q_BY.new_empty(num_rows, num_heads, rank + rope_dim)
    rotate_kernel[(num_rows, triton.cdiv(num_heads, _BLOCK_H))](
        q_BY, rope.cos, rope.sin, position_B, out_BHD, num_heads, N=nope, P=rope_dim, R=rank,
        IS_INTERLEAVED=rope.is_interleaved, BLOCK_H=_BLOCK_H,
        BLOCK_P=triton.next_power_of_2(rope_dim // 2), num_warps=2,
    )  # fmt: skip
    q_BHE = q_BY.view(num_rows, num_heads, nope + rope_dim)
    # cuBLAS reads and writes by strides here: no operand is copied.
    torch.bmm(q_BHE[..., :nope].transpose(0, 1), k_up_HNR, out=out_BHD[..., :rank].transpose(0, 1))
    return out_BHD


def heads_values(partial_BHR: Tensor, v_up_HRV: Tensor) -> Tensor:
    """Apply W_UV to outputs in latent space: [B, H, V], contiguous."""
    out_BHV = partial_BHR.new_empty(*partial_BHR.shape[:2], v_up_HRV.shape[2])
    torch.bmm(partial_BHR.transpose(0, 1), v_up_HRV, out=out_BHV.transpose(0, 1))
    return out_BHV
