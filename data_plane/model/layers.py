"""The arithmetic of a decoder layer, but for attention and experts: pure functions.

Legend: that of attention_kinds/kind.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from data_plane.model.config import ModelConfig
from data_plane.model.norm import rms_norm
from data_plane.model.rope import RopeTable
from data_plane.model.weights import (
    LayerWeights,
    LogitsWeights,
    MlpWeights,
    MoeWeights,
    MtpWeights,
)


def attention_rows(
    x_BX: Tensor, position_B: Tensor, layer: LayerWeights, rope: RopeTable, config: ModelConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Project hidden rows to (wire_q [B, C], new KV [B, W], queries [B, H, D])."""
    normed_BX = rms_norm(x_BX, layer.input_norm, config.norm_eps)
    wire_q_BC, kv_BW = config.attention.inputs(normed_BX, position_B, layer.attention, rope)
    return wire_q_BC, kv_BW, attention_queries(wire_q_BC, position_B, layer, rope, config)


def attention_queries(
    wire_q_BC: Tensor, position_B: Tensor, layer: LayerWeights, rope: RopeTable, config: ModelConfig
) -> Tensor:
    """Make a step's queries of wire_q, [B, H, D]."""
    return config.attention.queries(wire_q_BC, position_B, layer.attention, rope)


def finish_attention(partial_BHO: Tensor, layer: LayerWeights, config: ModelConfig) -> Tensor:
    """Turn partial outputs into heads' values [B, H, V], before or after the LSE merge."""
    return config.attention.finish(partial_BHO, layer.attention)


def gated_heads(x_BX: Tensor, o_BHV: Tensor, layer: LayerWeights, config: ModelConfig) -> Tensor:
    """Scale the heads' values by the gates, if any, of the layer's input x_BX."""
    if layer.attention.gate is None:
        return o_BHV
    return gate_heads(rms_norm(x_BX, layer.input_norm, config.norm_eps), o_BHV, layer, config)


def gate_heads(
    normed_BX: Tensor, o_BHV: Tensor, layer: LayerWeights, config: ModelConfig
) -> Tensor:
    """Scale the heads' values by the gates, if any, of the layer's normed input."""
    if layer.attention.gate is None:
        return o_BHV
    gate_BG: Tensor = layer.attention.gate(normed_BX).sigmoid()
    return o_BHV * gate_BG.view(len(o_BHV), config.attention.num_heads, -1)


def output_projection(o_BHV: Tensor, layer: LayerWeights) -> Tensor:
    """Project the heads' outputs to hidden rows, [B, X]."""
    return layer.o_proj(o_BHV.flatten(1))


def after_attention(
    x_BX: Tensor, o_BHV: Tensor, layer: LayerWeights, rope: RopeTable, config: ModelConfig
) -> tuple[Tensor, Tensor]:
    """Add attention to hidden rows: (the rows [B, X], the rows normed for the layer's MLP)."""
    x_BX = x_BX + output_projection(o_BHV, layer)
    return x_BX, rms_norm(x_BX, layer.post_attention_norm, config.norm_eps)


def append(slots_SW: Tensor, slot_B: Tensor, kv_BW: Tensor) -> None:
    """Write one token of each row to its slot (frame * 64 + offset) of a layer's frames."""
    slots_SW.index_copy_(0, slot_B, kv_BW)


def gated_mlp(x_BX: Tensor, mlp: MlpWeights) -> Tensor:
    """Run a gated MLP on rows: down(silu(gate) * up), within its limit, [B, X]."""
    return mlp.down(gated(mlp.gate_up(x_BX), mlp.limit))


def gated(gate_up_BI: Tensor, limit: float) -> Tensor:
    """Return silu(gate) * up of rows [B, 2I]: silu(gate) at most limit, up from -limit to it."""
    gate_BI, up_BI = gate_up_BI.chunk(2, dim=-1)
    if limit == math.inf:
        return F.silu(gate_BI) * up_BI
    return F.silu(gate_BI).clamp(max=limit) * up_BI.clamp(-limit, limit)


def shared_experts(
    x_BX: Tensor, moe: MoeWeights, mlp: Callable[[Tensor, MlpWeights], Tensor] = gated_mlp
) -> Tensor | None:
    """Run the shared experts on rows, [B, X]; None without any. mlp: runs an MLP."""
    if moe.shared is None:
        return None
    out_BX = mlp(x_BX, moe.shared)
    if moe.shared_gate is None:
        return out_BX
    return F.linear(x_BX, moe.shared_gate).sigmoid() * out_BX


def mtp_rows(next_BX: Tensor, hidden_BX: Tensor, mtp: MtpWeights, config: ModelConfig) -> Tensor:
    """Make the MTP layer's input [B, X] of the next tokens' embeddings and hidden rows."""
    normed = (
        rms_norm(next_BX, mtp.embedding_norm, config.norm_eps),
        rms_norm(hidden_BX, mtp.hidden_norm, config.norm_eps),
    )
    return mtp.projection(torch.cat(normed, dim=-1))


def logits(x_BX: Tensor, weights: LogitsWeights, config: ModelConfig) -> Tensor:
    """Score the vocabulary for hidden rows: [B, vocabulary] fp32."""
    return weights.lm_head(rms_norm(x_BX, weights.final_norm, config.norm_eps)).float()
