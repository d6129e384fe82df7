"""Sampling: distributions as in `transformers`, drawn by a counter, each row independent."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from data_plane.instance import sampler
from data_plane.instance.sampler import (
    _is_in_flat_nucleus,
    _is_in_nucleus,
    controlled_logits,
    gumbel_max,
    inverse,
    token_logprobs,
    token_probabilities,
    uniform,
)
from nanocp.values.sampling import SamplingParams

VOCABULARY = 50


def sample_rows(logits, params, indices, draw=inverse):
    """Sample rows that have generated `indices` tokens each; which tokens does not matter."""
    return sampler.sample_rows(
        logits, params, [[0] * index for index in indices], [[]] * len(params), draw=draw
    )


def make_logits(num_rows=1, seed=0, vocabulary=VOCABULARY):
    return 3 * torch.randn(num_rows, vocabulary, generator=torch.Generator().manual_seed(seed))


def reference_probabilities(logits_V, temperature, top_k, top_p, min_p=0.0):
    processors = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if min_p:
        processors.append(MinPLogitsWarper(min_p))
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        processors.append(TopPLogitsWarper(top_p))
    return processors(None, logits_V[None].double())[0].softmax(dim=-1)


@settings(max_examples=150)
@given(
    seed=st.integers(0, 1000),
    temperature=st.floats(0.05, 5.0),
    top_k=st.sampled_from([0, 1, 2, 7, 49, 50, 400]),
    top_p=st.one_of(st.just(1.0), st.floats(0.001, 0.999)),
    min_p=st.one_of(st.just(0.0), st.just(1.0), st.floats(1e-6, 0.999)),
)
def test_the_distribution_is_that_of_transformers(seed, temperature, top_k, top_p, min_p):
    (logits,) = make_logits(seed=seed)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    found = token_probabilities(logits, params)
    expected = reference_probabilities(logits, temperature, top_k, top_p, min_p)
    assert torch.equal(found > 0, expected > 0), "the same tokens are left"
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-5)
    assert found.sum() == pytest.approx(1)


def test_equal_logits_at_the_edge_of_top_k_all_stay():
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 0.0])
    found = token_probabilities(logits, SamplingParams(temperature=1.0, top_k=2))
    assert (found > 0).tolist() == [False, True, True, True, False]
    torch.testing.assert_close(found, reference_probabilities(logits, 1.0, 2, 1.0))


def test_top_p_keeps_the_smallest_set_that_reaches_it_and_at_least_one():
    logits = torch.tensor([0.5, 0.2, 0.2, 0.1]).log()
    for top_p, kept in ((0.001, 1), (0.45, 1), (0.55, 2), (0.75, 3), (0.95, 4)):
        found = token_probabilities(logits, SamplingParams(temperature=1.0, top_p=top_p))
        assert int((found > 0).sum()) == kept, top_p
        assert found.argmax() == 0


@pytest.mark.parametrize("temperature", [0.5, 1.0, 30.0])
@pytest.mark.parametrize("top_k", [0, 700])
def test_top_p_of_a_large_vocabulary(temperature, top_k):
    """Whether a few tokens reach top_p or all must be sorted."""
    (logits,) = make_logits(seed=3, vocabulary=5000)
    for top_p in (0.1, 0.9, 0.999):
        found = token_probabilities(
            logits, SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
        )
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
        SamplingParams(
            temperature=0.0, top_k=3, top_p=0.5, seed=seed, max_tokens=9, stop_token_ids=(1,)
        )
        for seed in range(3)
    ]
    assert sample_rows(logits, params, [0, 4, 8]) == logits.argmax(dim=-1).tolist()


def test_greedy_takes_the_lowest_id_of_equal_logits():
    assert sample_rows(torch.tensor([[0.0, 7.0, 7.0]]), [SamplingParams(temperature=0.0)], [0]) == [
        1
    ]


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
        found = sample_rows(
            logits[order], [params[row] for row in order], [indices[row] for row in order]
        )
        assert found == [together[row] for row in order]


def test_the_callers_logits_stay_as_they_were():
    logits = make_logits(3, seed=8)
    before = logits.clone()
    params = SamplingParams(
        temperature=0.8, top_k=4, top_p=0.5, max_tokens=9, min_tokens=5, stop_token_ids=(1, 2)
    )
    sample_rows(logits, [params] * 3, [0, 1, 6])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_stop_tokens_are_masked_below_min_tokens_only_and_only_in_their_row(temperature):
    logits = torch.zeros(3, VOCABULARY)
    logits[:, 4], logits[:, 9], logits[:, 20] = 90.0, 80.0, 70.0
    stopping = SamplingParams(
        temperature=temperature, max_tokens=9, min_tokens=3, stop_token_ids=(4, 9)
    )
    free = SamplingParams(temperature=temperature, max_tokens=9, min_tokens=3)
    assert sample_rows(logits, [stopping, free, stopping], [2, 2, 3]) == [20, 4, 4]
    assert sample_rows(logits, [stopping] * 3, [0, 1, 2]) == [20, 20, 20]


def test_masked_stop_tokens_do_not_count_towards_top_k_and_top_p():
    logits = torch.tensor([[9.0, 8.0, 7.0, 6.9, -5.0]])
    params = SamplingParams(
        temperature=1.0, top_k=2, top_p=0.9, max_tokens=99, min_tokens=99, stop_token_ids=(0, 1)
    )
    drawn = {sample_rows(logits, [params], [index])[0] for index in range(60)}
    assert drawn == {2, 3}


IDS = st.integers(0, VOCABULARY - 1)
WORDS = st.lists(st.lists(IDS, min_size=1, max_size=3).map(tuple), max_size=4, unique=True).map(
    tuple
)
BIASES = st.dictionaries(IDS, st.floats(-100, 100, width=32), max_size=5)


def controlled(logits_V, params, output=(), prompt=()):
    return controlled_logits(logits_V, params, list(output), list(prompt))


@settings(max_examples=200)
@given(
    seed=st.integers(0, 1000),
    prompt=st.lists(IDS, min_size=1, max_size=12),
    output=st.lists(IDS, max_size=12),
    words=WORDS,
    biases=BIASES,
    repetition_penalty=st.one_of(st.just(1.0), st.floats(0.01, 10)),
)
def test_bad_words_biases_and_repetition_are_those_of_transformers(
    seed, prompt, output, words, biases, repetition_penalty
):
    """In vLLM's order. Its bad words look at the output only."""
    (logits,) = make_logits(seed=seed)
    # Words that the output is about to complete are rare among drawn ones.
    words += tuple(
        (*output[-n:], n) for n in (1, 2) if len(output) >= n and (*output[-n:], n) not in words
    )
    params = SamplingParams(
        bad_words=words,
        logit_bias=tuple(sorted(biases.items())),
        repetition_penalty=repetition_penalty,
    )
    expected = logits[None]
    if words:
        expected = NoBadWordsLogitsProcessor([list(word) for word in words])(
            torch.tensor([output]).long(), expected
        )
    if biases:
        expected = SequenceBiasLogitsProcessor([[[i], float(bias)] for i, bias in biases.items()])(
            None, expected
        )
    expected = RepetitionPenaltyLogitsProcessor(repetition_penalty)(
        torch.tensor([prompt + output]), expected
    )
    assert torch.equal(controlled(logits, params, output, sorted(set(prompt))), expected[0])


