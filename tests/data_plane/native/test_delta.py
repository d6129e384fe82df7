"""The compiled step of a linear attention layer against CarryPool.step, its slow reference."""

from typing import NamedTuple

import pytest
import torch

from data_plane.kv.carry_pool import CarryPool, CarryRows
from data_plane.model.config import ModelConfig
from data_plane.model.weights import load_weights
from data_plane.native.kernels import NativeKernels
from data_plane.step.cpu_kernels import TorchKernels
from harness.kernels.native_cases import FORMS, assert_agree, native

PRESETS = ("tiny-qwen3-next", "tiny-qwen3.5", "tiny-kimi-linear", "tiny-ling")
BEGINS = (0, 3, 1)
"""The step in which each row begins, at position 0."""
FRAMES = (2, 0, 1)
ENDS = 14
"""The step in which the second row stops."""
NUM_STEPS = 18
PAGE_BYTES = 1024


class Side(NamedTuple):
    """Kernels, with two linear attention layers for them and a pool of states."""

    kernels: object
    weights: list
    pool: CarryPool

    def step(self, layer, rows, x_BX):
        """Run one layer."""
        return self.kernels.linear_attention(self.pool, layer, rows, x_BX, self.weights[layer])

    def pages(self, frame):
        """Views of the bytes of a frame, page by page."""
        return [self.pool.page(frame, n) for n in range(self.pool.frame_bytes // PAGE_BYTES)]


def side_of(path, dtype, kernels, depth=1):
    model = ModelConfig.from_folder(path)
    weights = load_weights(path, model, dtype, range(0), packing=kernels)
    pool = CarryPool(model.delta, 2, len(FRAMES), dtype, PAGE_BYTES, depth)
    layers = [weights.layers[index].attention for index in model.linear_layers[:2]]
    return Side(kernels, layers, pool)


def rows_of(pool, step):
    """The rows of a step; rows that have not begun or that stopped have the scratch frame."""
    position = torch.tensor([max(step - begin, 0) for begin in BEGINS])
    live = torch.tensor([step >= BEGINS[0], BEGINS[1] <= step < ENDS, step >= BEGINS[2]])
    return CarryRows(torch.where(live, torch.tensor(FRAMES), pool.scratch), position, live)


def inputs(side, step, dtype):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(3, side.pool.config.hidden_size, generator=generator).to(dtype)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("preset", PRESETS)
@torch.inference_mode()
def test_steps(models, preset, form):
    """Rows begin and stop while others go on; each step is also the reference's on our states."""
    dtype, path = form[0], models(preset).path
    ours, theirs = side_of(path, dtype, native(form)), side_of(path, dtype, TorchKernels())
    for step in range(NUM_STEPS):
        rows = rows_of(ours.pool, step)
        for frame in FRAMES:
            for page, other in zip(ours.pages(frame), theirs.pages(frame), strict=True):
                other[:] = page
        for layer in range(2):
            x_BX = inputs(ours, step + 100 * layer, dtype)
            out_BHV = ours.step(layer, rows, x_BX)
            assert_agree(out_BHV, theirs.step(layer, rows, x_BX), dtype)
            assert not out_BHV[~rows.live_B].any()
            assert out_BHV[rows.live_B].any()
            mine, other = ours.pool.layers[layer], theirs.pool.layers[layer]
            assert_agree(mine.state[:3], other.state[:3], torch.float32)
            assert torch.equal(mine.folded[:3], other.folded[:3])


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("preset", ["tiny-qwen3-next", "tiny-kimi-linear"])
@torch.inference_mode()
def test_many_steps(models, preset, form):
    """Errors that a fold makes would add up."""
    dtype, path = form[0], models(preset).path
    ours, theirs = side_of(path, dtype, native(form)), side_of(path, dtype, TorchKernels())
    for step in range(60):
        x_BX = inputs(ours, step, dtype)
        found, expected = (side.step(0, rows_of(side.pool, step), x_BX) for side in (ours, theirs))
    assert_agree(found, expected, dtype)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("preset", ["tiny-qwen3-next", "tiny-kimi-linear"])
@torch.inference_mode()
def test_a_torn_step_runs_again_on_any_number_of_processors(models, preset, form):
    """A step that ended in the first layer or behind it leaves nothing twice."""
    dtype, path = form[0], models(preset).path
    native(form)
    smooth, torn = (side_of(path, dtype, NativeKernels(*form, count)) for count in (1, 2))
    for step in range(NUM_STEPS):
        x_BX, rows = inputs(smooth, step, dtype), rows_of(smooth.pool, step)
        for layer in range(step % 3):
            torn.step(layer, rows, x_BX)
        for layer in range(2):
            assert torch.equal(torn.step(layer, rows, x_BX), smooth.step(layer, rows, x_BX))
    for frame in FRAMES:
        pages = zip(torn.pages(frame), smooth.pages(frame), strict=True)
        assert all((page == other).all() for page, other in pages)


@torch.inference_mode()
def test_a_state_of_another_position_is_refused_and_not_changed(models):
    form = (torch.float32, "avx2")
    side = side_of(models("tiny-qwen3-next").path, torch.float32, native(form))
    x_BX = inputs(side, 0, torch.float32)

    def at(positions, live=(True, True, True)):
        rows = CarryRows(torch.tensor(FRAMES), torch.tensor(positions), torch.tensor(live))
        return side.step(0, rows, x_BX)

    for position in range(4):
        at([position] * 3)
    kept = [[page.copy() for page in side.pages(frame)] for frame in FRAMES]
    with pytest.raises(RuntimeError, match="a state has tokens after its row's position"):
        at([4, 2, 4])
    with pytest.raises(RuntimeError, match="a state lacks tokens before its row's position"):
        at([4, 4, 5])
    assert not at([4, 2, 5], live=[False] * 3).any()
    for frame, before in zip(FRAMES, kept, strict=True):
        pages = zip(side.pages(frame), before, strict=True)
        assert all((page == other).all() for page, other in pages)
    assert at([4] * 3).any()


@torch.inference_mode()
def test_another_depth_is_torchs(models):
    path, kernels = models("tiny-qwen3-next").path, native((torch.float32, "avx2"))
    ours, theirs = (side_of(path, torch.float32, kernels, depth=2) for _ in range(2))
    for step in range(8):
        x_BX, rows = inputs(ours, step, torch.float32), rows_of(ours.pool, step)
        expected = theirs.pool.step(0, rows, x_BX, theirs.weights[0])
        assert torch.equal(ours.step(0, rows, x_BX), expected)
