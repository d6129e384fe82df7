"""Sampling: the next token of each row, a pure function of (logits, parameters, index of the token).

Enters: logits of the live rows. Leaves: token ids. Does not know: other rows. A row's token is the same in any batch,
at any CP degree and on any instance, up to what fp32 arithmetic does to its logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from nanocp.sampling import SamplingParams

_NUCLEUS_GUESS = 512
"""As many of the most likely tokens are looked at before the vocabulary is sorted for top-p."""


def sample_rows(logits_BV: Tensor, params: Sequence[SamplingParams], indices: Sequence[int]) -> list[int]:
    """The next token of each row. logits_BV: fp32, not changed; indices: how many tokens each row has generated before.

    A row of temperature 0 takes the highest logit, the lowest token id of equal ones.
    """
    logits_BV = _without_early_stops(logits_BV, params, indices)
    token_ids: list[int] = logits_BV.argmax(dim=-1).tolist()
    for row, (row_params, index) in enumerate(zip(params, indices, strict=True)):
        if row_params.temperature > 0:
            token_ids[row] = _draw(token_probabilities(logits_BV[row], row_params), row_params.seed, index)
    return token_ids


def token_probabilities(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """[vocabulary] fp64, after temperature (above 0), then top-k, then top-p, as `transformers` orders them."""
    # Relative to the highest, so that a temperature near 0 cannot overflow.
    scores = (logits_V - logits_V.max()).double() / params.temperature
    if params.top_k:
        scores = scores.masked_fill(scores < scores.topk(min(params.top_k, len(scores))).values[-1], float("-inf"))
    if params.top_p < 1:
        scores = scores.masked_fill(~_is_in_nucleus(scores.softmax(dim=-1), params.top_p), float("-inf"))
    return scores.softmax(dim=-1)


def _is_in_nucleus(probability_V: Tensor, top_p: float) -> Tensor:
    """[vocabulary] bool: the smallest set of most likely tokens that reaches top_p, at least one."""
    # A few tokens mostly reach it; sorting a large vocabulary would take longer than the rest of the sampler.
    top, order = probability_V.topk(min(_NUCLEUS_GUESS, len(probability_V)))
    if top.sum() < top_p:
        top, order = probability_V.sort(descending=True, stable=True)
    more_likely = top.cumsum(dim=0) - top
    return torch.zeros(len(probability_V), dtype=torch.bool).index_fill_(0, order[more_likely < top_p], True)


def _without_early_stops(logits_BV: Tensor, params: Sequence[SamplingParams], indices: Sequence[int]) -> Tensor:
    """The logits, with -inf for the stop tokens of rows that are below their min_tokens: a copy if there are any."""
    early = [
        (row, token_id)
        for row, (row_params, index) in enumerate(zip(params, indices, strict=True))
        if index < row_params.min_tokens
        for token_id in row_params.stop_token_ids
    ]
    if not early:
        return logits_BV
    row_M, token_M = torch.tensor(early).unbind(dim=1)
    return logits_BV.index_put((row_M, token_M), logits_BV.new_tensor(float("-inf")))


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that depends on (seed, index) only: a counter, not a state that could drift (rule 5)."""
    digest = blake2b(seed.to_bytes(8, "little") + index.to_bytes(8, "little"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def _draw(probability_V: Tensor, seed: int, index: int) -> int:
    """Inverse of the distribution function, in the order of token ids."""
    edges = probability_V.cumsum(dim=0)
    target = uniform(seed, index) * edges[-1]
    return int(torch.searchsorted(edges, target, right=True).clamp(max=len(edges) - 1))
