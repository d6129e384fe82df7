"""How long a pass takes, before it runs: a layer, and sampling.

Enters: the spans of a pass and fitted constants. Leaves: microseconds. Does not know: layouts, how
the constants were fitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from nanocp.passes import PassCosts, Span


class PassTimes(NamedTuple):
    """What is predicted of one pass."""

    layer_us: float
    """Time of one layer."""
    sample_us: float
    """Time of the last stage for logits and sampling."""


class PassFeatures(NamedTuple):
    """What the time of a layer depends on: PassCosts has a constant for each but the last."""

    tokens: int
    attended: int
    """Tokens times the length of their request after the pass, summed over requests."""
    requests: int
    decode_lengths: int
    """Lengths of the rows that decode."""
    has_chunk: bool
    cached: int
    """Tokens of prompts before their chunks."""
    experts: float
    """Experts of a layer that the tokens are expected to visit, if all are equally likely."""
    sampled: int
    """Tokens that are sampled."""


def pass_features(
    spans: Sequence[Span], num_experts: int = 0, experts_per_token: int = 0
) -> PassFeatures:
    """Count what a pass holds. A span of one token counts as a row that decodes."""
    decode_lengths = num_chunks = chunk_tokens = chunk_attended = cached = sampled = 0
    for _, first, num_tokens, samples in spans:
        if num_tokens == 1:
            decode_lengths += first
        else:
            num_chunks += 1
            chunk_tokens += num_tokens
            chunk_attended += num_tokens * (first + num_tokens)
            cached += first
        sampled += samples
    num_rows = len(spans) - num_chunks
    decode_lengths += num_rows
    tokens = num_rows + chunk_tokens
    experts = 0.0
    if num_experts:
        experts = num_experts * (1 - (1 - experts_per_token / num_experts) ** tokens)
    return PassFeatures(
        tokens,
        decode_lengths + chunk_attended,
        len(spans),
        decode_lengths,
        num_chunks > 0,
        cached,
        experts,
        sampled,
    )


def predict_pass(spans: Sequence[Span], costs: PassCosts) -> PassTimes:
    """The times of a pass; neither is negative, wherever the constants come from."""
    found = pass_features(spans, costs.num_experts, costs.experts_per_token)
    layer_us = (
        costs.layer_us
        + costs.token_us * found.tokens
        + costs.token_length_us * found.attended
        + costs.request_us * found.requests
        + costs.decode_length_us * found.decode_lengths
        + costs.chunk_us * found.has_chunk
        + costs.cached_us * found.cached
        + costs.expert_us * found.experts
    )
    sample_us = costs.sampled_us * found.sampled + (costs.sampling_us if found.sampled else 0.0)
    return PassTimes(max(layer_us, 0.0), max(sample_us, 0.0))
