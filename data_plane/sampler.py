"""Sampling: the next token of each row, a pure function of (logits, parameters, index of the token).

Enters: logits of the live rows. Leaves: token ids. Does not know: other rows: a row's token is the same in any batch, at
any CP degree and on any instance, up to what fp32 arithmetic does to its logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from nanocp.sampling import SamplingParams


def sample_rows(logits_BV: Tensor, params: Sequence[SamplingParams], indices: Sequence[int]) -> list[int]:
    """The next token of each row. indices: how many tokens each row has generated before."""
    for row, (row_params, index) in enumerate(zip(params, indices, strict=True)):
        if row_params.stop_token_ids and index < row_params.min_tokens:
            logits_BV[row, list(row_params.stop_token_ids)] = float("-inf")
    token_ids: list[int] = logits_BV.argmax(dim=-1).tolist()
    for row, (row_params, index) in enumerate(zip(params, indices, strict=True)):
        if row_params.temperature > 0:
            token_ids[row] = _draw(token_probabilities(logits_BV[row], row_params), row_params.seed, index)
    return token_ids


def token_probabilities(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """[vocabulary] fp64, after temperature, then top-k, then top-p, as `transformers` orders them."""
    scores = logits_V.double() / params.temperature
    if params.top_k:
        scores = scores.masked_fill(scores < scores.topk(min(params.top_k, len(scores))).values[-1], float("-inf"))
    if params.top_p < 1:
        ascending, order = scores.sort(stable=True)
        # The smallest set that reaches top_p is what is left when the least likely 1 - top_p are gone, at least one.
        is_out = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - params.top_p
        is_out[-1] = False
        scores = scores.masked_fill(is_out.new_zeros(len(is_out)).scatter_(0, order, is_out), float("-inf"))
    return scores.softmax(dim=-1)


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that depends on (seed, index) only: a counter, not a state that could drift (rule 5)."""
    digest = blake2b(seed.to_bytes(8, "little") + index.to_bytes(8, "little"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def _draw(probability_V: Tensor, seed: int, index: int) -> int:
    """Inverse of the distribution function, in the order of token ids."""
    edges = probability_V.cumsum(dim=0)
    target = uniform(seed, index) * edges[-1]
    return int(torch.searchsorted(edges, target, right=True).clamp(max=len(edges) - 1))
