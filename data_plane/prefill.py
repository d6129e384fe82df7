"""The reference prefill: the whole model over a prompt, chunk by chunk, yielding the KV page by page (3).

Enters: all weights, a prompt. Leaves: pages of latent KV. Does not know: frames, rings, tickets. It never samples:
decode's first step takes the last prompt token.

Legend: T tokens of a chunk, X hidden, H heads, R kv_lora_rank, D latent KV width, L layers, S = 64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from data_plane.model import layers as ops
from data_plane.model.config import ModelConfig
from data_plane.model.weights import LayerWeights, ModelWeights
from data_plane.moe.experts import experts_forward
from data_plane.moe.gate import gate
from nanocp.plan import PAGE_SIZE


def prefill_pages(
    weights: ModelWeights, config: ModelConfig, token_ids: Sequence[int], num_tokens: int, chunk_tokens: int
) -> Iterator[tuple[int, Tensor]]:
    """Yield (page, kv [L, 64, D]) in order, each as soon as its chunk is done; the last may be partly filled.

    A generator, so that the caller can stop between two chunks. `weights` must hold every expert.
    """
    num_pages = -(-num_tokens // PAGE_SIZE)
    dtype = weights.embedding.dtype
    kv_LTD = torch.zeros(config.num_layers, num_pages * PAGE_SIZE, config.latent_dim, dtype=dtype)
    done_pages = 0
    for begin in range(0, num_tokens, chunk_tokens):
        end = min(begin + chunk_tokens, num_tokens)
        _run_chunk(weights, config, token_ids[begin:end], begin, kv_LTD)
        ready_pages = num_pages if end == num_tokens else end // PAGE_SIZE
        for page in range(done_pages, ready_pages):
            yield page, kv_LTD[:, page * PAGE_SIZE : (page + 1) * PAGE_SIZE]
        done_pages = ready_pages


@torch.inference_mode()
def _run_chunk(
    weights: ModelWeights, config: ModelConfig, token_ids: Sequence[int], begin: int, kv_LTD: Tensor
) -> None:
    end = begin + len(token_ids)
    position_T = torch.arange(begin, end)
    x_TX = weights.embedding[torch.tensor(token_ids)]
    for index, layer in enumerate(weights.layers):
        normed_TX = ops.rms_norm(x_TX, layer.input_norm, config.norm_eps)
        latent_TC, kv_TD = ops.attention_inputs(normed_TX, position_T, layer, weights.rope, config)
        kv_LTD[index, begin:end] = kv_TD
        if index == len(weights.layers) - 1:
            return  # the last layer's KV is all that is wanted of it
        q_THD = ops.absorbed_q(latent_TC, position_T, layer, weights.rope, config)
        o_TX = _causal_attention(q_THD, kv_LTD[index, :end], begin, layer, config)
        x_TX = x_TX + o_TX
        x_TX = x_TX + _mlp(ops.rms_norm(x_TX, layer.post_attention_norm, config.norm_eps), layer, config)


def _causal_attention(q_THD: Tensor, kv_UD: Tensor, begin: int, layer: LayerWeights, config: ModelConfig) -> Tensor:
    """Rows begin .. of a sequence over all of its KV so far."""
    chunk = len(q_THD)
    is_later = torch.ones(chunk, len(kv_UD), dtype=torch.bool).triu_(begin + 1)
    score_HTU = torch.matmul(q_THD.transpose(0, 1), kv_UD.T).float().mul_(config.softmax_scale)
    weight_HTU = score_HTU.masked_fill_(is_later, float("-inf")).softmax(dim=-1).to(kv_UD.dtype)
    o_HTR = torch.matmul(weight_HTU, kv_UD[:, : config.kv_lora_rank])
    return ops.output_projection(ops.up_project(o_HTR.transpose(0, 1), layer), layer)


def _mlp(x_TX: Tensor, layer: LayerWeights, config: ModelConfig) -> Tensor:
    if layer.moe is None:
        assert layer.mlp is not None
        return ops.gated_mlp(x_TX, layer.mlp)
    expert_TK, weight_TK = gate(x_TX, layer.moe, config)
    routed_TX = experts_forward(x_TX, expert_TK, weight_TK, layer.moe)
    return routed_TX + ops.gated_mlp(x_TX, layer.moe.shared) if layer.moe.shared else routed_TX
