"""The step of a linear attention layer as one kernel, interpreted, against the torch reference."""

from functools import cache

import pytest
import torch

from data_plane.kv.carry_pool import CarryPool, CarryRows
from data_plane.kv.triton_carry import step_states
from data_plane.model.config import ModelConfig
from data_plane.model.make_checkpoint import make_checkpoint
from data_plane.model.weights import load_weights
from harness.kernels.kernel_cases import poisoned

NUM_ROWS, NUM_FRAMES = 3, 5
FRAMES = (4, 0, 2)
PAGE_BYTES = 1024
TOLERANCE = {torch.float32: (2e-5, 1e-4), torch.bfloat16: (6e-2, 2e-2)}
"""dtype -> (absolute, relative): the kernel rounds convolved rows once, torch each product."""


class Layer:
    """A linear attention layer: the reference's pool of states and the kernel's."""

    def __init__(self, path, dtype, depth, num_tokens):
        model = ModelConfig.from_folder(path)
        layers = load_weights(path, model, dtype, range(model.num_experts)).layers
        self.config, self.weights = model.delta, layers[model.linear_layers[1]].attention
        self.dtype, draw = dtype, torch.Generator().manual_seed(1)
        shape = num_tokens, NUM_ROWS, self.config.hidden_size
        self.inputs = torch.randn(shape, generator=draw).to(dtype)
        self.pools = [
            CarryPool(self.config, 2, NUM_FRAMES, dtype, PAGE_BYTES, depth) for _ in range(2)
        ]
        self.error = torch.zeros(4, dtype=torch.int64)

    @torch.inference_mode()
    def begin(self, prompt_len):
        """Let the states have a prompt's tokens."""
        for pool in self.pools:
            for row, frame in enumerate(FRAMES):
                pool.extend(1, frame, 0, self.inputs[:prompt_len, row], self.weights)

    @torch.inference_mode()
    def reference(self, position, live=(True, True, True)):
        frames = torch.where(torch.tensor(live), torch.tensor(FRAMES), NUM_FRAMES)
        rows = CarryRows(frames, torch.full((3,), position), torch.tensor(live))
        return self.pools[0].step(1, rows, self.inputs[position], self.weights)

    @torch.inference_mode()
    def kernel(self, position, live=(True, True, True)):
        rows = CarryRows(
            torch.tensor(FRAMES, dtype=torch.int32), torch.full((3,), position), torch.tensor(live)
        )
        given = self.config, self.weights, self.pools[1].layers[1], rows, self.inputs[position]
        with poisoned():
            return step_states(*given, self.error)

    def assert_same(self, position, **rows):
        absolute, relative = TOLERANCE[self.dtype]
        seen, expected = self.kernel(position, **rows), self.reference(position, **rows)
        assert seen.dtype == expected.dtype
        torch.testing.assert_close(seen, expected, atol=absolute, rtol=relative)

    def assert_same_states(self):
        absolute, relative = TOLERANCE[self.dtype]
        for name, seen, expected in zip(
            self.pools[0].layers[1]._fields,
            self.pools[1].layers[1],
            self.pools[0].layers[1],
            strict=True,
        ):
            of_frames = seen[:NUM_FRAMES], expected[:NUM_FRAMES]  # nobody reads the scratch frame
            torch.testing.assert_close(*of_frames, atol=absolute, rtol=relative, msg=name)


SHAPES = {
    "tiny-qwen3-next": {"linear_num_key_heads": 1, "linear_num_value_heads": 2,
                        "linear_key_head_dim": 24, "linear_value_head_dim": 40},
    "tiny-kimi-linear": {"linear_num_heads": 2, "linear_head_dim": 40},
    "tiny-ling": {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 24},
}  # fmt: skip
"""Widths that are no power of two, and values of more columns than a program has at once."""


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Checkpoints with small states: a function of the preset's name."""

    @cache
    def made(preset):
        folder = tmp_path_factory.mktemp("delta")
        make_checkpoint(folder, preset, overrides=SHAPES[preset])
        return folder

    return made


@pytest.fixture
def path(paths):
    return paths("tiny-kimi-linear")


FORMS = [(torch.float32, 1), (torch.float32, 3), (torch.bfloat16, 1)]


@pytest.mark.parametrize(
    ("preset", "dtype", "depth"),
    [
        pytest.param(preset, *form, marks=[pytest.mark.system] * ((row - place) % 3 == 1))
        for row, preset in enumerate(SHAPES)
        for place, form in enumerate(FORMS)
    ],
)
def test_steps_are_those_of_the_reference(paths, preset, dtype, depth):
    """From the first token on, some steps twice as after an abandoned one."""
    layer = Layer(paths(preset), dtype, depth, 7)
    for position in range(7):
        for _ in range(1 + (position in (2, 5))):
            layer.assert_same(position)
    layer.assert_same_states()


def test_a_prompts_state_goes_on(path):
    layer = Layer(path, torch.float32, 1, 8)
    layer.begin(6)
    for position in (6, 7):
        layer.assert_same(position)
    layer.assert_same_states()


def test_a_dead_row_says_nothing_and_changes_no_state(path):
    layer = Layer(path, torch.float32, 1, 5)
    for position in range(4):
        layer.assert_same(position)
    before = [field[FRAMES[1]].clone() for field in layer.pools[1].layers[1]]
    layer.assert_same(4, live=(True, False, True))
    assert not layer.kernel(4, live=(True, False, True))[1].any()
    for then, now in zip(before, layer.pools[1].layers[1], strict=True):
        assert torch.equal(then, now[FRAMES[1]])
    layer.assert_same_states()


def test_behind_a_failed_wait_nothing_is_folded_or_recorded(path):
    """What a row has there is worthless, and so would be its record and its inputs."""
    layer = Layer(path, torch.float32, 1, 5)
    for position in range(4):
        layer.assert_same(position)
    before = [field.clone() for field in layer.pools[1].layers[1]]
    layer.error[0] = 1
    layer.kernel(4)
    assert all(map(torch.equal, before, layer.pools[1].layers[1]))
    layer.error[0] = 0
    layer.assert_same(4)


def test_a_state_of_another_position_sets_the_error_word(path):
    """It is ahead of its row, or lacks tokens; then it stays as it was."""
    layer = Layer(path, torch.float32, 1, 6)
    for token in range(4):
        layer.reference(token)
        layer.kernel(token)
    before = [field.clone() for field in layer.pools[1].layers[1]]
    for position, fault in ((1, "has"), (5, "lacks")):
        with pytest.raises(RuntimeError, match=f"a state {fault} tokens"):
            layer.reference(position)
        layer.error.zero_()
        layer.kernel(position)
        assert layer.error.tolist() == [32, 0, position, 3], "of the first row; no other runs then"
        assert all(map(torch.equal, before, layer.pools[1].layers[1]))


def test_each_head_counts_what_it_has_folded(path):
    """Programs of heads run in any order: one has folded, the others have not."""
    layer = Layer(path, torch.float32, 1, 5)
    for position in range(4):
        layer.assert_same(position)
    others = [field.clone() for field in layer.pools[1].layers[1]]
    layer.kernel(4)
    for name, then, now in zip(
        layer.pools[1].layers[1]._fields, others, layer.pools[1].layers[1], strict=True
    ):
        if name in ("state", "folded"):
            now[:, 1:] = then[:, 1:]
    layer.assert_same(4)
    layer.assert_same_states()