@given(
    output=st.lists(st.integers(0, 9), max_size=30),
    frequency=st.floats(-2, 2, width=32),
    presence=st.floats(-2, 2, width=32),
)
def test_presence_and_frequency_penalties_count_the_output_and_not_the_prompt(
    output, frequency, presence
):
    """OpenAI's formula, which vLLM follows.

    logit - count * frequency_penalty - (count > 0) * presence_penalty
    """
    (logits,) = make_logits(seed=2)
    params = SamplingParams(frequency_penalty=frequency, presence_penalty=presence)
    counts = torch.tensor([output.count(token_id) for token_id in range(VOCABULARY)])
    expected = logits - counts * frequency - (counts > 0) * presence
    torch.testing.assert_close(
        controlled(logits, params, output, prompt=range(20)), expected, atol=1e-5, rtol=0
    )


def test_controls_apply_in_vllms_order():
    """A bias is penalized with its logit; repetition multiplies before the others subtract."""
    logits = torch.tensor([1.0, -1.0, 2.0, 4.0])
    params = SamplingParams(
        logit_bias=((0, 3.0), (3, 5.0)), repetition_penalty=2.0, frequency_penalty=0.5,
        presence_penalty=0.25, bad_words=((3,),), max_tokens=9, min_tokens=5, stop_token_ids=(2,),
    )  # fmt: skip
    found = controlled(logits, params, output=(0, 0, 1), prompt=(0, 3))
    inf = float("inf")
    assert found.tolist() == [(1 + 3) / 2 - 2 * 0.5 - 0.25, -1 * 2 - 0.5 - 0.25, -inf, -inf]


