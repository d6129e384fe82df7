"""Many tokens at once are the tokens one by one, whatever the decays."""

import pytest
import torch

from data_plane.attention.delta_rule import (
    add_token,
    correction,
    many_tokens,
    of_heads,
    token_output,
)

HEADS, KEYS, VALUES = 3, 8, 5


def drawn(num_tokens, decay_width, rate, seed=0):
    """Queries, keys, values, decays, betas of a sequence. rate: how fast its state decays."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(num_tokens, *shape, generator=draw, dtype=torch.float64)

    key = torch.nn.functional.normalize(normal(HEADS, KEYS), dim=-1)
    decay = -rate * normal(HEADS, decay_width).abs()
    return normal(HEADS, KEYS), key, normal(HEADS, VALUES), decay, normal(HEADS).sigmoid()


def one_by_one(state, q, key, value, decay, beta):
    outputs = []
    for token in zip(q, key, value, decay, beta, strict=True):
        q_1, key_1, value_1, decay_1, beta_1 = (each[None] for each in token)
        u = correction(state, decay_1, key_1, value_1, beta_1)
        outputs.append(token_output(state, decay_1, q_1, key_1, u))
        state = add_token(state, decay_1, key_1, u)
    return torch.cat(outputs), state


@pytest.mark.parametrize("decay_width", [1, KEYS])
@pytest.mark.parametrize("rate", [0.0, 0.01, 3.0, 40.0])
@pytest.mark.parametrize("num_tokens", [1, 16, 17, 130])
def test_many_tokens_are_tokens_one_by_one(num_tokens, rate, decay_width):
    tokens = drawn(num_tokens, decay_width, rate)
    state = torch.randn(1, HEADS, KEYS, VALUES, dtype=torch.float64)
    expected, expected_state = one_by_one(state, *tokens)
    outputs, after = many_tokens(state[0], *tokens)
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(after, expected_state[0])


def test_an_output_is_what_the_state_after_the_token_says():
    q, key, value, decay, beta = drawn(1, 1, 0.1)
    state = torch.randn(1, HEADS, KEYS, VALUES, dtype=torch.float64)
    u = correction(state, decay, key, value, beta)
    after = add_token(state, decay, key, u)
    said = (after * q[..., None]).sum(dim=-2)
    torch.testing.assert_close(token_output(state, decay, q, key, u), said)


def test_heads_of_a_key_head_are_neighbours():
    keys = torch.tensor([[1.0], [2.0]])
    assert of_heads(keys, 6).flatten().tolist() == [1, 1, 1, 2, 2, 2]
