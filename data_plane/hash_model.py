"""A model without tensors, whose every output depends on every input: the arithmetic behind HashInstance.

Enters: tokens and positions. Leaves: KV entries, attention sums, hidden values, tokens; what a request must generate.
Attention is a sum mod 2^64, so partials over shards add as LSE merges do. Does not know: instances, frames, windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nanocp.sampling import SamplingParams, TokenLogprobs

NUM_EXPERTS = 60
"""Divisible by every cluster size up to six; an instance owns a range of them."""

_MASK = (1 << 64) - 1
_POSITION, _TOKEN, _LAYER, _REQUEST = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93
_MULTIPLY_1, _MULTIPLY_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(value: int) -> int:
    """A 64-bit value in which every bit depends on every bit of the argument (SplitMix64's finaliser)."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MULTIPLY_1) & _MASK
    value = ((value ^ (value >> 27)) * _MULTIPLY_2) & _MASK
    return value ^ (value >> 31)


def kv_entry(request_id: int, layer: int, position: int, token: int) -> int:
    """The KV of one token."""
    return mix(request_id * _REQUEST + layer * _LAYER + position * _POSITION + token * _TOKEN)


def kv_entries(request_id: int, layer: int, first_position: int, tokens: np.ndarray) -> np.ndarray:
    """The KV of consecutive tokens, [num_tokens] uint64; equal to kv_entry of each."""
    positions = np.arange(first_position, first_position + len(tokens), dtype=np.uint64)
    base = np.uint64((request_id * _REQUEST + layer * _LAYER) & _MASK)
    value: np.ndarray = base + positions * np.uint64(_POSITION) + tokens.astype(np.uint64) * np.uint64(_TOKEN)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(_MULTIPLY_1)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(_MULTIPLY_2)
    value ^= value >> np.uint64(31)
    return value


def embed(token: int, position: int) -> int:
    """The hidden value that enters the first layer; each layer's hidden value is also its query."""
    return mix(token * _TOKEN + position)


def partial(query: int, kv_sum: int) -> int:
    """Attention of a query over a shard whose entries sum to kv_sum. Partials add: sum(shards) is the whole's."""
    return ((query | 1) * kv_sum) & _MASK


def after_attention(hidden: int, merged: int) -> int:
    """Output projection and residual."""
    return mix(hidden ^ mix(merged))


def gate(hidden: int) -> int:
    """The one expert of a row."""
    return hidden % NUM_EXPERTS


def expert(expert_id: int, hidden: int) -> int:
    """What an expert makes of a hidden value."""
    return mix(hidden + (expert_id + 1) * _LAYER)


def after_mlp(hidden: int, output: int) -> int:
    """The residual behind experts, or behind a dense layer (output 0)."""
    return mix(hidden + 3 * output + 1)


def sample(hidden: int, params: SamplingParams, output_ids: Sequence[int], vocab_size: int) -> int:
    """The next token: a function of the hidden value, the seed and all output ids; no stop before min_tokens."""
    value = hidden ^ mix(params.seed)
    for token in output_ids:
        value = mix(value * 5 + token)
    token = value % vocab_size
    while len(output_ids) + 1 < params.min_tokens and token in params.stop_token_ids:
        token = (token + 1) % vocab_size
    return token


def logprobs(hidden: int, token_id: int, params: SamplingParams, vocab_size: int) -> TokenLogprobs | None:
    """What the request asks to be told beside the token: numbers that depend on the hidden value."""
    if params.logprobs is None:
        return None
    best = -(mix(hidden) % 1000) / 1000
    top = tuple(((token_id + rank) % vocab_size, best - rank) for rank in range(min(params.logprobs, vocab_size)))
    return TokenLogprobs(best, top)


@dataclass(frozen=True, slots=True)
class HashModel:
    """Shape of the model; at least one layer has experts (a model without is refused, rule 8)."""

    num_layers: int = 2
    num_dense_layers: int = 1
    """The first layers, without experts."""
    vocab_size: int = 97

    def __post_init__(self) -> None:
        if not 0 <= self.num_dense_layers < self.num_layers:
            raise ValueError(
                f"num_dense_layers is {self.num_dense_layers}; it must be from 0 to {self.num_layers - 1}, so that one "
                f"of {self.num_layers} layers has experts"
            )

    def generate(self, request_id: int, prompt_ids: Sequence[int], params: SamplingParams) -> list[int]:
        """What the request must generate: the oracle, from nothing but the prompt."""
        tokens = list(prompt_ids)
        sums = [
            sum(kv_entry(request_id, layer, position, token) for position, token in enumerate(tokens[:-1]))
            for layer in range(self.num_layers)
        ]
        output_ids: list[int] = []
        while True:
            position = len(tokens) - 1
            hidden = embed(tokens[-1], position)
            for layer in range(self.num_layers):
                sums[layer] += kv_entry(request_id, layer, position, tokens[-1])
                hidden = after_attention(hidden, partial(hidden, sums[layer]))
                output = expert(gate(hidden), hidden) if layer >= self.num_dense_layers else 0
                hidden = after_mlp(hidden, output)
            token = sample(hidden, params, output_ids, self.vocab_size)
            output_ids.append(token)
            tokens.append(token)
            if token in params.stop_token_ids or len(output_ids) == params.max_tokens:
                return output_ids
