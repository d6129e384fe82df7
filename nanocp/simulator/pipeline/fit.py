"""Constants of the predictor, fitted to measured passes by least squares on the relative error.

Enters: passes with the time of a layer and of sampling. Leaves: PassCosts in the paper's form or
ours, and how far they are off. Does not know: where the times come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from statistics import fmean
from typing import NamedTuple

from control_plane.scheduler.pipeline.predictor import PassFeatures, pass_features, predict_pass
from nanocp.choices import check_one_of
from nanocp.passes import PassCosts, Span

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
_FEATURE: dict[str, Callable[[PassFeatures], float]] = {
    "token_us": lambda found: found.tokens,
    "token_length_us": lambda found: found.attended,
    "request_us": lambda found: found.requests,
    "layer_us": lambda found: 1.0,
    "decode_length_us": lambda found: found.decode_lengths,
    "chunk_us": lambda found: float(found.has_chunk),
    "cached_us": lambda found: found.cached,
    "expert_us": lambda found: found.experts,
    "sampled_us": lambda found: found.sampled,
    "sampling_us": lambda found: 1.0,
    "drawn_us": lambda found: found.drawn,
    "nucleus_us": lambda found: found.nucleus,
    "controls_us": lambda found: found.controls,
    "logprobs_us": lambda found: found.logprobs,
}


class MeasuredPass(NamedTuple):
    """A pass, and how long it took."""

    spans: tuple[Span, ...]
    layer_us: float
    """Time of one layer; of one with experts, if some are dense."""
    sample_us: float
    """Time of logits and sampling; 0 if nothing is sampled."""
    works: tuple[int, ...] = ()
    """See predictor.pass_features."""
    dense_us: float = 0.0
    """Time of one dense layer, if some are."""


class FitError(NamedTuple):
    """Mean relative errors."""

    layer: float
    sampling: float


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
    costs = PassCosts(
        **_constants(FORMS[form], found, [one.layer_us for one in passes]),
        **_constants(_SAMPLING[form], [each for each, _ in sampling], [us for _, us in sampling]),
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        dense_layers=dense_layers,
    )
    return _with_dense(costs, passes, found) if dense_layers else costs


def _with_dense(
    costs: PassCosts, passes: Sequence[MeasuredPass], found: Sequence[PassFeatures]
) -> PassCosts:
    """Add what a dense layer takes besides one with experts, but for these."""
    known = [
        predict_pass(one.spans, costs).layer_us - costs.expert_us * each.experts
        for one, each in zip(passes, found, strict=True)
    ]
    rows = [[1.0, float(each.tokens)] for each in found]
    dense_us, token_us = _least_squares(rows, [one.dense_us for one in passes], known)
    return replace(costs, dense_us=dense_us, dense_token_us=token_us)


def fit_error(costs: PassCosts, passes: Sequence[MeasuredPass]) -> FitError:
    """How far the constants are off, on average."""
    times = [predict_pass(one.spans, costs, one.works) for one in passes]
    pairs = list(zip(times, passes, strict=True))
    return FitError(
        fmean(abs(time.layer_us / one.layer_us - 1) for time, one in pairs),
        fmean(abs(time.sample_us / one.sample_us - 1) for time, one in pairs if one.sample_us),
    )


def _constants(
    names: Sequence[str], found: Sequence[PassFeatures], us: Sequence[float]
) -> dict[str, float]:
    """The constants by name; 0 for what no pass has."""
    there = [name for name in names if any(map(_FEATURE[name], found))]
    rows = [[_FEATURE[name](each) for name in there] for each in found]
    factors = _least_squares(rows, us)
    return dict.fromkeys(names, 0.0) | dict(zip(there, factors, strict=True))


def _least_squares(
    rows: list[list[float]], values: Sequence[float], known: Sequence[float] | None = None
) -> list[float]:
    """The factors of the columns; of the relative error, so each row is divided by its value.

    known: what of each value is not the columns'. None: nothing.
    """
    import numpy

    if not rows:
        raise ValueError("no pass was measured from which the constants could be fitted")
    scaled = numpy.array(rows) / numpy.array(values)[:, None]
    size = numpy.abs(scaled).max(axis=0)
    size[size == 0] = 1.0
    wanted = 1 - numpy.array(known or [0.0] * len(values)) / numpy.array(values)
    factors = numpy.linalg.lstsq(scaled / size, wanted, rcond=None)[0]
    return [float(factor) for factor in factors / size]
