"""Sampling: the next token of each row, a pure function of its logits, parameters and token ids.

A row's token is the same in any batch, at any CP degree and on any instance, up to fp32 rounding.
Controls mean what they mean in vLLM, and apply in its order: bad words, min_tokens, logit_bias,
penalties, temperature, min-p, top-k, top-p. A grammar's bans hold over all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanocp.values.sampling import PromptLogprobs, SamplingParams, TokenLogprobs

_LOGITS_TOKENS = 64
"""Tokens of a prompt whose logits are computed at a time: 32 MiB at a vocabulary of 128K."""
_NUCLEUS_GUESS = 512
"""Most likely tokens that top-p looks at first."""
_NUM_CLASSES = 1024
"""Classes of probability by which top-p counts a flat distribution."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
Draw = Callable[[Tensor, int, int], int]
"""A function from a distribution, [vocabulary] fp64, a seed and the token's index to a token."""


def uniform(seed: int, index: int) -> float:
    """Return a number in [0, 1) of (seed, index) only, so a hand-off loses no state."""
    return (_bits(seed, index) >> 11) / (1 << 53)


def _bits(seed: int, index: int) -> int:
    words = seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(blake2b(words, digest_size=8).digest(), "little")


def inverse(probability_V: Tensor, seed: int, index: int) -> int:
    """Draw by the inverse of the distribution function, in the order of token ids."""
    edges = probability_V.cumsum(dim=0)
    target = uniform(seed, index) * edges[-1]
    return int(torch.searchsorted(edges, target, right=True).clamp(max=len(edges) - 1))


def gumbel_max(probability_V: Tensor, seed: int, index: int) -> int:
    """Draw the token whose exponential clock, of (seed, index, token), rings first.

    Likelier tokens' clocks tick faster. Two distributions draw the same token with a probability of
    at least (1 - tv) / (1 + tv), tv their total variation distance (arXiv 2408.07978).
    """
    ids = probability_V.nonzero().squeeze(1)
    # splitmix64 of the token's number, begun at bits of (seed, index).
    bits = ids.numpy().astype(np.uint64) * _GOLDEN + np.uint64(_bits(seed, index))
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    uniforms = ((bits ^ (bits >> np.uint64(31))) >> np.uint64(11)).astype(np.float64)
    # In logarithms: a probability near 0 would make the quotient infinite.
    clocks = np.log(-np.log(np.minimum(uniforms + 0.5, (1 << 53) - 1) / (1 << 53)))
    return int(ids[int((clocks - np.log(probability_V[ids].numpy())).argmin())])


DRAWS: dict[str, Draw] = {"inverse": inverse, "gumbel_max": gumbel_max}


class RowMasks(NamedTuple):
    """The masks of grammars."""

    rows: Sequence[int]
    """Ascending rows with a grammar."""
    allowed_MV: Tensor
    """[these rows, vocabulary] bool, at least one each."""


def sample_rows(
    logits_BV: Tensor,
    params: Sequence[SamplingParams],
    outputs: Sequence[Sequence[int]],
    prompts: Sequence[Sequence[int]],
    masks: RowMasks | None = None,
    draw: Draw = inverse,
) -> list[int]:
    """Return the next token of each row.

    logits_BV: [rows, vocabulary] fp32, not changed. prompts: `penalized_prompt_ids` of each row.
    masks: None if no row has a grammar. A row of temperature 0 takes the highest logit, the lowest
    token id of equal ones.
    """
    token_ids: list[int] = logits_BV.argmax(dim=-1).tolist()
    allowed, masked = {}, {}
    if masks is not None:
        # All rows in one call: a call for each would take longer than the masks themselves.
        masked_MV = logits_BV[list(masks.rows)].cpu().masked_fill_(~masks.allowed_MV, -math.inf)
        allowed = dict(zip(masks.rows, masks.allowed_MV, strict=True))
        masked = dict(zip(masks.rows, masked_MV, strict=True))
        for row, token_id in zip(masks.rows, masked_MV.argmax(dim=-1).tolist(), strict=True):
            token_ids[row] = token_id
    for row, (row_params, output, prompt) in enumerate(zip(params, outputs, prompts, strict=True)):
        has_controls = _has_controls(row_params, output)
        if not has_controls and row_params.temperature == 0:
            continue
        is_masked = row in masked and not has_controls
        # The logits may be on a GPU: only rows that need it are copied from there.
        logits_V = masked[row] if is_masked else logits_BV[row].cpu()
        if has_controls:
            logits_V = controlled_logits(logits_V, row_params, output, prompt, allowed.get(row))
        if row_params.temperature > 0:
            probability_V = token_probabilities(logits_V, row_params)
            token_ids[row] = draw(probability_V, row_params.seed, len(output))
        else:
            token_ids[row] = int(logits_V.argmax())
    return token_ids


