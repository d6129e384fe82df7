"""The reference prefill: the whole model over a prompt, chunk by chunk, yielding the KV page by
page (3).

Enters: all weights, a prompt. Leaves: pages of latent KV. Does not know: frames, rings, tickets. It
never samples: decode's first step takes the last prompt token. But it visits every position, and so
can tell the prompt's log probabilities.

Legend: T tokens of a chunk, U tokens so far, X hidden, V vocabulary, H heads, E width of a head's
keys and values, D latent KV width, L layers, S = 64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from data_plane.attention.lse_merge import lse_merge
from data_plane.instance.sampler import token_logprobs
from data_plane.model import layers as ops
from data_plane.model.config import ModelConfig
from data_plane.model.weights import LayerWeights, ModelWeights
from data_plane.moe.experts import experts_forward
from data_plane.moe.gate import gate
from nanocp.plan import PAGE_SIZE
from nanocp.sampling import PromptLogprobs

_MAX_PIECE_TOKENS = 2048
"""Keys and values are made of the latent KV of so many tokens at a time: bounds the working set at
any length."""
_LOGITS_TOKENS = 64
"""Logits are made of so many tokens at a time: 32 MiB at a vocabulary of 128K."""


def prefill_pages(
    weights: ModelWeights,
    config: ModelConfig,
    token_ids: Sequence[int],
    num_tokens: int,
    chunk_tokens: int,
    prompt_logprobs: PromptLogprobs | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """Yield (page, kv [L, 64, D]) in order, each as soon as its chunk is done; the last may be
    partly filled.

    With `prompt_logprobs`, those of the token_ids 1 .. num_tokens are told, each chunk's before its
    pages are yielded. A generator, so that the caller can stop between two chunks. `weights` must
    hold every expert.
    """
    num_pages = -(-num_tokens // PAGE_SIZE)
    dtype = weights.embedding.dtype
    kv_LTD = torch.zeros(config.num_layers, num_pages * PAGE_SIZE, config.latent_dim, dtype=dtype)
    done_pages = 0
    for begin in range(0, num_tokens, chunk_tokens):
        end = min(begin + chunk_tokens, num_tokens)
        hidden_TX = _run_chunk(
            weights, config, token_ids[begin:end], begin, kv_LTD, prompt_logprobs is not None
        )
        if prompt_logprobs is not None:
            _tell_logprobs(
                weights, config, hidden_TX, token_ids[begin + 1 : end + 1], prompt_logprobs
            )
        ready_pages = num_pages if end == num_tokens else end // PAGE_SIZE
        for page in range(done_pages, ready_pages):
            yield page, kv_LTD[:, page * PAGE_SIZE : (page + 1) * PAGE_SIZE]
        done_pages = ready_pages


@torch.inference_mode()
def _run_chunk(
    weights: ModelWeights,
    config: ModelConfig,
    token_ids: Sequence[int],
    begin: int,
    kv_LTD: Tensor,
    is_output_wanted: bool,
) -> Tensor:
    """Put a chunk's KV in its place; returns the hidden states, which are the last layer's input if
    no output is wanted: its KV needs no more."""
    end = begin + len(token_ids)
    position_T = torch.arange(begin, end)
    x_TX = weights.embedding[torch.tensor(token_ids)]
    for index, layer in enumerate(weights.layers):
        normed_TX = ops.rms_norm(x_TX, layer.input_norm, config.norm_eps)
        latent_TC, kv_TD = ops.attention_inputs(normed_TX, position_T, layer, weights.rope, config)
        kv_LTD[index, begin:end] = kv_TD
        if index == len(weights.layers) - 1 and not is_output_wanted:
            break
        q_THE = torch.cat(ops.queries(latent_TC, position_T, layer, weights.rope, config), dim=-1)
        x_TX = x_TX + _causal_attention(q_THE, kv_LTD[index, :end], begin, layer, config)
        x_TX = x_TX + _mlp(
            ops.rms_norm(x_TX, layer.post_attention_norm, config.norm_eps), layer, config
        )
    return x_TX


@torch.inference_mode()
def _tell_logprobs(
    weights: ModelWeights,
    config: ModelConfig,
    hidden_TX: Tensor,
    next_ids: Sequence[int],
    wanted: PromptLogprobs,
) -> None:
    for begin in range(0, len(hidden_TX), _LOGITS_TOKENS):
        logits_TV = ops.logits(hidden_TX[begin : begin + _LOGITS_TOKENS], weights, config)
        wanted.tell(
            token_logprobs(logits_TV, next_ids[begin : begin + _LOGITS_TOKENS], wanted.num_top)
        )


def _causal_attention(
    q_THE: Tensor, kv_UD: Tensor, begin: int, layer: LayerWeights, config: ModelConfig
) -> Tensor:
    """Rows begin .. of a sequence over all of its KV so far: [T, X].

    Many rows share each key here, so keys and values are made of the latents, which costs half of
    absorbing W_UK and W_UV into every row. What lies before the chunk needs no mask; pieces are
    merged by their lse.
    """
    width = max(q_THE.shape[-1], config.v_dim)  # the kernel wants keys and values of one width
    q_HTE = F.pad(q_THE.transpose(0, 1), (0, width - q_THE.shape[-1]))
    partials = []
    for first, last in pairwise((*range(0, begin, _MAX_PIECE_TOKENS), begin, len(kv_UD))):
        key_HUE, value_HUE = _keys_and_values(kv_UD[first:last], width, layer, config)
        partials.append(
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q_HTE[None],
                key_HUE[None],
                value_HUE[None],
                0.0,
                first == begin,
                scale=config.softmax_scale,
            )
        )
    out, lse = zip(*partials, strict=True)
    merged_HTE, _ = (
        lse_merge(torch.cat(out), torch.cat(lse)) if len(partials) > 1 else (out[0][0], lse)
    )
    return ops.output_projection(
        merged_HTE[..., : config.v_dim].transpose(0, 1).to(kv_UD.dtype), layer
    )


def _keys_and_values(
    kv_UD: Tensor, width: int, layer: LayerWeights, config: ModelConfig
) -> tuple[Tensor, Tensor]:
    """Of every head, [H, U, E] each, padded with zeros."""
    latent_UR, rope_UP = kv_UD[:, : config.kv_lora_rank], kv_UD[:, config.kv_lora_rank :]
    key = kv_UD.new_zeros(config.num_heads, len(kv_UD), width)
    key[..., : config.nope_dim] = torch.matmul(latent_UR, layer.k_up.transpose(1, 2))
    key[..., config.nope_dim : config.nope_dim + config.rope_dim] = rope_UP
    return key, F.pad(torch.matmul(latent_UR, layer.v_up), (0, width - config.v_dim))


def _mlp(x_TX: Tensor, layer: LayerWeights, config: ModelConfig) -> Tensor:
    if layer.moe is None:
        assert layer.mlp is not None
        return ops.gated_mlp(x_TX, layer.mlp)
    expert_TK, weight_TK = gate(x_TX, layer.moe, config)
    routed_TX = experts_forward(x_TX, expert_TK, weight_TK, layer.moe)
    return routed_TX + ops.gated_mlp(x_TX, layer.moe.shared) if layer.moe.shared else routed_TX
