"""The experts of one instance: fast equals slow, and the instances' sums add up to the whole."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_plane.model.linear import Linear
from data_plane.model.weights import MlpWeights, MoeWeights, slots_of
from data_plane.moe.experts import experts_forward
from harness.kernels.slow_references import reference_experts_forward

NUM_EXPERTS, HIDDEN, SIZE, PER_TOKEN = 8, 32, 48, 3


def make_moe(experts=range(NUM_EXPERTS), dtype=torch.float32, limit=math.inf):
    mlps = []
    for expert in experts:
        generator = torch.Generator().manual_seed(expert)
        gate_up = torch.randn(2 * SIZE, HIDDEN, generator=generator) / HIDDEN**0.5
        down = torch.randn(HIDDEN, SIZE, generator=generator) / SIZE**0.5
        mlps.append(MlpWeights(Linear(gate_up.to(dtype)), Linear(down.to(dtype))))
    return MoeWeights(
        torch.zeros(0), torch.zeros(0), slots_of(experts, NUM_EXPERTS), mlps, None, limit=limit
    )


def make_rows(num_rows, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    x_TX = torch.randn(num_rows, HIDDEN, generator=generator).to(dtype)
    expert_TK = torch.rand(num_rows, NUM_EXPERTS, generator=generator).argsort(dim=1)[:, :PER_TOKEN]
    return x_TX, expert_TK, torch.rand(num_rows, PER_TOKEN, generator=generator)


@settings(max_examples=40)
@given(
    st.integers(0, 40),
    st.integers(0, 1000),
    st.permutations(range(NUM_EXPERTS)),
    st.integers(0, NUM_EXPERTS),
    st.sampled_from((math.inf, 4.0, 0.25)),
)
def test_fast_and_slow_agree(num_rows, seed, order, num_here, limit):
    """Any experts in any slots, none too, with a limit and without."""
    moe = make_moe(order[:num_here], limit=limit)
    rows = make_rows(num_rows, seed)
    y_TX = experts_forward(*rows, moe)
    assert y_TX.shape == rows[0].shape
    torch.testing.assert_close(y_TX, reference_experts_forward(*rows, moe), atol=1e-5, rtol=1e-5)


def test_bf16_is_within_its_eight_bits_of_the_slow_reference():
    rows = make_rows(30, seed=1, dtype=torch.bfloat16)
    moe = make_moe(dtype=torch.bfloat16)
    assert experts_forward(*rows, moe).dtype == torch.bfloat16
    torch.testing.assert_close(
        experts_forward(*rows, moe), reference_experts_forward(*rows, moe), atol=3e-2, rtol=3e-2
    )


@pytest.mark.parametrize("num_instances", [2, 4, 8])
def test_the_sums_of_all_instances_are_the_whole(num_instances):
    rows = make_rows(20, seed=2)
    share = NUM_EXPERTS // num_instances
    parts = [
        experts_forward(*rows, make_moe(range(i * share, (i + 1) * share)))
        for i in range(num_instances)
    ]
    torch.testing.assert_close(sum(parts), experts_forward(*rows, make_moe()), atol=1e-5, rtol=1e-5)


def test_rows_without_an_expert_here_are_zero():
    x_TX, expert_TK, weight_TK = make_rows(10, seed=3)
    expert_TK[4] = torch.tensor([5, 6, 7])
    y_TX = experts_forward(x_TX, expert_TK, weight_TK, make_moe(range(5)))
    assert (y_TX[4] == 0).all() and (y_TX.abs().sum(dim=1) > 0).sum() >= 8


def test_the_rows_given_are_left_alone():
    x_TX, expert_TK, weight_TK = make_rows(10, seed=4)
    kept = x_TX.clone()
    experts_forward(x_TX, expert_TK, weight_TK, make_moe())
    assert torch.equal(x_TX, kept)
