"""A decode step of a linear attention layer in Triton: one launch behind the projections.

The slow reference is kv.carry_pool.CarryPool.step. Legend: that of attention/delta_rule.py, C
channels of the convolution.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from data_plane.kv.carry_pool import CarryFields, CarryRows
from data_plane.model.attention_kinds.delta import NORM_EPS, DeltaConfig, DeltaWeights

WRONG_STATE = tl.constexpr(32)
BLOCK_V = 32


def step_states(
    config: DeltaConfig,
    weights: DeltaWeights,
    fields: CarryFields,
    rows: CarryRows,
    x_BX: Tensor,
    error: Tensor,
) -> Tensor:
    """Run one token of each row; returns heads' outputs, gated, [B, H, V]: 0 for a dead row.

    error: the exchange's error word. Once it is set, as by a state of another position, nothing is
    folded or recorded, and outputs are worthless.
    """
    channels_BC, gate, decay, beta = config.projections(x_BX, weights)
    out_BHV = x_BX.new_empty(len(x_BX), config.num_heads, config.value_dim)
    delta_step_kernel[(len(x_BX), config.num_heads)](
        channels_BC,
        gate,
        decay,
        beta,
        weights.conv,
        weights.decay_rate,
        weights.decay_bias,
        weights.norm,
        *rows[:2],
        rows.live_B.view(torch.uint8),
        error,
        *fields,
        torch.empty_like(out_BHV, dtype=torch.float32),
        out_BHV,
        *(each.stride(0) for each in (channels_BC, gate, decay, beta, fields.state)),
        fields.channels.stride(0),
        NORM_EPS,
        config.norm_eps,
        config.decay_bound or 0.0,
        HEADS=config.num_heads,
        KEY_HEADS=config.num_key_heads,
        KEY=config.key_dim,
        VALUE=config.value_dim,
        CONV=config.conv_size,
        PLACES=fields.u.shape[1],
        BY_CHANNEL=config.has_channel_decay,
        IS_BOUND=config.decay_bound is not None,
        BLOCK_K=triton.next_power_of_2(config.key_dim),
        BLOCK_V=BLOCK_V,
    )
    return out_BHV


@triton.jit
def _refuse(error_ptr, row, position, folded):
    tl.store(error_ptr + 1, row.to(tl.int64))
    tl.store(error_ptr + 2, position)
    tl.store(error_ptr + 3, folded.to(tl.int64))
    tl.store(error_ptr, WRONG_STATE)


@triton.jit
def _convolved(
    channels_ptr, conv_ptr, ring_ptr, position, column, inside, is_kept, CONV: tl.constexpr,
    RING: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Convolve a token's channels with those before it, and keep those of `is_kept`; fp32."""
    own = tl.load(channels_ptr + column, mask=inside, other=0.0)
    acc = own.to(tl.float32) * tl.load(
        conv_ptr + column * CONV + CONV - 1, mask=inside, other=0.0
    ).to(tl.float32)
    for back in tl.static_range(1, CONV):
        at = position - back
        place = tl.maximum(at, 0) % RING
        seen = tl.load(ring_ptr + place * CHANNELS + column, mask=inside, other=0.0)
        weight = tl.load(conv_ptr + column * CONV + CONV - 1 - back, mask=inside, other=0.0)
        acc += tl.where(at < 0, 0.0, seen.to(tl.float32) * weight.to(tl.float32))
    tl.store(ring_ptr + (position % RING) * CHANNELS + column, own, mask=is_kept)
    acc = acc.to(own.dtype).to(tl.float32)
    return (acc * tl.sigmoid(acc)).to(own.dtype).to(tl.float32)


