"""The predictor's fit: constants that made the times are found again, in both forms."""

import time

import pytest

from control_plane.scheduler.pipeline.predictor import pass_features, predict_pass
from nanocp.passes import PassCosts, Span
from nanocp.simulator.pipeline.fit import MeasuredPass, draw_mixes, fit_costs, fit_error

KNOWN = PassCosts(
    token_us=3.0,
    token_length_us=0.002,
    request_us=0.7,
    layer_us=400.0,
    decode_length_us=0.01,
    chunk_us=25.0,
    cached_us=0.05,
    expert_us=4.0,
    sampled_us=11.0,
    sampling_us=1250.0,
    num_experts=64,
    experts_per_token=4,
)


def measured(costs, num_mixes, seed):
    mixes = draw_mixes(num_mixes, seed)
    return [MeasuredPass(spans, *predict_pass(spans, costs)) for spans in mixes]


def test_what_a_pass_holds():
    spans = (Span(1, 99, 1, True), Span(2, 9, 1, True), Span(3, 64, 36, False))
    found = pass_features(spans, num_experts=8, experts_per_token=2)
    assert found[:6] == (38, 100 + 10 + 36 * 100, 3, 110, True, 64)
    assert found.experts == pytest.approx(8 * (1 - 0.75**38))
    assert found.sampled == 2
    assert pass_features(spans[:1]) == (1, 100, 1, 100, False, 0, 0.0, 1)


def test_known_constants_are_found_again():
    found = fit_costs("ours", measured(KNOWN, 200, seed=1), 64, 4)
    for name in PassCosts.__dataclass_fields__:
        assert getattr(found, name) == pytest.approx(getattr(KNOWN, name), rel=1e-6), name
    assert fit_error(found, measured(KNOWN, 100, seed=2)).layer < 1e-6


def test_the_papers_form_lacks_what_ours_has():
    passes = measured(KNOWN, 200, seed=1)
    held_out = measured(KNOWN, 100, seed=2)
    paper = fit_error(fit_costs("paper", passes), held_out)
    ours = fit_error(fit_costs("ours", passes, 64, 4), held_out)
    assert ours.layer <= 0.35 * paper.layer
    assert paper.sampling < 1e-6


def test_constants_of_the_papers_form_make_its_prediction():
    costs = fit_costs("paper", measured(KNOWN, 100, seed=1))
    assert (costs.layer_us, costs.decode_length_us, costs.chunk_us, costs.cached_us) == (0,) * 4
    spans = (Span(1, 9, 1, True), Span(2, 0, 5, True))
    expected_us = sum(
        costs.token_us * n + costs.token_length_us * n * length + costs.request_us
        for n, length in ((1, 10), (5, 5))
    )
    assert predict_pass(spans, costs).layer_us == pytest.approx(max(expected_us, 0.0))


def test_a_prediction_is_never_negative():
    costs = PassCosts(token_us=-5.0, sampled_us=-1.0)
    assert predict_pass((Span(1, 9, 1, True),), costs) == (0.0, 0.0)


def test_nothing_to_fit_is_an_error():
    with pytest.raises(ValueError, match="no pass was measured"):
        fit_costs("ours", [])


def test_a_prediction_of_a_pass_costs_less_than_planning_it():
    spans = tuple(Span(i, 100 + i, 1, True) for i in range(16))
    begin = time.process_time()
    for _ in range(200):
        predict_pass(spans, KNOWN)
    assert (time.process_time() - begin) / 200 < 1e-3, "it is a few microseconds"
