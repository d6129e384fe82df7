"""Predictor constants, fitted to measured passes by least squares on the relative error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from statistics import fmean, median
from typing import Any, NamedTuple

from control_plane.scheduler.pipeline.predictor import PassFeatures, pass_features, predict_pass
from nanocp.config.choices import check_one_of
from nanocp.config.passes import PassCosts
from nanocp.values.passes import Span

FORMS: dict[str, tuple[str, ...]] = {
    "paper": ("token_us", "token_length_us", "request_us"),
    "ours": (
        "token_us",
        "token_length_us",
        "request_us",
        "layer_us",
        "decode_length_us",
        "chunk_us",
        "cached_us",
        "expert_us",
    ),
}
"""Constants of a layer's time that each form has: those of DynaPipe's paper (3.1), and ours."""
_SAMPLING = {
    "paper": ("sampled_us", "sampling_us"),
    "ours": ("sampled_us", "sampling_us", "drawn_us", "nucleus_us", "controls_us", "logprobs_us"),
}
_DENSE = {
    "paper": ("dense_layer_token_us", "dense_layer_token_length_us"),
    "ours": ("dense_layer_us", "dense_layer_token_us", "dense_layer_token_length_us"),
}


class _Bend(NamedTuple):
    """Piecewise-linear part of a time, by names of PassCosts."""

    together: str
    """Position of the bend in tokens."""
    token_us: str
    more_us: str
    count: Callable[[PassFeatures], int]


_MORE_SAMPLED = _Bend(
    "sampled_together", "sampled_us", "more_sampled_us", lambda found: found.sampled
)
_MORE_IN_DENSE = _Bend(
    "dense_layer_together",
    "dense_layer_token_us",
    "dense_layer_more_us",
    lambda found: found.tokens,
)
_NUMBERS_TOGETHER = sorted({most << power for most in (2, 3) for power in range(9)})
"""Candidate positions of the bend; all are tried."""
_LEAST_BEYOND = 3
_ROUNDING = 1e-12
"""Smaller squared errors are zero."""
_FEATURE: dict[str, Callable[[PassFeatures], float]] = {
    "token_us": lambda found: found.tokens,
    "token_length_us": lambda found: found.attended,
    "request_us": lambda found: found.requests,
    "layer_us": lambda found: 1.0,
    "decode_length_us": lambda found: found.decode_lengths,
    "chunk_us": lambda found: float(found.has_chunk),
    "cached_us": lambda found: found.cached,
    "expert_us": lambda found: found.experts,
    "dense_layer_us": lambda found: 1.0,
    "dense_layer_token_us": lambda found: found.tokens,
    "dense_layer_token_length_us": lambda found: found.attended,
    "sampled_us": lambda found: found.sampled,
    "sampling_us": lambda found: 1.0,
    "drawn_us": lambda found: found.drawn,
    "nucleus_us": lambda found: found.nucleus,
    "controls_us": lambda found: found.controls,
    "logprobs_us": lambda found: found.logprobs,
}


class MeasuredPass(NamedTuple):
    """A pass with its measured times."""

    spans: tuple[Span, ...]
    layer_us: float
    sample_us: float
    works: tuple[int, ...] = ()
    """For each span, the SamplerWork of its request; empty: all are greedy."""
    dense_us: float = 0.0
    """0 without dense layers."""
    stage_us: float | None = None
    """Time besides layers and sampling; None if unknown."""


class FitError(NamedTuple):
    """Mean relative errors."""

    layer: float
    sampling: float
    dense: float
    """Error of a dense layer; 0 if none is."""


def draw_mixes(num_mixes: int, seed: int = 0) -> list[tuple[Span, ...]]:
    """Passes to measure: rows that decode, chunks of prompts, and both, of random lengths."""
    random = Random(seed)
    mixes = []
    for _ in range(num_mixes):
        num_rows = random.choice([0, random.randrange(1, 33), random.randrange(1, 257)])
        num_chunks = random.choice([0, 1, 1, 3]) if num_rows else 1
        spans = [Span(i, random.randrange(16, 2048), 1, True) for i in range(num_rows)]
        for i in range(num_chunks):
            first = random.choice([0, 0, 64 * random.randrange(32)])
            num_tokens = random.randrange(16, 2048 // num_chunks)
            spans.append(Span(num_rows + i, first, num_tokens, random.random() < 0.5))
        mixes.append(tuple(spans))
    return mixes


def fit_costs(
    form: str,
    passes: Sequence[MeasuredPass],
    num_experts: int = 0,
    experts_per_token: int = 0,
    dense_layers: int = 0,
) -> PassCosts:
    """The constants of least squared relative error.

    form: a name of FORMS. dense_layers: see PassCosts. Raises ValueError for another form, and
    without passes that sample.
    """
    check_one_of(tuple(FORMS), predictor=form)
    experts = num_experts, experts_per_token
    found = [pass_features(one.spans, *experts, one.works) for one in passes]
    sampling = [(each, one.sample_us) for each, one in zip(found, passes, strict=True)]
    sampling = [(each, us) for each, us in sampling if each.sampled and us > 0]
    found_sampling, sampling_us = [each for each, _ in sampling], [us for _, us in sampling]
    constants = _constants(FORMS[form], found, [one.layer_us for one in passes]).constants
    numbers = _NUMBERS_TOGETHER if form == "ours" else ()
    constants |= _bent(_SAMPLING[form], _MORE_SAMPLED, numbers, found_sampling, sampling_us)
    if dense_layers:
        dense_us = [one.dense_us for one in passes]
        constants |= _bent(_DENSE[form], _MORE_IN_DENSE, numbers, found, dense_us)
    besides_us = [one.stage_us for one in passes if one.stage_us is not None]
    if form == "ours" and besides_us:
        # A small difference of long times: the median, since single ones may be far off.
        constants["stage_us"] = max(median(besides_us), 0.0)
    return PassCosts(
        **constants,
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        dense_layers=dense_layers,
    )


def fit_error(costs: PassCosts, passes: Sequence[MeasuredPass]) -> FitError:
    """Mean errors of the constants."""
    times = [predict_pass(one.spans, costs, one.works) for one in passes]
    pairs = list(zip(times, passes, strict=True))
    dense = [abs(time.dense_us / one.dense_us - 1) for time, one in pairs if one.dense_us]
    return FitError(
        fmean(abs(time.layer_us / one.layer_us - 1) for time, one in pairs),
        fmean(abs(time.sample_us / one.sample_us - 1) for time, one in pairs if one.sample_us),
        fmean(dense or [0.0]),
    )


class _Fitted(NamedTuple):
    constants: dict[str, Any]
    squared: float


def _bent(
    names: Sequence[str],
    bend: _Bend,
    numbers: Sequence[int],
    found: Sequence[PassFeatures],
    us: Sequence[float],
) -> dict[str, Any]:
    """Fit a piecewise-linear time that never falls.

    numbers: candidate bends; the best fit may have none.
    """
    best = _constants(names, found, us)
    for number in numbers:
        if sum(bend.count(each) > number for each in found) < _LEAST_BEYOND:
            continue
        more = {bend.more_us: lambda each, number=number: max(bend.count(each) - number, 0)}
        fitted = _constants((*names, bend.more_us), found, us, more)
        beyond_us = fitted.constants[bend.token_us] + fitted.constants[bend.more_us]
        if beyond_us >= 0 and fitted.squared < best.squared - _ROUNDING:
            best = fitted._replace(constants=fitted.constants | {bend.together: number})
    return best.constants


def _constants(
    names: Sequence[str],
    found: Sequence[PassFeatures],
    us: Sequence[float],
    more: Mapping[str, Callable[[PassFeatures], float]] | None = None,
) -> _Fitted:
    features = _FEATURE | dict(more or {})
    there = [name for name in names if any(map(features[name], found))]
    rows = [[features[name](each) for name in there] for each in found]
    factors, squared = _least_squares(rows, us)
    return _Fitted(dict.fromkeys(names, 0.0) | dict(zip(there, factors, strict=True)), squared)


def _least_squares(rows: list[list[float]], values: Sequence[float]) -> tuple[list[float], float]:
    import numpy

    if not rows:
        raise ValueError("no pass was measured from which the constants could be fitted")
    scaled = numpy.array(rows) / numpy.array(values)[:, None]
    size = numpy.abs(scaled).max(axis=0)
    size[size == 0] = 1.0
    factors = numpy.linalg.lstsq(scaled / size, numpy.ones(len(values)), rcond=None)[0]
    squared = float(numpy.square(scaled / size @ factors - 1).sum())
    return [float(factor) for factor in factors / size], squared