@pytest.mark.parametrize("repetition_penalty", [5e-324, 1e-38, 1e-3, 1e3, 1.7e308])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_extreme_penalties_still_sample_a_token_that_is_allowed(repetition_penalty, temperature):
    logits = make_logits(1, seed=3)
    logits[0, 2] = 0
    params = SamplingParams(
        temperature=temperature, repetition_penalty=repetition_penalty, bad_words=((5,),),
        top_p=0.9, seed=4,
    )  # fmt: skip
    # Every positive logit becomes huge, or every seen one sinks.
    (token_id,) = sampler.sample_rows(logits, [params], [list(range(0, VOCABULARY, 2))], [[1, 3]])
    assert 0 <= token_id < VOCABULARY and token_id != 5
    if temperature:
        logits_V = controlled(logits[0], params, range(0, VOCABULARY, 2), [1, 3])
        assert not token_probabilities(logits_V, params).isnan().any()


def test_controls_change_their_own_row_only_and_not_the_callers_logits():
    logits = make_logits(3, seed=12)
    before = logits.clone()
    best = logits.argmax(dim=-1).tolist()
    greedy = SamplingParams(temperature=0.0)
    other = SamplingParams(
        temperature=0.0, bad_words=((best[1],),), logit_bias=((7, 100.0),), repetition_penalty=1.3
    )
    assert sampler.sample_rows(logits, [greedy, other, greedy], [[4]] * 3, [[5]] * 3) == [
        best[0],
        7,
        best[2],
    ]
    assert torch.equal(logits, before)


@pytest.mark.parametrize("num_top", [0, 1, 5, VOCABULARY + 1])
def test_logprobs_are_the_models_own(num_top):
    logits = make_logits(2, seed=13)
    for row, token_id, found in zip(
        logits, (17, 5), token_logprobs(logits, (17, 5), num_top), strict=True
    ):
        expected = row.double().softmax(dim=-1).log()
        assert found.logprob == pytest.approx(float(expected[token_id]), abs=1e-5)
        order = expected.argsort(descending=True).tolist()[:num_top]
        assert [token_id for token_id, _ in found.top] == order
        assert [logprob for _, logprob in found.top] == pytest.approx(
            expected[order].tolist(), abs=1e-5
        )


def test_uniform_is_a_function_of_seed_and_index_alone():
    assert uniform(3, 5) == uniform(3, 5)
    numbers = {uniform(seed, index) for seed in (0, 1, 2, 2**63 - 1) for index in range(500)}
    assert len(numbers) == 2000, "no two counters share a number"
    assert all(0 <= number < 1 for number in numbers)


def test_uniform_is_uniform_along_indices_and_along_seeds():
    for numbers in (
        [uniform(7, index) for index in range(4000)],
        [uniform(seed, 0) for seed in range(4000)],
    ):
        counts = torch.tensor(numbers).histc(20, 0, 1)
        chi_squared = float(((counts - 200) ** 2 / 200).sum())
        assert chi_squared < 45.3, "19 degrees of freedom: exceeded once in 1,500 draws"
        pairs = torch.corrcoef(torch.tensor([numbers[:-1], numbers[1:]]))
        assert abs(float(pairs[0, 1])) < 4 / math.sqrt(4000)


