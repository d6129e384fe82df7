"""HashInstance's model: no tensors, and each output depends on all inputs.

Attention is a sum modulo 2^64, so partials over shards add up, as an LSE merge combines them. A
token's KV depends on everything before it, as in a real model: prompts that begin alike have the
same pages.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import add

import numpy as np

from nanocp.values.plan import PAGE_SIZE
from nanocp.values.sampling import SamplingParams, TokenLogprobs

NUM_EXPERTS = 61
"""Instances hold as many of them, give or take one."""

_MASK = (1 << 64) - 1
_POSITION, _TOKEN, _LAYER = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_MULTIPLY_1, _MULTIPLY_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(value: int) -> int:
    """A 64-bit hash of the argument: SplitMix64's finaliser."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MULTIPLY_1) & _MASK
    value = ((value ^ (value >> 27)) * _MULTIPLY_2) & _MASK
    return value ^ (value >> 31)


def kv_entry(layer: int, position: int, hidden: int) -> int:
    """The KV of one token; `hidden` is its hidden value at the layer's input."""
    return mix(hidden + layer * _LAYER + position * _POSITION)


def fold(state: int, record: int) -> int:
    """The state of a linear attention layer after one token more: it knows all, in their order."""
    return mix(state * 3 + record)


def embed(token: int, position: int) -> int:
    """The hidden value that enters the first layer; each layer's hidden value is also its query."""
    return mix(token * _TOKEN + position)


def partial(query: int, kv_sum: int) -> int:
    """Attention of a query over a shard; kv_sum is the sum of the shard's entries."""
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
    """The residual after experts, or after a dense layer (output 0)."""
    return mix(hidden + 3 * output + 1)


def mtp_input(hidden: int, next_token: int, position: int) -> int:
    """What enters the MTP layer: a position's last hidden value, and the next token."""
    return mix(hidden ^ mix(embed(next_token, position) + 7))


def draft(hidden: int, right: int, percent: int, vocab_size: int) -> int:
    """The draft of an MTP layer's hidden value: right in so many of 100 cases."""
    if mix(hidden + 11) % 100 < percent:
        return right
    return (right + 1 + mix(hidden + 13) % (vocab_size - 1)) % vocab_size


def sample(hidden: int, params: SamplingParams, output_ids: Sequence[int], vocab_size: int) -> int:
    """The next token, from the hidden value, the seed and all output ids."""
    token = _drawn(hidden ^ mix(params.seed), tuple(output_ids)) % vocab_size
    while len(output_ids) + 1 < params.min_tokens and token in params.stop_token_ids:
        token = (token + 1) % vocab_size
    return token


@lru_cache(maxsize=1 << 12)
def _drawn(value: int, output_ids: tuple[int, ...]) -> int:
    """Mix all output ids into a value: once for the oracle and for the instance that is right."""
    for token in output_ids:
        value = mix(value * 5 + token)
    return value


def logprobs(
    hidden: int, token_id: int, params: SamplingParams, vocab_size: int
) -> TokenLogprobs | None:
    """The log probabilities that the request asks for: numbers that depend on the hidden value."""
    if params.logprobs is None:
        return None
    best = -(mix(hidden) % 1000) / 1000
    top = tuple(
        ((token_id + rank) % vocab_size, best - rank)
        for rank in range(min(params.logprobs, vocab_size))
    )
    return TokenLogprobs(best, top)


