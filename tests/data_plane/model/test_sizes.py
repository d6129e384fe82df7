"""What a folder says and holds is compared before anything is allocated, and damage is named."""

import json
import math
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from data_plane.model.config import ModelConfig
from data_plane.model.sizes import stays_fp8, stored_shapes
from data_plane.model.weights import load_weights, stores_bf16
from data_plane.startup import memory_need
from data_plane.startup.memory_need import check_memory
from nanocp.config.cluster import ClusterConfig
from nanocp.config.data_plane import DataPlaneConfig


@pytest.fixture
def folder(tiny_checkpoint, tmp_path):
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "damaged"))


def load(folder):
    model = ModelConfig.from_folder(folder)
    return load_weights(folder, model, torch.float32, range(model.num_experts)[:4])


def say(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(("fields", "sentence"), [
    ({"vocab_size": 10**9},
     r"embed_tokens.weight has shape \[\d+, 256\]; .* \(vocab_size is 1000000000\)"),
    ({"hidden_size": 10**9}, r"has shape .*; by config.json .* \(hidden_size is 1000000000\)"),
    ({"intermediate_size": 10**9}, r"by config.json it must have \[1000000000, 256\]"),
    ({"num_hidden_layers": 10**4}, r"there are 10000 layers, and the folder has \d+ tens"),
    ({"n_routed_experts": 10**4}, r"there are 10000 experts, and the folder has \d+ tens"),
])  # fmt: skip
def test_a_size_that_the_folder_has_not_is_named_at_once(folder, fields, sentence, monkeypatch):
    say(folder, **fields)
    model = ModelConfig.from_folder(folder)
    monkeypatch.setattr(torch, "empty", None)
    began_s = time.process_time()
    for open_folder in (
        lambda: load_weights(folder, model, torch.float32, range(0)),
        lambda: stores_bf16(folder, model),
    ):
        with pytest.raises(ValueError, match=sentence):
            open_folder()
    assert time.process_time() - began_s < 5


@pytest.mark.parametrize("field", ["num_hidden_layers", "n_routed_experts"])
def test_no_list_is_made_of_layers_and_experts_that_nobody_has(folder, field):
    say(folder, **{field: 10**9})
    sentence = r"config.json: \d+ layers \(num_hidden_layers\) with \d+ experts each have [\d,]+"
    with pytest.raises(ValueError, match=sentence):
        ModelConfig.from_folder(folder)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [
    "model.embed_tokens.weight", "model.layers.1.mlp.experts.2.down_proj.weight",
    "model.norm.weight",
])  # fmt: skip
def test_weights_that_are_no_numbers_are_refused_by_name(folder, name, value):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors[name].view(-1)[-1] = value
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"tensor {name} has values that are no finite numbers"):
        load(folder)


def test_an_instance_that_needs_more_than_the_machine_has_says_what_for(
    tiny_checkpoint, monkeypatch
):
    model = ModelConfig.from_folder(tiny_checkpoint)
    memory = SimpleNamespace(total=10 * 10**9)
    monkeypatch.setattr(memory_need.psutil, "virtual_memory", lambda: memory)
    cluster = ClusterConfig(num_instances=8, instances_per_node=2)
    need = memory_need.memory_need(model, cluster, DataPlaneConfig(), False, False)
    check_memory(cluster, need)
    num_frames = 6 * 10**9 // need.page
    sentence = (
        rf"each of 2 instances needs 0\.\d GB for weights and exchange, and 6\.0 GB for frames "
        rf"\(cluster.num_frames is {num_frames}, of .* MB\); the machine has 10\.0 GB"
    )
    with pytest.raises(ValueError, match=sentence):
        check_memory(replace(cluster, num_frames=num_frames), need)


def test_matrices_that_stay_in_fp8_in_the_published_checkpoint_are_known_by_name(tmp_path):
    """Experts are counted apart; the rest is bf16 in the folder, or absorbed into queries."""
    published = Path(__file__).parent / "published/deepseek-v3.json"
    shutil.copy(published, tmp_path / "config.json")
    model = ModelConfig.from_folder(tmp_path, has_mtp=True)
    shapes = stored_shapes(model, range(0))
    kept = {name for name, shape in shapes.items() if stays_fp8(model, name, shape)}
    assert {re.sub(r"model.layers.\d+.|_proj.*|shared_experts.", "", name) for name in kept} == {
        *(f"self_attn.{name}" for name in ("q_a", "q_b", "kv_a", "o")),
        *(f"mlp.{name}" for name in ("gate", "up", "down")),
    }
    assert len(kept) == 62 * 7
    in_halves = replace(model, fp8_block=(64, 128))
    assert not any(stays_fp8(in_halves, *item) for item in shapes.items())
