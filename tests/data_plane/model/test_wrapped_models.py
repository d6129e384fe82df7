"""Qwen3.5 as it is published: a text model in one that sees, its experts in one tensor a layer."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

from data_plane.model.config import ModelConfig
from data_plane.model.linear import PlainPacking
from data_plane.model.weights import load_weights

TEXT = {
    "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "linear_num_key_heads": 1,
    "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 16, "num_experts": 4,
    "num_experts_per_tok": 2, "layer_types": ["linear_attention", "full_attention"],
    "eos_token_id": 3,
}  # fmt: skip
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """(folder of a model that sees, as `transformers` writes it; the model)."""
    path = tmp_path_factory.mktemp("seeing")
    torch.manual_seed(1)
    vision = {**VISION, "out_hidden_size": TEXT["hidden_size"]}
    model = Qwen3_5MoeForConditionalGeneration(
        Qwen3_5MoeConfig(text_config=TEXT, vision_config=vision)
    )
    model.save_pretrained(path)
    return path, model


@pytest.fixture
def published(seeing, tmp_path):
    """A folder of that model with a layer's experts in two tensors, as Qwen publishes bf16."""
    tensors = load_file(seeing[0] / "model.safetensors")
    for layer in range(2):
        prefix = f"model.language_model.layers.{layer}.mlp.experts."
        own = {
            name: torch.stack([tensors.pop(f"{prefix}{e}.{name}_proj.weight") for e in range(4)])
            for name in ("gate", "up", "down")
        }
        tensors[prefix + "gate_up_proj"] = torch.cat((own["gate"], own["up"]), dim=1)
        tensors[prefix + "down_proj"] = own["down"]
    assert not any(re.search(r"experts\.\d", name) for name in tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((seeing[0] / "config.json").read_text())
    return tmp_path


def load(path):
    config = ModelConfig.from_folder(path)
    packing = PlainPacking(keeps_fp8=False)
    return config, load_weights(path, config, torch.float32, range(1, 4), packing=packing)


@pytest.mark.parametrize("is_fused", [False, True])
def test_the_text_model_is_read_out_of_the_one_that_sees(seeing, published, is_fused):
    config, weights = load(published if is_fused else seeing[0])
    assert (config.num_experts, config.linear_layers, config.eos_token_ids) == (4, (0,), (3,))
    theirs = seeing[1].model.language_model
    assert torch.equal(weights.embedding, theirs.embed_tokens.weight)
    for layer, other in zip(weights.layers, theirs.layers, strict=True):
        for mlp, expert in zip(layer.moe.mlps, range(1, 4), strict=True):
            assert torch.equal(mlp.gate_up.weight, other.mlp.experts.gate_up_proj[expert])
            assert torch.equal(mlp.down.weight, other.mlp.experts.down_proj[expert])


def test_a_tensor_of_too_few_experts_is_named(published):
    tensors = load_file(published / "model.safetensors")
    name = "model.language_model.layers.1.mlp.experts.down_proj"
    tensors[name] = tensors[name][:3].clone()
    save_file(tensors, published / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{name} has shape \[3, 64, 24\].* have expert 3"):
        load(published)


def test_a_missing_tensor_of_experts_is_named(published):
    tensors = load_file(published / "model.safetensors")
    del tensors["model.language_model.layers.1.mlp.experts.down_proj"]
    save_file(tensors, published / "model.safetensors")
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.1\.down_proj\.weight"):
        load(published)


def test_another_model_that_sees_is_refused_by_name(published):
    path = published / "config.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {"architectures": ["OtherForConditionalGeneration"]}))
    with pytest.raises(ValueError, match="the architecture is OtherForConditionalGeneration"):
        load(published)
