"""The arithmetic of a decoder layer, except attention itself and the experts: pure functions.

Enters: rows and weights. Leaves: rows. Does not know: frames, instances, steps.

Legend: B rows, X hidden, C q latent (X without q LoRA), R kv_lora_rank, P rope, D = R + P, H heads,
N nope, V value width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from data_plane.model.config import ModelConfig
from data_plane.model.rope import RopeTable
from data_plane.model.weights import LayerWeights, MlpWeights, ModelWeights

LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms of q latent and c_kv; the reference model ignores rms_norm_eps there."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise rows by their root mean square, computed in fp32; returns the dtype of x."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    return weight * F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype)


def attention_inputs(
    x_BX: Tensor, position_B: Tensor, layer: LayerWeights, rope: RopeTable, config: ModelConfig
) -> tuple[Tensor, Tensor]:
    """Project normed hidden rows [B, X] to (normed q latent [B, C], new latent KV [B, D]).

    Latent KV is normed c_kv, then the rotated key.
    """
    down = layer.down_proj(x_BX)
    kv_BD = down[:, -config.latent_dim :]
    latent_BC = x_BX
    if layer.q_norm is not None:
        latent_BC = rms_norm(down[:, : -config.latent_dim], layer.q_norm, LATENT_NORM_EPS)
    c_kv = rms_norm(kv_BD[:, : config.kv_lora_rank], layer.kv_norm, LATENT_NORM_EPS)
    return latent_BC, torch.cat(
        (c_kv, rope.rotate(kv_BD[:, config.kv_lora_rank :], position_B)), dim=1
    )


def queries(
    latent_BC: Tensor, position_B: Tensor, layer: LayerWeights, rope: RopeTable, config: ModelConfig
) -> tuple[Tensor, Tensor]:
    """Make queries of q latents: (the part without rope [B, H, N], the rotated part [B, H, P])."""
    q = layer.q_proj(latent_BC).view(
        len(latent_BC), config.num_heads, config.nope_dim + config.rope_dim
    )
    return q[..., : config.nope_dim], rope.rotate(q[..., config.nope_dim :], position_B)


def absorbed_q(
    latent_BC: Tensor, position_B: Tensor, layer: LayerWeights, rope: RopeTable, config: ModelConfig
) -> Tensor:
    """Make absorbed queries of q latents, [B, H, D]: W_UK in the first R, then the rotated part."""
    q_nope, q_rope = queries(latent_BC, position_B, layer, rope, config)
    absorbed_HBR = torch.bmm(q_nope.transpose(0, 1), layer.k_up)
    return torch.cat((absorbed_HBR.transpose(0, 1), q_rope), dim=2)


def attention_rows(
    x_BX: Tensor, position_B: Tensor, layer: LayerWeights, rope: RopeTable, config: ModelConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Project hidden rows [B, X] to all that attention takes.

    Returns (normed q latent [B, C], new latent KV [B, D], absorbed queries [B, H, D]).
    """
    normed_BX = rms_norm(x_BX, layer.input_norm, config.norm_eps)
    latent_BC, kv_BD = attention_inputs(normed_BX, position_B, layer, rope, config)
    return latent_BC, kv_BD, absorbed_q(latent_BC, position_B, layer, rope, config)


def up_project(partial_BHR: Tensor, layer: LayerWeights) -> Tensor:
    """Apply W_UV to outputs in latent space [B, H, R]: [B, H, V].

    It is linear, so it may come before or after the LSE merge.
    """
    o_HBV = torch.bmm(partial_BHR.to(layer.v_up.dtype).transpose(0, 1), layer.v_up)
    return o_HBV.transpose(0, 1)


def output_projection(o_BHV: Tensor, layer: LayerWeights) -> Tensor:
    """Project the heads' outputs to hidden rows, [B, X]."""
    return layer.o_proj(o_BHV.flatten(1))


def after_attention(
    x_BX: Tensor, o_BHV: Tensor, layer: LayerWeights, rope: RopeTable, config: ModelConfig
) -> tuple[Tensor, Tensor]:
    """Add attention to hidden rows: (the rows [B, X], the rows normed for the layer's MLP)."""
    x_BX = x_BX + output_projection(o_BHV, layer)
    return x_BX, rms_norm(x_BX, layer.post_attention_norm, config.norm_eps)


def append(slots_SD: Tensor, slot_B: Tensor, kv_BD: Tensor) -> None:
    """Write one token of each row to its slot of a layer's frames, slot_B = frame * 64 + offset."""
    slots_SD.index_copy_(0, slot_B, kv_BD)


def gated_mlp(x_BX: Tensor, mlp: MlpWeights) -> Tensor:
    """Run a gated MLP on rows: down(silu(gate) * up), [B, X]."""
    gate, up = mlp.gate_up(x_BX).chunk(2, dim=-1)
    return mlp.down(F.silu(gate) * up)


def logits(x_BX: Tensor, weights: ModelWeights, config: ModelConfig) -> Tensor:
    """Score the vocabulary for hidden rows: [B, vocabulary] fp32."""
    return weights.lm_head(rms_norm(x_BX, weights.final_norm, config.norm_eps)).float()
