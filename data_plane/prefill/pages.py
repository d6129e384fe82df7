"""The results of a prompt: KV for probes of engines, and pages as bytes.

Legend: that of attention_kinds/kind.py, L layers, S = 64.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from data_plane.attention.fp8_latent import quantise
from data_plane.attention.torch_paged import causal_attention
from data_plane.kv.carry_pool import CarryPool
from data_plane.model import layers as ops
from data_plane.model.config import ModelConfig
from data_plane.model.norm import rms_norm
from data_plane.model.weights import ModelWeights


@torch.inference_mode()
def kv_before_experts(
    weights: ModelWeights, config: ModelConfig, token_ids: Sequence[int]
) -> Tensor:
    """Compute a prompt's KV in every layer, [L, T, W]; no layer but the last has experts."""
    position_T = torch.arange(len(token_ids))
    x_TX = weights.embedding[torch.tensor(token_ids)]
    kind, kept = config.attention, []
    for layer in weights.layers[: config.num_layers]:
        own = layer.attention
        normed_TX = rms_norm(x_TX, layer.input_norm, config.norm_eps)
        wire_q_TC, kv_TW = kind.inputs(normed_TX, position_T, own, weights.rope)
        kept.append(kv_TW)
        if len(kept) == config.num_layers:
            break
        q_THE = kind.prefill_queries(wire_q_TC, position_T, own, weights.rope)
        heads_of = partial(kind.keys_and_values, weights=own)
        o_THV = causal_attention(q_THE, kv_TW, kind.softmax_scale, heads_of)
        o_THV = ops.gated_heads(x_TX, o_THV, layer, config)
        x_TX, normed_TX = ops.after_attention(x_TX, o_THV, layer, weights.rope, config)
        assert layer.mlp is not None, "experts before the last layer"
        x_TX = x_TX + ops.gated_mlp(normed_TX, layer.mlp)
    return torch.stack(kept)


@torch.inference_mode()
def begin_state(
    states: CarryPool, weights: ModelWeights, config: ModelConfig, token_ids: Sequence[int]
) -> None:
    """Compute a prompt's recurrent state in the first layer, which is linear, into frame 0."""
    own, x_TX = weights.layers[0], weights.embedding[torch.tensor(token_ids)]
    states.extend(0, 0, 0, rms_norm(x_TX, own.input_norm, config.norm_eps), own.attention)


def payload_of(kv_LSW: Tensor, fp8_rank: int | None) -> np.ndarray:
    """Return a page, or some layers of it, as instances keep it: uint8."""
    kept = kv_LSW if fp8_rank is None else quantise(kv_LSW, fp8_rank)
    payload: np.ndarray = kept.contiguous().view(torch.uint8).numpy()
    return payload