def token_logprobs(
    logits_BV: Tensor, token_ids: Sequence[int], num_top: int
) -> list[TokenLogprobs]:
    """Return log probabilities of each row's token and of its num_top most likely tokens.

    logits_BV: [rows, vocabulary] fp32, before any control.
    """
    logprob_BV = logits_BV.log_softmax(dim=-1)
    own = logprob_BV.gather(1, _ids(token_ids)[:, None]).squeeze(1).tolist()
    top = logprob_BV.topk(min(num_top, logprob_BV.shape[-1]))
    tops = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [
        TokenLogprobs(logprob, tuple(zip(ids, values, strict=True)))
        for logprob, (ids, values) in zip(own, tops, strict=True)
    ]


def report_prompt(
    wanted: PromptLogprobs,
    next_ids: Sequence[int],
    hidden_TX: Tensor,
    logits: Callable[[Tensor], Tensor],
) -> None:
    """Report log probabilities of a prompt's tokens, a bounded number at a time.

    hidden_TX: the last layer's rows before `next_ids`. logits: makes [T, vocabulary] fp32.
    """
    for begin in range(0, len(next_ids), _LOGITS_TOKENS):
        part = slice(begin, min(begin + _LOGITS_TOKENS, len(next_ids)))
        wanted.report(token_logprobs(logits(hidden_TX[part]), next_ids[part], wanted.num_top))


