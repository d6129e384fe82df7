"""The predictor's fit: constants that made the times are found again, in both forms."""

import time
from dataclasses import replace
from random import Random

import pytest

from control_plane.scheduler.pipeline.predictor import PassTimes, pass_features, predict_pass
from nanocp.config.file import load_config
from nanocp.config.passes import PassCosts
from nanocp.simulator.pipeline.fit import MeasuredPass, draw_mixes, fit_costs, fit_error
from nanocp.values.passes import SamplerWork, Span
from nanocp.values.sampling import SamplingParams

KNOWN = PassCosts(
    token_us=3.0, token_length_us=0.002, request_us=0.7, layer_us=400.0, decode_length_us=0.01,
    chunk_us=25.0, cached_us=0.05, expert_us=4.0, sampled_us=11.0, sampling_us=1250.0,
    sampled_together=24, more_sampled_us=37.0, drawn_us=70.0, nucleus_us=300.0, controls_us=90.0,
    logprobs_us=150.0, num_experts=64, experts_per_token=4,
)  # fmt: skip

NUCLEUS = SamplingParams(temperature=1.0, top_k=5)
CONTROLLED = SamplingParams(temperature=0.0, top_p=0.5, presence_penalty=0.1)


def measured(costs, num_mixes, seed):
    random, passes = Random(seed), []
    for spans in draw_mixes(num_mixes, seed):
        works = tuple(random.choice([0, 1, 3, 4, 8, 15]) for _ in spans)
        layer_us, sample_us, dense_us, *_ = predict_pass(spans, costs, works)
        passes.append(MeasuredPass(spans, layer_us, sample_us, works, dense_us))
    return passes


def test_what_a_pass_holds():
    spans = (Span(1, 99, 1, True), Span(2, 9, 1, True), Span(3, 64, 36, False))
    found = pass_features(spans, num_experts=8, experts_per_token=2)
    assert found[:6] == (38, 100 + 10 + 36 * 100, 3, 110, True, 64)
    assert found.experts == pytest.approx(8 * (1 - 0.75**38))
    assert found.sampled == 2
    assert pass_features(spans[:1]) == (1, 100, 1, 100, False, 0, 0.0, 1, 0, 0, 0, 0)


def test_what_sampling_takes_is_counted_for_tokens_that_are_sampled():
    spans = (Span(1, 99, 1, True), Span(2, 9, 1, True), Span(3, 64, 36, False))
    works = [params.work for params in (NUCLEUS, CONTROLLED, NUCLEUS)]
    assert works == [SamplerWork.DRAWN | SamplerWork.NUCLEUS, SamplerWork.CONTROLS, works[0]]
    assert pass_features(spans, works=works)[7:] == (2, 1, 1, 1, 0)
    assert replace(CONTROLLED, logprobs=0).work == SamplerWork.CONTROLS | SamplerWork.LOGPROBS
    costs = PassCosts(sampled_us=1.0, drawn_us=10.0, nucleus_us=100.0, controls_us=1000.0)
    assert predict_pass(spans, costs, works).sample_us == 1112.0


def test_known_constants_are_found_again():
    found = fit_costs("ours", measured(KNOWN, 200, seed=1), 64, 4)
    for name in PassCosts.__dataclass_fields__:
        assert getattr(found, name) == pytest.approx(getattr(KNOWN, name), rel=1e-6), name
    assert fit_error(found, measured(KNOWN, 100, seed=2)).layer < 1e-6


def test_a_dense_layer_has_constants_of_its_own():
    known = replace(
        KNOWN, dense_layers=3, dense_layer_us=250.0, dense_layer_token_us=2.0,
        dense_layer_token_length_us=0.003, dense_layer_together=16, dense_layer_more_us=5.0,
    )  # fmt: skip
    found = fit_costs("ours", measured(known, 200, seed=1), 64, 4, dense_layers=3)
    for name in PassCosts.__dataclass_fields__:
        assert getattr(found, name) == pytest.approx(getattr(known, name), rel=1e-5), name
    held_out = measured(known, 100, seed=2)
    assert fit_error(found, held_out).dense < 1e-6
    assert fit_error(replace(found, dense_layer_more_us=0.0), held_out).dense > 0.1
    times = predict_pass((Span(1, 99, 1, True),), known)
    assert (times.dense_us, times.dense_layers) == (pytest.approx(250.0 + 2.0 + 0.3), 3)


