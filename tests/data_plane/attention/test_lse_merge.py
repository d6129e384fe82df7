"""LSE merge: exact for any number of partials, empty ones included, in any order."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_plane.attention.lse_merge import lse_merge
from harness.kernels.slow_references import reference_lse_merge


def make_partials(num_partials, seed, spread=5.0, empty=()):
    generator = torch.Generator().manual_seed(seed)
    partial = torch.randn(num_partials, 4, 3, 6, generator=generator)
    lse = spread * torch.randn(num_partials, 4, 3, generator=generator)
    for index in empty:
        partial[index], lse[index] = 0, float("-inf")
    return partial, lse


def test_partials_of_a_split_softmax_merge_to_the_whole():
    generator = torch.Generator().manual_seed(0)
    score_T, value_TV = (
        10 * torch.randn(100, generator=generator),
        torch.randn(100, 6, generator=generator),
    )
    pieces = [slice(0, 1), slice(1, 40), slice(40, 40), slice(40, 100)]
    partial = torch.stack([score_T[piece].softmax(0) @ value_TV[piece] for piece in pieces])
    lse = torch.stack([score_T[piece].logsumexp(0) for piece in pieces])
    merged, merged_lse = lse_merge(partial[:, None, None], lse[:, None, None])
    torch.testing.assert_close(merged[0, 0], score_T.softmax(0) @ value_TV)
    torch.testing.assert_close(merged_lse[0, 0], score_T.logsumexp(0))


@settings(max_examples=50)
@given(st.integers(1, 9), st.integers(0, 1000), st.sampled_from([0.1, 5.0, 200.0]), st.sets(
    st.integers(0, 8), max_size=9
))  # fmt: skip
def test_fast_and_slow_agree(num_partials, seed, spread, empty):
    partial, lse = make_partials(
        num_partials, seed, spread, {index for index in empty if index < num_partials}
    )
    merged, merged_lse = lse_merge(partial, lse)
    expected, expected_lse = reference_lse_merge(partial, lse)
    # An lse of hundreds has its last bit at 6e-5, which is what a weight may be off by.
    torch.testing.assert_close(merged, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(merged_lse, expected_lse, atol=1e-4, rtol=1e-6)


def test_merging_does_not_depend_on_the_order():
    partial, lse = make_partials(4, seed=1)
    expected, _ = lse_merge(partial, lse)
    for order in itertools.permutations(range(4)):
        merged, _ = lse_merge(partial[list(order)], lse[list(order)])
        torch.testing.assert_close(merged, expected, atol=1e-6, rtol=1e-6)


def test_merging_merged_partials_is_merging_them_all():
    partial, lse = make_partials(5, seed=2, empty=(1,))
    expected, expected_lse = lse_merge(partial, lse)
    first, first_lse = lse_merge(partial[:2], lse[:2])
    rest, rest_lse = lse_merge(partial[2:], lse[2:])
    merged, merged_lse = lse_merge(torch.stack((first, rest)), torch.stack((first_lse, rest_lse)))
    torch.testing.assert_close(merged, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(merged_lse, expected_lse)


@pytest.mark.parametrize("num_partials", [1, 3])
def test_only_empty_partials_merge_to_an_empty_one(num_partials):
    merged, lse = lse_merge(*make_partials(num_partials, seed=3, empty=range(num_partials)))
    assert (merged == 0).all() and (lse == float("-inf")).all()


def test_an_empty_partial_changes_nothing():
    partial, lse = make_partials(2, seed=4)
    with_empty = make_partials(3, seed=4, empty=(2,))
    with_empty[0][:2], with_empty[1][:2] = partial, lse
    for merged, expected in zip(lse_merge(*with_empty), lse_merge(partial, lse), strict=True):
        assert torch.equal(merged, expected)


def test_bf16_partials_are_merged_in_fp32():
    partial, lse = make_partials(3, seed=5)
    merged, merged_lse = lse_merge(partial.bfloat16(), lse)
    assert merged.dtype == merged_lse.dtype == torch.float32
    torch.testing.assert_close(merged, lse_merge(partial.bfloat16().float(), lse)[0])