@dataclass(frozen=True, slots=True)
class HashModel:
    """The model's shape; with as many dense layers as layers it has no experts."""

    num_layers: int = 2
    num_dense_layers: int = 1
    """The first layers, without experts."""
    vocab_size: int = 97
    linear_layers: tuple[int, ...] = ()
    """Linear attention layers: a row has a state there, and no KV."""

    def __post_init__(self) -> None:
        if not 0 <= self.num_dense_layers <= self.num_layers:
            raise ValueError(
                f"num_dense_layers is {self.num_dense_layers}; it must be from 0 to "
                f"{self.num_layers}, the number of all layers"
            )

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts, the MTP layer too."""
        return self.num_layers + 1 - self.num_dense_layers

    def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        known_output_ids: Sequence[int] = (),
    ) -> list[int]:
        """All tokens that the request must generate, from its prompt alone: the oracle.

        known_output_ids: tokens that are known already, and that the result begins with.
        """
        return [*known_output_ids, *self.tokens(prompt_ids, params, known_output_ids)]

    def tokens(
        self, prompt_ids: Sequence[int], params: SamplingParams, known_output_ids: Sequence[int]
    ) -> Iterator[int]:
        """Yield what `generate` gives after the known tokens, each when it is asked for."""
        sums = (0,) * self.num_layers
        token_ids = [*prompt_ids, *known_output_ids]
        for position, token in enumerate(token_ids[:-1]):
            _, _, sums = _forward(self, sums, token, position)
        output_ids = list(known_output_ids)
        token = token_ids[-1]
        while True:
            position = len(prompt_ids) - 1 + len(output_ids)
            hidden, _, sums = _forward(self, sums, token, position)
            token = sample(hidden, params, output_ids, self.vocab_size)
            output_ids.append(token)
            yield token
            if token in params.stop_token_ids or len(output_ids) == params.max_tokens:
                return

    def prefill(
        self, token_ids: Sequence[int], num_tokens: int, has_mtp: bool = False
    ) -> list[np.ndarray]:
        """The pages of the first num_tokens tokens, [layers, 64] uint64 each.

        The last page has zeros after the last token. has_mtp: whether the MTP layer is one of the
        layers, the last.
        """
        num_layers, sums, mtp_sum = self.num_layers, (0,) * self.num_layers, 0
        num_places = -(-num_tokens // PAGE_SIZE) * PAGE_SIZE
        kv = np.zeros((num_layers + has_mtp, num_places), np.uint64)
        for position in range(num_tokens):
            hidden, entries, sums = _forward(self, sums, token_ids[position], position)
            kv[:num_layers, position] = entries
            if has_mtp:
                value = mtp_input(hidden, token_ids[position + 1], position)
                kv[num_layers, position], _ = self.run_layer(num_layers, position, value, mtp_sum)
                mtp_sum += int(kv[num_layers, position])
        kv = np.delete(kv, self.linear_layers, axis=0)
        return [
            np.ascontiguousarray(kv[:, begin : begin + PAGE_SIZE])
            for begin in range(0, kv.shape[1], PAGE_SIZE)
        ]

    def states(self, token_ids: Sequence[int]) -> list[int]:
        """The states of linear attention layers after these tokens."""
        sums = (0,) * self.num_layers
        for position, token in enumerate(token_ids):
            _, _, sums = _forward(self, sums, token, position)
        return [sums[layer] for layer in self.linear_layers]

    def mtp_hidden(self, token_ids: Sequence[int]) -> int:
        """The MTP layer's hidden value from which the token after these is drafted."""
        sums, mtp_sum, value = (0,) * self.num_layers, 0, 0
        for position, next_token in enumerate(token_ids[1:]):
            hidden, _, sums = _forward(self, sums, token_ids[position], position)
            value = mtp_input(hidden, next_token, position)
            entry, value = self.run_layer(self.num_layers, position, value, mtp_sum)
            mtp_sum += entry
        return value

    def run_layer(self, layer: int, position: int, hidden: int, kv_sum: int) -> tuple[int, int]:
        """(KV, hidden value after the layer) of one token.

        hidden: the token's hidden value before the layer. kv_sum: the sum of the layer's KV before
        the token; in a linear attention layer its state.
        """
        entry = kv_entry(layer, position, hidden)
        after = fold(kv_sum, entry) if layer in self.linear_layers else kv_sum + entry
        hidden = after_attention(hidden, partial(hidden, after))
        output = expert(gate(hidden), hidden) if layer >= self.num_dense_layers else 0
        return entry, after_mlp(hidden, output)


@lru_cache(maxsize=1 << 16)
def _forward(
    model: HashModel, sums: tuple[int, ...], token: int, position: int
) -> tuple[int, list[int], tuple[int, ...]]:
    """(the token's last hidden value, its KV of each layer, sums with this KV).

    sums: for each layer, the sum of the KV before the token. Results are kept, since attempts of a
    request and prompts that begin alike ask for the same tokens again.
    """
    hidden = embed(token, position)
    entries = []
    for layer in range(model.num_layers):
        entry, hidden = model.run_layer(layer, position, hidden, sums[layer])
        entries.append(entry)
    after = list(map(add, sums, entries))
    for layer in model.linear_layers:
        after[layer] = fold(sums[layer], entries[layer])
    return hidden, entries, tuple(after)