@pytest.mark.parametrize("draw", [inverse, gumbel_max])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (6, 1.0), (0, 0.8), (10, 0.7)])
def test_drawn_tokens_have_the_distribution(top_k, top_p, draw):
    (logits,) = make_logits(seed=9, vocabulary=12)
    params = SamplingParams(temperature=2.0, top_k=top_k, top_p=top_p, seed=1)
    probability = token_probabilities(logits, params)
    count = 3000
    drawn = sample_rows(logits.expand(count, -1), [params] * count, range(count), draw)
    frequency = torch.bincount(torch.tensor(drawn), minlength=12).double() / count
    assert (frequency[probability == 0] == 0).all(), "filtered tokens are never drawn"
    error = (frequency - probability) / (probability * (1 - probability) / count).sqrt().clamp_min(
        1e-9
    )
    assert error.abs().max() < 4, "standard deviations"


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**63 - 1), scale=st.floats(0.1, 2.0))
def test_gumbel_max_draws_the_same_from_distributions_that_are_alike(seed, scale):
    """At least (1 - tv) / (1 + tv) of the time, less four standard deviations."""
    one, other = make_logits(2, seed=seed % 1000, vocabulary=30).double()
    other = (one + scale * other).softmax(dim=0)
    one = one.softmax(dim=0)
    differ = float((one - other).abs().sum()) / 2
    count = 300
    share = (
        sum(gumbel_max(one, seed, i) == gumbel_max(other, seed, i) for i in range(count)) / count
    )
    least = (1 - differ) / (1 + differ)
    assert share >= least - 4 * math.sqrt(max(least * (1 - least), 0.01) / count)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("temperature", [1e-4, 0.003, 0.01])
def test_gumbel_max_near_temperature_0_takes_the_highest_logit(temperature):
    """Others have a probability near 0, whose clocks hardly tick."""
    logits = torch.tensor([0.0, -7.42, -7.44, -3.0])
    probability = token_probabilities(logits, SamplingParams(temperature=temperature))
    assert {gumbel_max(probability, 5, index) for index in range(50)} == {0}


def test_clocks_of_gumbel_max_know_the_token_and_nothing_of_the_others():
    (logits,) = make_logits(seed=3, vocabulary=40)
    whole = logits.double().softmax(dim=0)
    for index in range(50):
        drawn = gumbel_max(whole, 7, index)
        kept = whole.clone()
        kept[torch.arange(40) % 2 != drawn % 2] = 0
        assert gumbel_max(kept / kept.sum(), 7, index) == drawn
    assert len({gumbel_max(whole, 7, index) for index in range(50)}) > 3


def test_numbers_stay_what_they_are():
    """A resumed or re-bound request must draw on: the numbers are part of what a seed promises."""
    numbers = [uniform(0, 0), uniform(0, 1), uniform(1, 0)]
    assert numbers == [0.0564663990004608, 0.44008326622012284, 0.6487508310490744]
    flat = torch.full((1000,), 0.001, dtype=torch.float64)
    assert [gumbel_max(flat, seed, 5) for seed in range(4)] == [771, 763, 447, 709]


def sorted_nucleus(probability_V, top_p):
    """The slow reference: sort everything."""
    top, order = probability_V.sort(descending=True, stable=True)
    is_in_V = torch.zeros(len(probability_V), dtype=torch.bool)
    is_in_V[order[top.cumsum(dim=0) - top < top_p]] = True
    return is_in_V


@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("scale", [1e-6, 0.02, 1.0, 3.0, 40.0])
def test_the_nucleus_of_flat_and_of_peaked_logits_is_that_of_a_full_sort(scale, top_p):
    logits_V = torch.randn(5000, dtype=torch.float64, generator=torch.manual_seed(3)) * scale
    logits_V[::7] = float("-inf")
    probability_V = logits_V.softmax(dim=-1)
    expected = sorted_nucleus(probability_V, top_p)
    assert torch.equal(_is_in_flat_nucleus(probability_V, top_p), expected)
    assert torch.equal(_is_in_nucleus(probability_V, top_p), expected)


def test_of_equally_likely_tokens_the_nucleus_takes_the_lowest_ids():
    probability_V = torch.full((4096,), 1 / 4096, dtype=torch.float64)
    found = _is_in_flat_nucleus(probability_V, 0.5)
    assert found.nonzero().squeeze(1).tolist() == list(range(2048))
    probability_V = torch.tensor([0.125, 0.25, 0.125, 0.25, 0.25], dtype=torch.float64)
    assert _is_in_flat_nucleus(probability_V, 0.8).tolist() == [True, True, False, True, True]


def test_flat_logits_are_not_sorted_whole(monkeypatch):
    """A full sort of a large vocabulary takes longer than the rest of the sampler."""
    sizes = []
    sort = torch.Tensor.sort

    def counted(tensor, *args, **kwargs):
        sizes.append(len(tensor))
        return sort(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "sort", counted)
    logits = torch.randn(32_768, generator=torch.manual_seed(3))
    token_probabilities(logits, SamplingParams(temperature=1.0, top_p=0.9))
    assert sizes and max(sizes) < 1000