@triton.jit
def _normed_heads(
    channels_ptr, conv_ptr, ring_ptr, position, column, inside, is_kept, eps, CONV: tl.constexpr,
    RING: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    x = _convolved(
        channels_ptr, conv_ptr, ring_ptr, position, column, inside, is_kept, CONV, RING, CHANNELS
    )
    return x * tl.rsqrt(tl.sum(x * x, 0) + eps)


@triton.jit
def _gated(
    raw_ptr, gate_ptr, norm_ptr, out_ptr, scale, v, BY_CHANNEL: tl.constexpr, VALUE: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    for begin in range(0, VALUE, BLOCK_V):
        columns = begin + v
        is_v = columns < VALUE
        gate = tl.load(gate_ptr + columns, mask=is_v, other=0.0).to(tl.float32)
        weight = tl.sigmoid(gate) if BY_CHANNEL else gate * tl.sigmoid(gate)
        norm = tl.load(norm_ptr + columns, mask=is_v, other=0.0).to(tl.float32)
        o = tl.load(raw_ptr + columns, mask=is_v, other=0.0) * scale * norm * weight
        tl.store(out_ptr + columns, o.to(out_ptr.dtype.element_ty), mask=is_v)


@triton.jit
def _kept(decays_ptr, k, is_k, BY_CHANNEL: tl.constexpr):
    """Return a token's decay of a state: by channel of the key, [BLOCK_K, 1], or one."""
    if BY_CHANNEL:
        kept = tl.exp(tl.load(decays_ptr + k, mask=is_k, other=0.0))[:, None]
    else:
        kept = tl.exp(tl.load(decays_ptr))
    return kept


@triton.jit
def _decay(given, rate, bound, IS_BOUND: tl.constexpr):
    if IS_BOUND:
        decay = bound * tl.sigmoid(rate * given)
    else:
        decay = -rate * tl.where(given > 20.0, given, tl.log(1.0 + tl.exp(given)))
    return decay


@triton.jit
def _kept_decay(
    given_ptr, bias_ptr, rate, decays_ptr, k, is_k, bound, BY_CHANNEL: tl.constexpr,
    IS_BOUND: tl.constexpr,
):  # fmt: skip
    """Make a head's own decays, [BLOCK_K] or one, and keep them."""
    if BY_CHANNEL:
        bias = tl.load(bias_ptr + k, mask=is_k, other=0.0)
        given = tl.load(given_ptr + k, mask=is_k, other=0.0).to(tl.float32)
        decay = _decay(given + bias, rate, bound, IS_BOUND)
        tl.store(decays_ptr + k, decay, mask=is_k)
    else:
        decay = _decay(tl.load(given_ptr).to(tl.float32) + tl.load(bias_ptr), rate, bound, IS_BOUND)
        tl.store(decays_ptr, decay)
    return decay


@triton.jit
def _of_position(
    state_ptr, decays_ptr, keys_ptr, u_ptr, position, folded, head, key_head, k, is_k, columns,
    is_v, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    PLACES: tl.constexpr, BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """Load columns of a state and run them through the records up to a position.

    If all places have a record, the oldest is folded in.
    """
    tile = state_ptr + (head * KEY + k[:, None]) * VALUE + columns[None, :]
    is_tile = is_k[:, None] & is_v[None, :]
    state = tl.load(tile, mask=is_tile, other=0.0)
    for back in tl.static_range(PLACES - 1, 0, -1):
        at = position - back
        if at >= folded:
            of_head, of_key = at % PLACES * HEADS + head, at % PLACES * KEY_HEADS + key_head
            kept = _kept(decays_ptr + of_head * (KEY if BY_CHANNEL else 1), k, is_k, BY_CHANNEL)
            then = tl.load(keys_ptr + of_key * KEY + k, mask=is_k, other=0.0)
            u = tl.load(u_ptr + of_head * VALUE + columns, mask=is_v, other=0.0)
            state = state * kept + then[:, None] * u[None, :]
            if back == PLACES - 1:
                tl.store(tile, state, mask=is_tile)
    return state


@triton.jit
def delta_step_kernel(
    channels_ptr, gate_ptr, decay_ptr, beta_ptr, conv_ptr, rate_ptr, bias_ptr, norm_ptr, frame_ptr,
    position_ptr, live_ptr, error_ptr, state_ptr, decays_ptr, keys_ptr, u_ptr, ring_ptr, folded_ptr,
    raw_ptr, out_ptr, channels_stride, gate_stride, decay_stride, beta_stride, frame_words,
    frame_channels, key_eps, norm_eps, decay_bound, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, CONV: tl.constexpr, PLACES: tl.constexpr,
    BY_CHANNEL: tl.constexpr, IS_BOUND: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Program (row, value head): run a token of the row through the head's state.

    Projections, with strides of rows: channels_ptr [B, C], gate_ptr [B, H * V], decay_ptr [B, H *
    D], beta_ptr [B, H]. Of frame f: state_ptr [H, K, V], decays_ptr [PLACES, H, D], keys_ptr
    [PLACES, J, K], u_ptr [PLACES, H, V] fp32 and folded_ptr [H] int32 at f * frame_words; ring_ptr
    [CONV - 1 + PLACES, C] at f * frame_channels. raw_ptr [B, H, V]: outputs before their norm.
    """
    DECAYS: tl.constexpr = KEY if BY_CHANNEL else 1
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY + HEADS * VALUE
    RING: tl.constexpr = CONV - 1 + PLACES
    row, head = tl.program_id(0), tl.program_id(1)
    key_head = head // (HEADS // KEY_HEADS)
    k, v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    is_k = k < KEY
    out = (row * HEADS + head).to(tl.int64) * VALUE
    if (tl.load(live_ptr + row) == 0) | (tl.load(error_ptr) != 0):
        for begin in range(0, VALUE, BLOCK_V):
            tl.store(out_ptr + out + begin + v, v * 0.0, mask=begin + v < VALUE)
        return
    frame, position = tl.load(frame_ptr + row).to(tl.int64), tl.load(position_ptr + row)
    words = frame * frame_words
    folded = tl.load(folded_ptr + words + head)
    behind = position - folded
    if (behind < 0) | (behind > PLACES - 1):
        _refuse(error_ptr, row, position, folded)
        return
    # The first of the value heads of a key head keeps what is of the key head.
    is_kept = k < tl.where(head % (HEADS // KEY_HEADS) == 0, KEY, 0)
    channels, ring = channels_ptr + row * channels_stride, ring_ptr + frame * frame_channels
    column = key_head * KEY + k
    q = _normed_heads(
        channels, conv_ptr, ring, position, column, is_k, is_kept, key_eps, CONV, RING, CHANNELS
    )
    q *= 1.0 / tl.sqrt(float(KEY))
    column += KEY_HEADS * KEY
    key = _normed_heads(
        channels, conv_ptr, ring, position, column, is_k, is_kept, key_eps, CONV, RING, CHANNELS
    )
    place = position % PLACES
    tl.store(keys_ptr + words + (place * KEY_HEADS + key_head) * KEY + k, key, mask=is_kept)
    own, given = decays_ptr + words + (place * HEADS + head) * DECAYS, head * DECAYS
    decay = _kept_decay(
        decay_ptr + row * decay_stride + given, bias_ptr + given, tl.load(rate_ptr + head), own, k,
        is_k, decay_bound, BY_CHANNEL, IS_BOUND,
    )  # fmt: skip
    kept_key, kept_q, own_score = key * tl.exp(decay), q * tl.exp(decay), tl.sum(q * key, 0)
    beta = tl.sigmoid(tl.load(beta_ptr + row * beta_stride + head).to(tl.float32))
    squares = 0.0
    for begin in range(0, VALUE, BLOCK_V):
        columns, is_v = begin + v, begin + v < VALUE
        state = _of_position(
            state_ptr + words, decays_ptr + words, keys_ptr + words, u_ptr + words, position,
            folded, head, key_head, k, is_k, columns, is_v, HEADS, KEY_HEADS, KEY, VALUE, PLACES,
            BY_CHANNEL,
        )  # fmt: skip
        of_value = 2 * KEY_HEADS * KEY + head * VALUE + columns
        value = _convolved(
            channels, conv_ptr, ring, position, of_value, is_v, is_v, CONV, RING, CHANNELS
        )
        u = (value - tl.sum(state * kept_key[:, None], 0)) * beta
        o = tl.sum(state * kept_q[:, None], 0) + own_score * u
        tl.store(u_ptr + words + (place * HEADS + head) * VALUE + columns, u, mask=is_v)
        tl.store(raw_ptr + out + columns, o, mask=is_v)
        squares += tl.sum(o * o, 0)
    if behind == PLACES - 1:
        # No row goes back before it now. The count is of this head: others may not have folded yet.
        tl.store(folded_ptr + words + head, folded + 1)
    tl.debug_barrier()
    gate, scale = gate_ptr + row * gate_stride + head * VALUE, tl.rsqrt(squares / VALUE + norm_eps)
    _gated(raw_ptr + out, gate, norm_ptr, out_ptr + out, scale, v, BY_CHANNEL, VALUE, BLOCK_V)
