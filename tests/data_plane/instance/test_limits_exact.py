"""Ling-3.0's limits of activations: what they are; test_matrix.py has the tokens of clusters.

The lists are those of vLLM 0.32.0, which clamps behind silu; `transformers` 5.24.0 ignores them.
"""

import json
import shutil

import pytest
import torch
import torch.nn.functional as F

from data_plane.model.config import ModelConfig
from data_plane.model.layers import gated
from data_plane.reference.oracle import Oracle
from harness.exact.exact_runs import assert_exact
from harness.exact.exact_stories import STORIES
from harness.exact.models import LIMITS

ROUTED, SHARED = LIMITS


@pytest.fixture(scope="module")
def limited(models):
    return models("tiny-ling, with limits")


def test_without_the_limits_the_judge_is_red(limited, tmp_path):
    free = shutil.copytree(limited.path, tmp_path / "free")
    fields = json.loads((free / "config.json").read_text())
    assert fields[ROUTED] == LIMITS[ROUTED]
    (free / "config.json").write_text(json.dumps(fields | dict.fromkeys(LIMITS)))
    prompts = STORIES["forced degree 2"](free)
    assert_exact(Oracle(free), prompts)
    with pytest.raises(AssertionError):
        assert_exact(limited.oracle, prompts)


def test_the_clamp_is_behind_silu():
    """vLLM 0.32.0: SwigluStepAndMul(limit=4.0).forward_native of these rows, [gate, up]."""
    rows = torch.tensor([[10.0, 10.0], [4.05, 1.0], [-10.0, 3.0], [2.0, -9.0]])
    silu = F.silu(torch.tensor([4.05, -10.0, 2.0]))
    right = [16.0, silu[0], 3 * silu[1], -4 * silu[2]]
    torch.testing.assert_close(gated(rows, 4.0).flatten(), torch.tensor(right))


def read(tmp_path, folder, **changes):
    fields = json.loads((folder / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return ModelConfig.from_folder(tmp_path)


def test_which_layers_have_which_limits(tmp_path, limited):
    none = float("inf")
    model = read(tmp_path, limited.path)
    found = [model.limits_of(index) for index in range(6)]
    assert found == [(none, none), (none, none), (4, none), (4, 5), (none, 5), (none, none)]
    assert read(tmp_path, limited.path, **{ROUTED: []}).limits_of(2) == (none, none)
    layers = [4.0] * 5 + [9.0]  # the last one is of an MTP layer
    model = read(tmp_path, limited.path, **{SHARED: layers, "num_nextn_predict_layers": 1})
    assert model.limits_of(5) == (none, 9)


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize(
    "value", [4.0, "4", [4.0] * 4, [4.0] * 7, [4.0] * 4 + [-1], [True] * 5, ["4"] * 5, {"0": 4.0}]
)
def test_lists_that_cannot_be_are_refused_by_name(tmp_path, limited, name, value):
    with pytest.raises(ValueError, match=f"{name} is .*; it must be null, or a list of 5 limits"):
        read(tmp_path, limited.path, **{name: value, "num_nextn_predict_layers": 0})


@pytest.mark.parametrize("name", [*LIMITS, "swiglu_limit"])
def test_families_without_limits_refuse_them_by_name(tmp_path, models, name):
    with pytest.raises(ValueError, match=f"{name} is .*; Qwen3Moe.* is supported with None only"):
        read(tmp_path, models("tiny-qwen3-moe").path, **{name: [4.0] * 3})
