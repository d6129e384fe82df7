"""A step that is abandoned and run again leaves every state as if it had run once."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from data_plane.kv.carry_pool import CarryPool, CarryRows
from data_plane.model.config import ModelConfig
from data_plane.model.weights import load_weights

NUM_ROWS, NUM_TOKENS = 3, 40


@pytest.fixture(scope="module", params=["tiny-qwen3-next", "tiny-kimi-linear"])
def layers(request, models):
    """(config, weights) of the first two linear attention layers of a model."""
    path = models(request.param).path
    model = ModelConfig.from_folder(path)
    weights = load_weights(path, model, torch.float32, range(model.num_experts))
    return model.delta, [weights.layers[index].attention for index in model.linear_layers[:2]]


@pytest.fixture
def inputs(layers):
    draw = torch.Generator().manual_seed(1)
    return torch.randn(NUM_TOKENS, NUM_ROWS, layers[0].hidden_size, generator=draw)


PAGE_BYTES = 1000


def new_pool(layers, depth=1, num_frames=NUM_ROWS):
    return CarryPool(layers[0], 2, num_frames, torch.float32, PAGE_BYTES, depth)


def whole(pool, frame):
    """A copy of all bytes of a frame."""
    pages = [pool.page(frame, number) for number in range(pool.frame_bytes // PAGE_BYTES)]
    return np.concatenate(pages)


def rows_at(position, frames=(2, 0, 1), live=(True, True, True)):
    """The rows of a step; in every test row b is at this position + b."""
    positions = torch.tensor([position + row for row in range(NUM_ROWS)])
    return CarryRows(torch.tensor(frames), positions, torch.tensor(live))


@torch.inference_mode()
def run(pool, layers, inputs, tokens, num_layers=2, **rows):
    """Run steps of these tokens; returns the outputs of each, [layers, rows, H, V]."""
    return [
        torch.stack(
            [
                pool.step(layer, rows_at(token, **rows), inputs[token], layers[1][layer])
                for layer in range(num_layers)
            ]
        )
        for token in tokens
    ]


@torch.inference_mode()
def begun(layers, inputs, depth=1):
    """A pool whose row b has b tokens of a prompt: its first step is at position b."""
    pool = new_pool(layers, depth)
    for row, frame in enumerate((2, 0, 1)):
        for layer in range(2):
            if row:
                pool.extend(layer, frame, 0, inputs[:row, 0], layers[1][layer])
    return pool


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_steps_are_a_prompt_of_the_same_tokens(layers, inputs, depth):
    pool = begun(layers, inputs, depth)
    outputs = run(pool, layers, inputs, range(NUM_TOKENS))
    for row in range(NUM_ROWS):
        fresh = new_pool(layers)
        tokens = torch.cat((inputs[:row, 0], inputs[:, row]))
        with torch.inference_mode():
            for layer in range(2):
                expected = fresh.extend(layer, 0, 0, tokens, layers[1][layer])
                seen = torch.stack([step[layer, row] for step in outputs])
                torch.testing.assert_close(seen, expected[row:], atol=2e-5, rtol=1e-4)


def test_a_prompt_in_chunks_is_a_prompt_at_once(layers, inputs):
    at_once, parts = new_pool(layers), new_pool(layers)
    tokens = inputs[:, 0]
    with torch.inference_mode():
        expected = at_once.extend(0, 0, 0, tokens, layers[1][0])
        cuts = [0, 1, 3, 20, 22, NUM_TOKENS]
        seen = [
            parts.extend(0, 0, begin, tokens[begin:end], layers[1][0])
            for begin, end in pairwise(cuts)
        ]
    torch.testing.assert_close(torch.cat(seen), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_torn_step_runs_again(layers, inputs, depth, num_layers):
    """num_layers: those that the abandoned step has run, of two."""
    smooth, torn = begun(layers, inputs, depth), begun(layers, inputs, depth)
    for token in range(NUM_TOKENS):
        (expected,) = run(smooth, layers, inputs, [token])
        if token % 3 == 0:
            run(torn, layers, inputs, [token], num_layers)
            # A row that goes on elsewhere must not go back before what some layer has folded.
            assert torn.num_folded(2) == max(token - depth + 1, 0)
        (seen,) = run(torn, layers, inputs, [token])
        assert torch.equal(seen, expected), token


@pytest.mark.parametrize(("depth", "back"), [(1, 0), (1, 1), (4, 1), (4, 4)])
def test_a_row_may_go_back_as_many_tokens_as_are_not_folded(layers, inputs, depth, back):
    pool = begun(layers, inputs, depth)
    outputs = run(pool, layers, inputs, range(20))
    again = run(pool, layers, inputs, range(20 - back, 20))
    for seen, expected in zip(again, outputs[20 - back :], strict=True):
        torch.testing.assert_close(seen, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("depth", "back"), [(1, 2), (4, 5)])
def test_a_state_that_is_ahead_is_refused(layers, inputs, depth, back):
    pool = begun(layers, inputs, depth)
    run(pool, layers, inputs, range(20))
    with pytest.raises(RuntimeError, match="tokens after its row's position"):
        run(pool, layers, inputs, [20 - back])


def test_bytes_of_a_frame_are_the_state(layers, inputs):
    pool, other = begun(layers, inputs), new_pool(layers, num_frames=7)
    run(pool, layers, inputs, range(20))
    for row, frame in enumerate((6, 3, 5)):
        for number in range(pool.frame_bytes // PAGE_BYTES):
            other.page(frame, number)[:] = pool.page((2, 0, 1)[row], number)
    expected = run(pool, layers, inputs, range(20, 25))
    seen = run(other, layers, inputs, range(20, 25), frames=(6, 3, 5))
    assert all(map(torch.equal, seen, expected))


def test_a_row_that_stopped_changes_no_state_and_says_nothing(layers, inputs):
    pool = begun(layers, inputs)
    run(pool, layers, inputs, range(10))
    kept = [whole(pool, frame) for frame in range(NUM_ROWS)]
    stopped = {"frames": (pool.scratch,) * 3, "live": (False,) * 3}
    for outputs in run(pool, layers, inputs, range(10, 20), **stopped):
        assert not outputs.any()
    for frame, before in enumerate(kept):
        assert (whole(pool, frame) == before).all()


def test_a_cleared_frame_is_that_of_no_token_or_of_tokens_without_content(layers, inputs):
    pool, outputs = new_pool(layers), []
    for _ in range(2):
        for row, frame in enumerate((2, 0, 1)):
            pool.clear(frame, row)
        outputs.append(run(pool, layers, inputs, range(9))[0])
    assert torch.equal(*outputs)


def test_a_state_that_lacks_tokens_is_refused(layers, inputs):
    with pytest.raises(RuntimeError, match="a state lacks tokens before its row's position"):
        run(new_pool(layers), layers, inputs, [0])
