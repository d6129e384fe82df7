"""The reference prefill: the whole model over a prompt, chunk by chunk, yielding KV page by page.

It never samples: decode's first step takes the last prompt token. (The paper's section 3.)

Legend: T tokens of a chunk, X hidden, V a head's values, H heads, E width of a head's keys, W width
of KV, L layers, S = 64.
"""

from functools import partial

import torch

from data_plane.attention.torch_paged import causal_attention
from data_plane.instance.sampler import report_prompt
from data_plane.model import layers as ops
from data_plane.model.norm import rms_norm
from data_plane.moe.experts import experts_forward
from data_plane.moe.gate import gate
from nanocp.values.plan import PAGE_SIZE


def prefill_pages(
    weights, config, token_ids, num_tokens, chunk_tokens, prompt_logprobs=None, carry=None
):
    """Yield (page, kv [L, 64, W]) in order, each page as soon as its chunk is done.

    weights: they must hold every expert. num_tokens: positions whose KV is wanted; the last page
    may be partly filled. prompt_logprobs: it gets the log probabilities of token_ids 1 ..
    num_tokens, those of a chunk before its pages are yielded. carry: of a model with linear
    attention layers; its frame 0 has the state of the tokens so far. It is a generator, so that the
    caller can stop between two chunks.
    """
    num_pages = -(-num_tokens // PAGE_SIZE)
    dtype = weights.embedding.dtype
    kv_LTW = torch.zeros(
        config.num_kept_layers, num_pages * PAGE_SIZE, config.attention.kv_width, dtype=dtype
    )
    done_pages = 0
    if carry is not None:
        carry.clear(0)
    for begin in range(0, num_tokens, chunk_tokens):
        end = min(begin + chunk_tokens, num_tokens)
        is_wanted = prompt_logprobs is not None or weights.mtp is not None
        ids = token_ids[begin:end]
        hidden_TX = _run_chunk(weights, config, ids, begin, kv_LTW, is_wanted, carry)
        next_ids = token_ids[begin + 1 : end + 1]
        if weights.mtp is not None:
            kv_LTW[-1, begin:end] = mtp_kv(weights, config, hidden_TX, next_ids, begin)
        if prompt_logprobs is not None:
            logits = partial(ops.logits, weights=weights, config=config)
            with torch.inference_mode():
                report_prompt(prompt_logprobs, next_ids, hidden_TX, logits)
        ready_pages = num_pages if end == num_tokens else end // PAGE_SIZE
        for page in range(done_pages, ready_pages):
            yield page, kv_LTW[:, page * PAGE_SIZE : (page + 1) * PAGE_SIZE]
        done_pages = ready_pages


@torch.inference_mode()
def _run_chunk(weights, config, token_ids, begin, kv_LTW, is_output_wanted, carry):
    """Write a chunk's KV to its place; return the hidden states after the last layer, [T, X]."""
    end = begin + len(token_ids)
    position_T = torch.arange(begin, end)
    x_TX = weights.embedding[torch.tensor(token_ids)]
    kind = config.attention
    for index, layer in enumerate(weights.layers[: config.num_layers]):
        own, place = layer.attention, config.places[index]
        is_last = index == config.num_layers - 1 and not is_output_wanted
        normed_TX = rms_norm(x_TX, layer.input_norm, config.norm_eps)
        if index in config.linear_layers:
            assert carry is not None
            o_THV = carry.extend(place, 0, begin, normed_TX, own)
        else:
            wire_q_TC, kv_TW = kind.inputs(normed_TX, position_T, own, weights.rope)
            kv_LTW[place, begin:end] = kv_TW
        if is_last:
            break
        if index not in config.linear_layers:
            q_THE = kind.prefill_queries(wire_q_TC, position_T, own, weights.rope)
            o_THV = causal_attention(q_THE, kv_LTW[place, :end], kind.softmax_scale, partial(
                kind.keys_and_values, weights=own
            ))  # fmt: skip
            o_THV = ops.gated_heads(x_TX, o_THV, layer, config)
        x_TX, normed_TX = ops.after_attention(x_TX, o_THV, layer, weights.rope, config)
        x_TX = x_TX + _mlp(normed_TX, layer, config)
    return x_TX


@torch.inference_mode()
def mtp_kv(weights, config, hidden_TX, next_ids, begin):
    """The MTP layer's KV of positions begin .. begin + T - 1: [T, W].

    hidden_TX: rows after the last layer. next_ids: the tokens after these positions.
    """
    assert weights.mtp is not None
    layer, eps = weights.layers[-1], config.norm_eps
    next_TX = weights.embedding[torch.tensor(next_ids)].to(hidden_TX.dtype)
    normed_TX = rms_norm(hidden_TX, weights.final_norm, eps)
    x_TX = rms_norm(ops.mtp_rows(next_TX, normed_TX, weights.mtp, config), layer.input_norm, eps)
    position_T = torch.arange(begin, begin + len(hidden_TX))
    _, kv_TW = config.attention.inputs(x_TX, position_T, layer.attention, weights.rope)
    return kv_TW


def _mlp(x_TX, layer, config):
    if layer.moe is None:
        assert layer.mlp is not None
        return ops.gated_mlp(x_TX, layer.mlp)
    expert_TK, weight_TK = gate(x_TX, layer.moe, config)
    routed_TX = experts_forward(x_TX, expert_TK, weight_TK, layer.moe)
    shared_TX = ops.shared_experts(x_TX, layer.moe)
    return routed_TX if shared_TX is None else routed_TX + shared_TX
