"""Every family in a real cluster: each token is the reference model's.

`make test` runs each family once, in the stories that disturb it most. The whole matrix of families
and stories takes several minutes: `make test-system`. That of models with states, which has depths
and kernels too, takes 40: `python -m harness.exact.states_matrix`.
"""

from functools import cache
from itertools import combinations, product

import pytest
import torch

from data_plane.model.attention_kinds.gqa import GqaConfig
from data_plane.model.config import ModelConfig
from data_plane.model.make_checkpoint import make_checkpoint
from data_plane.reference.oracle import Oracle
from harness.exact.exact_runs import assert_exact
from harness.exact.exact_stories import STORIES, How
from harness.exact.states_matrix import FAMILIES as WITH_STATES

FAMILIES = (
    "tiny-qwen3-moe", "tiny-llama", "tiny-qwen2", "tiny-qwen3", "tiny-glm4-moe", "tiny-mixtral",
    *WITH_STATES, "tiny-qwen3-moe in bfloat16",
)  # fmt: skip
"""Presets; one is stored in bf16, which the kernels keep, and computed in fp32 like the others."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Make each family's checkpoint and oracle once."""

    @cache
    def of(preset):
        path = tmp_path_factory.mktemp("family") / preset
        name, _, stored = preset.partition(" in ")
        dtype = getattr(torch, stored or "float32")
        make_checkpoint(path, name, dtype=dtype, published_spelling=True)
        return path, Oracle(path)

    return of


IN_TORCH = How(4, "torch")
SAMPLE = (
    ("tiny-qwen3-moe", "chaos", IN_TORCH),
    ("tiny-llama", "chaos", IN_TORCH),
    ("tiny-qwen2", "shared pages, chaos", How()),
    ("tiny-qwen3", "mixed degrees, absorbed", How()),
    ("tiny-glm4-moe", "chaos, absorbed", How()),
    ("tiny-mixtral", "preempted", How(4)),
    ("tiny-qwen3-moe in bfloat16", "chaos", How()),
    ("tiny-qwen3-next", "forced degree 4", How(1, "torch", 1)),
    ("tiny-qwen3-next", "chaos", How(4, "native", 4)),
    ("tiny-qwen3.5", "shared pages, chaos", How(1, "native", 1)),
    ("tiny-qwen3.5", "forced degree 2", How(4, "torch", 4)),
    ("tiny-kimi-linear", "forced degree 4", How(4, "torch", 1)),
    ("tiny-kimi-linear", "chaos, absorbed", How(1, "native", 4)),
    ("tiny-ling", "chaos", How(4, "native", 1)),
    ("tiny-ling", "forced degree 4", How(1, "torch", 4)),
)
"""Models with states have each pair of family, window, kernels and depth."""


@pytest.mark.parametrize(("preset", "story", "how"), SAMPLE, ids=[
    " ".join(map(str, (preset, story, *how[:3]))) for preset, story, how in SAMPLE
])  # fmt: skip
def test_a_story_of_each_family(checkpoints, preset, story, how):
    checkpoint, oracle = checkpoints(preset)
    assert_exact(oracle, STORIES[story](checkpoint, how))


@pytest.mark.system
@pytest.mark.parametrize(
    ("story", "how"),
    [*((story, How()) for story in STORIES), ("chaos", IN_TORCH), ("preempted", IN_TORCH)],
    ids=[*STORIES, "chaos, windows of four steps", "preempted, windows of four steps"],
)
@pytest.mark.parametrize("preset", FAMILIES)
def test_every_story_of_each_family(checkpoints, preset, story, how):
    checkpoint, oracle = checkpoints(preset)
    assert_exact(oracle, STORIES[story](checkpoint, how))


def test_the_sample_has_every_family():
    assert {preset for preset, _, _ in SAMPLE} == set(FAMILIES)
    for first, second in combinations(range(4), 2):
        cells = [(preset, *how[:3]) for preset, _, how in SAMPLE if preset in WITH_STATES]
        pairs = {(cell[first], cell[second]) for cell in cells}
        values = [{cell[which] for cell in cells} for which in (first, second)]
        assert pairs == set(product(*values))


def test_the_numbers_are_unusual(checkpoints):
    """Numbers that fit together by accident would hide a width that stands in for another."""
    models = [ModelConfig.from_folder(checkpoints(preset)[0]) for preset in FAMILIES]
    kinds = [model.attention for model in models if isinstance(model.attention, GqaConfig)]
    assert {kind.num_kv_heads for kind in kinds} >= {1, 2, 4}
    assert any(kind.num_kv_heads == kind.num_heads for kind in kinds)
    assert any(kind.num_heads // kind.num_kv_heads % 2 and kind.num_kv_heads > 1 for kind in kinds)
    assert any(kind.head_dim * kind.num_heads != kind.hidden_size for kind in kinds)
    assert any(kind.has_bias for kind in kinds) and any(kind.has_norms for kind in kinds)
    assert any(kind.rope_dim < kind.head_dim for kind in kinds)
    deltas = [model.delta for model in models if model.delta is not None]
    assert any(delta.num_key_heads < delta.num_heads for delta in deltas)
    assert any(delta.key_dim != delta.value_dim for delta in deltas)
    last = [model.num_layers - 1 in model.linear_layers for model in models if model.delta]
    assert any(last) and not all(last)
