"""How long a pass takes, before it runs: a layer, and sampling.

Enters: the spans of a pass and fitted constants. Leaves: microseconds. Does not know: layouts.
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


def predict_pass(spans: Sequence[Span], costs: PassCosts) -> PassTimes:
    """The times of a pass in the form of DynaPipe's paper (3.1)."""
    layer_us, num_sampled = 0.0, 0
    for span in spans:
        length = span.first + span.num_tokens
        layer_us += costs.request_us + span.num_tokens * (
            costs.token_us + costs.token_length_us * length
        )
        num_sampled += span.samples
    sample_us = costs.sampled_us * num_sampled + (costs.sampling_us if num_sampled else 0.0)
    return PassTimes(layer_us, sample_us)
