"""Predictions of the time of a pass by fitted constants, and the learned slowness of stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from nanocp.config.passes import PassCosts
from nanocp.values.passes import SamplerWork, Span

_WORKS = tuple(map(int, SamplerWork))

_PASSES_REMEMBERED = 4
"""Passes whose prediction is kept for each stage: more than can be in flight."""
_MEMORY = 0.98
"""Weight of learned values when another pass comes: about 50 passes count."""
_LEAST_PASSES = 10
"""Passes of each stage before its speed counts."""
_LEAST_SLOWNESS = 1.3
"""A smaller slowness may be an error of the prediction of logits and sampling."""


class PassTimes(NamedTuple):
    """The predicted times of one pass."""

    layer_us: float
    """Time of one layer, with experts if some are dense."""
    sample_us: float
    """Time of the last stage for logits and sampling."""
    dense_us: float = 0.0
    """Time of one dense layer."""
    dense_layers: int = 0
    """The first layers."""
    stage_us: float = 0.0
    """Time of any stage besides its layers and sampling."""


def stage_times(
    split: Sequence[int], times: PassTimes, slowness: Sequence[float] | None = None
) -> list[float]:
    """Return the time of each stage for a pass, in us.

    split: layers of each stage. slowness: each stage's time for 1 us of the prediction.
    """
    us = [times.stage_us + count * times.layer_us for count in split]
    left, more_us = times.dense_layers, times.dense_us - times.layer_us
    for stage, count in enumerate(split):
        if left <= 0:
            break
        us[stage] += min(left, count) * more_us
        left -= count
    us[-1] += times.sample_us
    return us if slowness is None else [a * b for a, b in zip(us, slowness, strict=True)]


class StageSpeeds:
    """The slowness of each stage beside the fastest, learned from passes."""

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self.begin_term()

    def begin_term(self) -> None:
        """Start to learn again, since a stage may be on another host."""
        self._predicted: dict[int, list[float]] = {}
        """Pass -> predicted time of each stage, for the latest passes."""
        self._sums = [(0.0, 0.0)] * self._num_stages
        """Predicted and taken time of each stage, in us; older passes weigh less."""
        self._num_ran = 0
        self.slowness = (1.0,) * self._num_stages
        """Time of each stage over that of the fastest, for the same work.

        Differences that may be the prediction's own error are left out.
        """

    def planned(self, number: int, predicted_us: list[float]) -> None:
        """Record the predicted time of each stage for a pass."""
        self._predicted[number] = predicted_us
        if len(self._predicted) > _PASSES_REMEMBERED * self._num_stages:
            del self._predicted[next(iter(self._predicted))]

    def ran(self, stage: int, number: int, us: float) -> None:
        """Record the time that a stage worked on a pass."""
        if number not in self._predicted:
            return
        if self._predicted[number][stage] > 0:  # else nothing is known of what it did
            predicted_us, took_us = self._sums[stage]
            self._sums[stage] = (
                predicted_us * _MEMORY + self._predicted[number][stage],
                took_us * _MEMORY + us,
            )
        self._num_ran += 1
        if stage == self._num_stages - 1 and self._num_ran > _LEAST_PASSES * self._num_stages:
            ratios = [took / predicted if predicted else None for predicted, took in self._sums]
            fastest = min((each for each in ratios if each is not None), default=0.0) or 1.0
            slow = [1.0 if each is None else round(each / fastest, 1) for each in ratios]
            self.slowness = tuple(each if each >= _LEAST_SLOWNESS else 1.0 for each in slow)


class PassFeatures(NamedTuple):
    """Quantities behind the times of a pass; PassCosts has a constant for each."""

    tokens: int
    attended: int
    """Tokens times the length of their request after the pass, summed over requests."""
    requests: int
    decode_lengths: int
    """Sum of the lengths of the rows that decode."""
    has_chunk: bool
    cached: int
    """Tokens of prompts before their chunks."""
    experts: float
    """Experts of a layer that the tokens are expected to visit, if all are equally likely."""
    sampled: int
    """Tokens that are sampled."""
    drawn: int = 0
    nucleus: int = 0
    controls: int = 0
    logprobs: int = 0
    """Sampled tokens by their kind of sampling (SamplerWork); one may count in each."""


def pass_features(
    spans: Sequence[Span],
    num_experts: int = 0,
    experts_per_token: int = 0,
    works: Sequence[int] = (),
) -> PassFeatures:
    """Count the features of a pass. A span of one token counts as a row that decodes.

    works: for each span, the SamplerWork; empty: all are greedy.
    """
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
        *_work_counts(spans, works),
    )


def _work_counts(spans: Sequence[Span], works: Sequence[int]) -> Sequence[int]:
    if not any(works):
        return ()
    asked = [work for span, work in zip(spans, works, strict=True) if span.samples and work]
    return [sum(work & each > 0 for work in asked) for each in _WORKS]


def predict_pass(spans: Sequence[Span], costs: PassCosts, works: Sequence[int] = ()) -> PassTimes:
    """Return the times of a pass, none negative. works: see pass_features."""
    found = pass_features(spans, costs.num_experts, costs.experts_per_token, works)
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
    sample_us = (
        costs.sampled_us * found.sampled
        + costs.more_sampled_us * max(found.sampled - costs.sampled_together, 0)
        + (costs.sampling_us if found.sampled else 0.0)
        + costs.drawn_us * found.drawn
        + costs.nucleus_us * found.nucleus
        + costs.controls_us * found.controls
        + costs.logprobs_us * found.logprobs
    )
    dense_us = 0.0
    if costs.dense_layers:
        dense_us = (
            costs.dense_layer_us
            + costs.dense_layer_token_us * found.tokens
            + costs.dense_layer_token_length_us * found.attended
            + costs.dense_layer_more_us * max(found.tokens - costs.dense_layer_together, 0)
        )
    times = max(layer_us, 0.0), max(sample_us, 0.0), max(dense_us, 0.0)
    return PassTimes(*times, costs.dense_layers, max(costs.stage_us, 0.0))
