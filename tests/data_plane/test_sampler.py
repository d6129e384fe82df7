"""Sampling: the distributions of `transformers`, drawn by a counter, for every row as if it were alone."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from data_plane.sampler import sample_rows, token_probabilities, uniform
from nanocp.sampling import SamplingParams

VOCABULARY = 50


def make_logits(num_rows=1, seed=0, vocabulary=VOCABULARY):
    return 3 * torch.randn(num_rows, vocabulary, generator=torch.Generator().manual_seed(seed))


def reference_probabilities(logits_V, temperature, top_k, top_p):
    processors = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        processors.append(TopPLogitsWarper(top_p))
    return processors(None, logits_V[None].double())[0].softmax(dim=-1)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 1000),
    temperature=st.floats(0.05, 5.0),
    top_k=st.sampled_from([0, 1, 2, 7, 49, 50, 400]),
    top_p=st.one_of(st.just(1.0), st.floats(0.001, 0.999)),
)
def test_the_distribution_is_that_of_transformers(seed, temperature, top_k, top_p):
    (logits,) = make_logits(seed=seed)
    found = token_probabilities(logits, SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p))
    expected = reference_probabilities(logits, temperature, top_k, top_p)
    assert torch.equal(found > 0, expected > 0), "the same tokens are left"
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-5)
    assert found.sum() == pytest.approx(1)


def test_equal_logits_at_the_edge_of_top_k_all_stay():
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 0.0])
    found = token_probabilities(logits, SamplingParams(top_k=2))
    assert (found > 0).tolist() == [False, True, True, True, False]
    torch.testing.assert_close(found, reference_probabilities(logits, 1.0, 2, 1.0))


def test_top_p_keeps_the_smallest_set_that_reaches_it_and_at_least_one():
    logits = torch.tensor([0.5, 0.2, 0.2, 0.1]).log()
    for top_p, kept in ((0.001, 1), (0.45, 1), (0.55, 2), (0.75, 3), (0.95, 4)):
        found = token_probabilities(logits, SamplingParams(top_p=top_p))
        assert int((found > 0).sum()) == kept, top_p
        assert found.argmax() == 0


@pytest.mark.parametrize("temperature", [0.5, 1.0, 30.0])
@pytest.mark.parametrize("top_k", [0, 700])
def test_top_p_of_a_large_vocabulary(temperature, top_k):
    """Whether a few tokens reach top_p or all must be sorted."""
    (logits,) = make_logits(seed=3, vocabulary=5000)
    for top_p in (0.1, 0.9, 0.999):
        found = token_probabilities(logits, SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p))
        expected = reference_probabilities(logits, temperature, top_k, top_p)
        assert torch.equal(found > 0, expected > 0)
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-6)


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-300, 5e-324])
def test_a_temperature_near_zero_is_the_argmax_and_never_nan(temperature):
    logits = make_logits(4, seed=5)
    params = SamplingParams(temperature=temperature, top_p=0.9)
    assert not token_probabilities(logits[0], params).isnan().any()
    assert sample_rows(logits, [params] * 4, range(4)) == logits.argmax(dim=-1).tolist()


def test_greedy_ignores_every_other_parameter():
    logits = make_logits(3, seed=6)
    params = [
        SamplingParams(temperature=0.0, top_k=3, top_p=0.5, seed=seed, max_tokens=9, stop_token_ids=(1,))
        for seed in range(3)
    ]
    assert sample_rows(logits, params, [0, 4, 8]) == logits.argmax(dim=-1).tolist()


def test_greedy_takes_the_lowest_id_of_equal_logits():
    assert sample_rows(torch.tensor([[0.0, 7.0, 7.0]]), [SamplingParams(temperature=0.0)], [0]) == [1]


def test_a_rows_token_does_not_depend_on_its_batch():
    logits = make_logits(12, seed=7)
    params = [
        SamplingParams(
            temperature=[0.0, 0.7, 1.5][row % 3],
            top_k=[0, 5][row % 2],
            top_p=[1.0, 0.8, 0.9, 0.3][row % 4],
            seed=row // 2,
            max_tokens=50,
            min_tokens=[0, 20][row % 2],
            stop_token_ids=(row, row + 1),
        )
        for row in range(12)
    ]
    indices = [3 * row for row in range(12)]
    together = sample_rows(logits, params, indices)
    for order in ([11, 0, 5], [7], list(reversed(range(12)))):
        found = sample_rows(logits[order], [params[row] for row in order], [indices[row] for row in order])
        assert found == [together[row] for row in order]


def test_the_callers_logits_stay_as_they_were():
    logits = make_logits(3, seed=8)
    before = logits.clone()
    params = SamplingParams(temperature=0.8, top_k=4, top_p=0.5, max_tokens=9, min_tokens=5, stop_token_ids=(1, 2))
    sample_rows(logits, [params] * 3, [0, 1, 6])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_stop_tokens_are_masked_below_min_tokens_only_and_only_in_their_row(temperature):
    logits = torch.zeros(3, VOCABULARY)
    logits[:, 4], logits[:, 9], logits[:, 20] = 90.0, 80.0, 70.0
    stopping = SamplingParams(temperature=temperature, max_tokens=9, min_tokens=3, stop_token_ids=(4, 9))
    free = SamplingParams(temperature=temperature, max_tokens=9, min_tokens=3)
    assert sample_rows(logits, [stopping, free, stopping], [2, 2, 3]) == [20, 4, 4]
    assert sample_rows(logits, [stopping] * 3, [0, 1, 2]) == [20, 20, 20]


def test_masked_stop_tokens_do_not_count_towards_top_k_and_top_p():
    logits = torch.tensor([[9.0, 8.0, 7.0, 6.9, -5.0]])
    params = SamplingParams(top_k=2, top_p=0.9, max_tokens=99, min_tokens=99, stop_token_ids=(0, 1))
    drawn = {sample_rows(logits, [params], [index])[0] for index in range(60)}
    assert drawn == {2, 3}


def test_uniform_is_a_function_of_seed_and_index_alone():
    assert uniform(3, 5) == uniform(3, 5)
    numbers = {uniform(seed, index) for seed in (0, 1, 2, 2**63 - 1) for index in range(500)}
    assert len(numbers) == 2000, "no two counters share a number"
    assert all(0 <= number < 1 for number in numbers)


def test_uniform_is_uniform_along_indices_and_along_seeds():
    for numbers in ([uniform(7, index) for index in range(4000)], [uniform(seed, 0) for seed in range(4000)]):
        counts = torch.tensor(numbers).histc(20, 0, 1)
        chi_squared = float(((counts - 200) ** 2 / 200).sum())
        assert chi_squared < 45.3, "19 degrees of freedom: exceeded once in 1,500 draws"
        pairs = torch.corrcoef(torch.tensor([numbers[:-1], numbers[1:]]))
        assert abs(float(pairs[0, 1])) < 4 / math.sqrt(4000)


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (6, 1.0), (0, 0.8), (10, 0.7)])
def test_drawn_tokens_have_the_distribution(top_k, top_p):
    (logits,) = make_logits(seed=9, vocabulary=12)
    params = SamplingParams(temperature=2.0, top_k=top_k, top_p=top_p, seed=1)
    probability = token_probabilities(logits, params)
    count = 3000
    drawn = sample_rows(logits.expand(count, -1), [params] * count, range(count))
    frequency = torch.bincount(torch.tensor(drawn), minlength=12).double() / count
    assert (frequency[probability == 0] == 0).all(), "filtered tokens are never drawn"
    error = (frequency - probability) / (probability * (1 - probability) / count).sqrt().clamp_min(1e-9)
    assert error.abs().max() < 4, "standard deviations"


def test_numbers_stay_what_they_are():
    """A resumed or re-bound request must draw on: the numbers are part of what a seed promises."""
    numbers = [uniform(0, 0), uniform(0, 1), uniform(1, 0)]
    assert numbers == [0.0564663990004608, 0.44008326622012284, 0.6487508310490744]
