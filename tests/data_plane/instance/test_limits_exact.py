"""Ling-3.0's limits of activations: tokens of clusters are those of a reference that applies them.

The lists are those of vLLM 0.32.0, which clamps behind silu; `transformers` 5.24.0 ignores them.
"""

import json
import shutil

import pytest
import torch
import torch.nn.functional as F

from data_plane.model.config import ModelConfig
from data_plane.model.layers import gated
from data_plane.model.make_checkpoint import make_checkpoint
from data_plane.reference.oracle import Oracle
from harness.exact.exact_runs import assert_exact, judge
from harness.exact.exact_stories import STORIES, How

ROUTED, SHARED = "expert_swiglu_limit_list", "share_expert_swiglu_limit_list"
LIMITS = {ROUTED: [0, 0.0, 4.0, 4.0, None], SHARED: [0.0, None, 0, 5.0, 5.0]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A checkpoint with the limits, and the same without them."""
    limited, free = (tmp_path_factory.mktemp("ling") / name for name in ("limited", "free"))
    # Weights large enough that the limits are met.
    make_checkpoint(limited, "tiny-ling", overrides={**LIMITS, "initializer_range": 0.3})
    shutil.copytree(limited, free)
    fields = json.loads((free / "config.json").read_text())
    assert fields[ROUTED] == LIMITS[ROUTED]
    for name in LIMITS:
        fields[name] = None
    (free / "config.json").write_text(json.dumps(fields))
    return limited, free


@pytest.fixture(scope="module")
def oracles(folders):
    return tuple(map(Oracle, folders))


@pytest.mark.parametrize(
    ("degree", "how"),
    [(1, How(4, "native", 1)), (2, How(1, "torch", 1)), (4, How(1, "native", 4))],
    ids=["1 native", "2 torch", "4 native"],
)
def test_tokens_are_those_of_the_limits_at_every_degree(folders, oracles, degree, how):
    prompts = STORIES[f"forced degree {degree}"](folders[0], how)
    assert_exact(oracles[0], prompts)
    others = [judge(oracles[1], tuple(each.ids), tuple(each.output)) for each in prompts]
    assert not all(verdict.exact for verdict in others), "no limit was met"


def test_without_the_limits_the_judge_is_red(folders, oracles):
    prompts = STORIES["forced degree 2"](folders[1], How())
    assert_exact(oracles[1], prompts)
    with pytest.raises(AssertionError):
        assert_exact(oracles[0], prompts)


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


def test_which_layers_have_which_limits(tmp_path, folders):
    none = float("inf")
    model = read(tmp_path, folders[0])
    found = [model.limits_of(index) for index in range(6)]
    assert found == [(none, none), (none, none), (4, none), (4, 5), (none, 5), (none, none)]
    assert read(tmp_path, folders[0], **{ROUTED: []}).limits_of(2) == (none, none)
    layers = [4.0] * 5 + [9.0]  # the last one is of an MTP layer
    model = read(tmp_path, folders[0], **{SHARED: layers, "num_nextn_predict_layers": 1})
    assert model.limits_of(5) == (none, 9)


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize(
    "value", [4.0, "4", [4.0] * 4, [4.0] * 7, [4.0] * 4 + [-1], [True] * 5, ["4"] * 5, {"0": 4.0}]
)
def test_lists_that_cannot_be_are_refused_by_name(tmp_path, folders, name, value):
    with pytest.raises(ValueError, match=f"{name} is .*; it must be null, or a list of 5 limits"):
        read(tmp_path, folders[0], **{name: value, "num_nextn_predict_layers": 0})


@pytest.mark.parametrize("name", [*LIMITS, "swiglu_limit"])
def test_families_without_limits_refuse_them_by_name(tmp_path, name):
    make_checkpoint(tmp_path / "other", "tiny-qwen3-moe")
    with pytest.raises(ValueError, match=f"{name} is .*; Qwen3Moe.* is supported with None only"):
        read(tmp_path, tmp_path / "other", **{name: [4.0] * 3})