def token_probabilities(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """Return the next token's distribution: temperature, then min-p, then top-k, then top-p.

    It is [vocabulary] fp64. The temperature must be above 0.
    """
    # Relative to the highest, so that a temperature near 0 cannot overflow.
    scores = (logits_V - logits_V.max()).double() / params.temperature
    if params.min_p:
        scores = scores.masked_fill(scores < math.log(params.min_p), float("-inf"))
    if params.top_k:
        scores = scores.masked_fill(
            scores < scores.topk(min(params.top_k, len(scores))).values[-1], float("-inf")
        )
    if params.top_p < 1:
        scores = scores.masked_fill(
            ~_is_in_nucleus(scores.softmax(dim=-1), params.top_p), float("-inf")
        )
    return scores.softmax(dim=-1)


def _is_in_nucleus(probability_V: Tensor, top_p: float) -> Tensor:
    """Return the fewest most likely tokens that reach top_p, at least one: [vocabulary] bool."""
    # A few tokens mostly reach top_p. Sorting a large vocabulary would take longer than the rest of
    # the sampler.
    top, order = probability_V.topk(min(_NUCLEUS_GUESS, len(probability_V)))
    if top.sum() < top_p:
        return _is_in_flat_nucleus(probability_V, top_p)
    more_likely = top.cumsum(dim=0) - top
    return torch.zeros(len(probability_V), dtype=torch.bool).index_fill_(
        0, order[more_likely < top_p], True
    )


def _is_in_flat_nucleus(probability_V: Tensor, top_p: float) -> Tensor:
    """Return `_is_in_nucleus` for any distribution, in time linear in the vocabulary.

    Only the class of probabilities at top_p is sorted, by token id if equal.
    """
    log_V = probability_V.log()
    highest, lowest = log_V.max(), log_V[probability_V > 0].min()
    # Equal probabilities are of one class, and impossible tokens of the last.
    width = (highest - lowest).clamp(min=1e-30) / (_NUM_CLASSES - 1)
    class_V = ((highest - log_V) / width).clamp(max=_NUM_CLASSES - 1).long()
    mass = torch.bincount(class_V, weights=probability_V, minlength=_NUM_CLASSES)
    more_likely = mass.cumsum(dim=0) - mass
    last = int((more_likely < top_p).sum()) - 1
    is_in_V = class_V < last
    ids = (class_V == last).nonzero().squeeze(1)
    top, order = probability_V[ids].sort(descending=True, stable=True)
    is_in_V[ids[order[more_likely[last] + top.cumsum(dim=0) - top < top_p]]] = True
    return is_in_V


def takes_highest(params: SamplingParams, output: Sequence[int]) -> bool:
    """True if the row's tokens from now on are those of the highest logits."""
    is_free = not params.constraint and params.logprobs is None
    return is_free and params.temperature == 0 and not _has_controls(params, output)


def _has_controls(params: SamplingParams, output: Sequence[int]) -> bool:
    return bool(
        params.bad_words
        or len(output) < params.min_tokens
        or params.logit_bias
        or params.repetition_penalty != 1
        or params.frequency_penalty
        or params.presence_penalty
    )


def controlled_logits(
    logits_V: Tensor,
    params: SamplingParams,
    output: Sequence[int],
    prompt: Sequence[int],
    mask_V: Tensor | None = None,
) -> Tensor:
    """Return one row's logits after the controls that apply to greedy sampling too.

    mask_V: [vocabulary] bool, the grammar's; controls that leave nothing of it do not count.
    """
    controlled = _controlled(logits_V, params, output, prompt)
    if mask_V is None:
        return controlled
    masked = controlled.masked_fill(~mask_V, float("-inf"))
    if masked.max() == float("-inf"):
        return logits_V.masked_fill(~mask_V, float("-inf"))
    return masked


def _controlled(
    logits_V: Tensor, params: SamplingParams, output: Sequence[int], prompt: Sequence[int]
) -> Tensor:
    logits_V = logits_V.clone()
    forbidden = {word[-1] for word in params.bad_words if _completes(word, output)}
    if len(output) < params.min_tokens:
        forbidden.update(params.stop_token_ids)
    if forbidden:
        logits_V[_ids(sorted(forbidden))] = float("-inf")
    if params.logit_bias:
        token_ids, biases = zip(*params.logit_bias, strict=True)
        logits_V[_ids(token_ids)] += logits_V.new_tensor(biases)
    if params.repetition_penalty != 1:
        seen = torch.cat((_ids(prompt), _ids(output)))
        logits = logits_V[seen]
        # An infinite penalty would turn a logit of 0 into NaN. A penalty near 0 could make two
        # logits infinite, and their difference NaN.
        most = torch.finfo(logits.dtype).max
        penalty = min(params.repetition_penalty, most)
        logits_V[seen] = torch.where(logits > 0, logits / penalty, logits * penalty).clamp(max=most)
    if output and (params.frequency_penalty or params.presence_penalty):
        ids, counts = np.unique(np.asarray(output, np.int64), return_counts=True)
        logits_V[_ids(ids)] -= (
            params.frequency_penalty * torch.from_numpy(counts) + params.presence_penalty
        )
    return logits_V


def _completes(word: Sequence[int], output: Sequence[int]) -> bool:
    num_before = len(word) - 1
    return num_before <= len(output) and tuple(output[len(output) - num_before :]) == tuple(
        word[:-1]
    )


def _ids(token_ids: Sequence[int] | np.ndarray) -> Tensor:
    return torch.from_numpy(np.asarray(token_ids, np.int64))