def test_what_a_stage_takes_besides_is_the_median_of_what_is_known():
    passes = measured(KNOWN, 5, seed=1)
    besides_us = (None, 1400.0, -20_000.0, 1300.0, 90_000.0)
    passes = [each._replace(stage_us=us) for each, us in zip(passes, besides_us, strict=True)]
    found = fit_costs("ours", passes, 64, 4)
    assert found.stage_us == predict_pass(passes[0].spans, found).stage_us == 1350.0
    assert fit_costs("paper", passes).stage_us == 0.0, "the paper's form has no such constant"


def test_constants_of_an_older_profile_are_refused_by_name(tmp_path):
    """A dense layer's were relative to the other layers'."""
    path = tmp_path / "profile.yaml"
    path.write_text("pipeline: {costs: {dense_us: -150.0}}")
    with pytest.raises(ValueError, match="dense_us"):
        load_config(None, {"scheduler.profile": str(path)}, {})


def test_dense_layers_that_take_no_time_are_refused(tmp_path):
    """That is what is left of an older profile without the key that is refused."""
    path = tmp_path / "profile.yaml"
    given = {"scheduler.profile": str(path)}
    path.write_text("pipeline: {costs: {dense_layers: 3}}")
    with pytest.raises(ValueError, match=r"dense_layers is 3, .* run nanocp profile again"):
        load_config(None, given, {})
    path.write_text("pipeline: {costs: {dense_layers: 3, dense_layer_token_us: 2.0}}")
    assert load_config(None, given, {}).pipeline.costs.dense_layers == 3


@pytest.mark.parametrize("name", ["sampled_together", "dense_layers", "dense_layer_together"])
def test_numbers_of_tokens_and_layers_are_not_negative(name):
    with pytest.raises(ValueError, match=f"{name} is -1; it must be at least 0"):
        PassCosts(**{name: -1})


def test_tokens_that_are_sampled_beyond_some_number_take_another_time():
    rows = tuple(Span(i, 99, 1, True) for i in range(30))
    costs = PassCosts(sampling_us=1000.0, sampled_us=1.0, sampled_together=8, more_sampled_us=60.0)
    found = [predict_pass(rows[:count], costs).sample_us for count in (1, 8, 9, 30)]
    assert found == [1001.0, 1008.0, 1069.0, 1030.0 + 22 * 60.0]
    passes = [
        MeasuredPass(rows[:count], 1.0, predict_pass(rows[:count], costs).sample_us)
        for count in (1, 4, 12, 20, 30)
    ]
    fitted = fit_costs("ours", passes)
    assert fit_error(fitted, passes).sampling < 1e-6
    straight = replace(fit_costs("paper", passes), layer_us=1.0)
    assert fit_error(straight, passes).sampling > 0.03


def sampled(us_of):
    """Passes of so many rows that decode, by the time of their sampling."""
    rows = tuple(Span(i, 99, 1, True) for i in range(max(us_of)))
    return [MeasuredPass(rows[:count], 1.0, us) for count, us in us_of.items()]


def test_a_bend_follows_no_single_pass():
    straight = {count: 100.0 + 10 * count for count in (1, 2)}
    found = fit_costs("ours", sampled(straight | {24: 600.0, 28: 750.0}))
    assert (found.sampled_together, found.more_sampled_us) == (0, 0.0)
    many = {24: 600.0, 28: 750.0, 32: 900.0}
    assert fit_costs("ours", sampled(straight | many)).sampled_together > 0


def test_more_tokens_never_take_less():
    falling = {count: 100.0 + 10 * min(count, 30 - count) for count in range(1, 21)}
    found = fit_costs("ours", sampled(falling))
    assert found.sampled_us + found.more_sampled_us >= 0
    assert found.sampled_together != 12, "it falls soon after"


def test_the_papers_form_lacks_what_ours_has():
    passes = measured(KNOWN, 200, seed=1)
    held_out = measured(KNOWN, 100, seed=2)
    paper = fit_error(fit_costs("paper", passes), held_out)
    ours = fit_error(fit_costs("ours", passes, 64, 4), held_out)
    assert ours.layer <= 0.35 * paper.layer
    assert ours.sampling < 1e-6 < 0.1 < paper.sampling, "the paper knows no kinds of sampling"


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
    assert predict_pass((Span(1, 9, 1, True),), costs) == PassTimes(0.0, 0.0)


def test_nothing_to_fit_is_an_error():
    with pytest.raises(ValueError, match="no pass was measured"):
        fit_costs("ours", [])


def test_a_prediction_of_a_pass_costs_less_than_planning_it():
    spans = tuple(Span(i, 100 + i, 1, True) for i in range(16))
    begin = time.process_time()
    for _ in range(200):
        predict_pass(spans, KNOWN)
    assert (time.process_time() - begin) / 200 < 1e-3, "it is a few microseconds"
