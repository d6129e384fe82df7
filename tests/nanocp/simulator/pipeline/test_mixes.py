"""What the passes of a profile can tell apart: few short rows are foretold by their fit."""

from collections.abc import Iterator, Sequence
from random import Random

from control_plane.scheduler.pipeline.predictor import predict_pass
from nanocp.config.passes import PassCosts
from nanocp.simulator.fit.pipeline import _MIXES, LoadPhase
from nanocp.simulator.pipeline.fit import MeasuredPass, fit_costs
from nanocp.values.passes import Span

KNOWN = PassCosts(
    token_us=30.0, token_length_us=0.02, request_us=5.0, layer_us=800.0, decode_length_us=0.1,
    chunk_us=100.0, cached_us=0.1, expert_us=125.0, num_experts=32, experts_per_token=4,
)  # fmt: skip
SHORT = tuple(Span(row, 100, 1, True) for row in range(2))
"""Four rows that decode are two in each of two passes in flight."""


def spans_of(phases: Sequence[LoadPhase], most: int, random: Random) -> Iterator[tuple[Span, ...]]:
    """The passes of phases, with at most so many tokens each; rows that end are replaced."""
    for rows, prompt_len, max_tokens, num_passes in phases:
        lengths, firsts = [0] * rows, [0] * rows
        for _ in range(num_passes):
            left, spans = most, []
            for row in range(rows):
                if firsts[row] >= lengths[row] + max_tokens * (lengths[row] > 0):
                    lengths[row], firsts[row] = int(prompt_len * random.uniform(0.75, 1.25)), 0
                num_tokens = min(left, max(1, lengths[row] - firsts[row]))
                if num_tokens:
                    samples = firsts[row] + num_tokens >= lengths[row]
                    spans.append(Span(row, firsts[row], num_tokens, samples))
                firsts[row] += num_tokens
                left -= num_tokens
            yield tuple(spans)


def error_of_short_rows(phases: Sequence[LoadPhase], seed: int) -> float:
    """How far a layer of few short rows is foretold off, by a fit to times with 8% of noise."""
    random, passes = Random(seed), []
    for most in (128, 700):
        for spans in spans_of(phases, most, random):
            times = predict_pass(spans, KNOWN)
            passes.append(MeasuredPass(spans, times.layer_us * random.gauss(1.0, 0.08), 1.0))
    found = fit_costs("ours", passes, KNOWN.num_experts, KNOWN.experts_per_token)
    return abs(predict_pass(SHORT, found).layer_us / predict_pass(SHORT, KNOWN).layer_us - 1)


def test_few_short_rows_are_foretold_by_what_the_mixes_fit():
    assert max(error_of_short_rows(_MIXES, seed) for seed in range(12)) < 0.03
    always_long = [_MIXES[2], _MIXES[3], *_MIXES[5:]]
    assert max(error_of_short_rows(always_long, seed) for seed in range(12)) > 0.03
