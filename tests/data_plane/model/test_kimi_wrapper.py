"""Kimi-K2.5's folder: DeepSeek-V3's text model with its fields and weights inside one that sees."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from data_plane.model.config import ModelConfig
from data_plane.prefill.connector.fingerprint import fingerprint
from harness.exact.exact_stories import STORIES
from harness.programs.command_line import nanocp

WRAPPER = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25"}
INT4 = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


@pytest.fixture(scope="module")
def plain(models):
    return models("tiny").path


@pytest.fixture
def wrapped(plain, tmp_path):
    """A folder of that model as Kimi-K2.5 is published: its tensors beside those that see."""
    folder = shutil.copytree(plain, tmp_path / "wrapped")
    tensors = load_file(folder / "model.safetensors")
    tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    tensors["vision_tower.encoder.blocks.0.wqkv.weight"] = torch.zeros(12, 4)
    tensors["mm_projector.proj.0.weight"] = torch.zeros(4, 4)
    save_file(tensors, folder / "model.safetensors")
    (folder / "generation_config.json").unlink(missing_ok=True)
    text = json.loads((folder / "config.json").read_text())
    write(folder, WRAPPER | {"text_config": text, "vision_config": {"vt_hidden_size": 4}})
    return folder


def write(folder, fields):
    (folder / "config.json").write_text(json.dumps(fields))


def changed(folder, **text):
    fields = json.loads((folder / "config.json").read_text())
    write(folder, fields | {"text_config": fields["text_config"] | text})
    return folder


def test_it_gives_the_tokens_of_the_plain_folder(plain, wrapped):
    outputs = [
        [prompt.output for prompt in STORIES["forced degree 2"](folder)]
        for folder in (plain, wrapped)
    ]
    assert outputs[0] == outputs[1] and len({*map(tuple, outputs[0])}) > 1


def test_its_fields_are_the_text_models(plain, wrapped):
    config = ModelConfig.from_folder(wrapped)
    assert config == ModelConfig.from_folder(plain)
    assert ModelConfig.from_folder(changed(wrapped, eos_token_id=7)).eos_token_ids == (7,)
    (wrapped / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert ModelConfig.from_folder(wrapped).eos_token_ids == (5, 6)


def test_its_fingerprint_is_of_the_text_model(plain, wrapped):
    ours, theirs = fingerprint(plain, "float32"), fingerprint(wrapped, "float32")
    assert ours.pop("checkpoint") != theirs.pop("checkpoint")
    assert ours == theirs
    other = fingerprint(changed(wrapped, rope_theta=7.0), "float32")
    assert other["rope_theta"] == "7.0" and other["layout"] == "pairs-1"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "text_config: the architecture is LlamaForCausa"),
        ({"quantization_config": INT4}, r"quantized \(compressed-tensors, pack-quantized\)"),
        ({"kv_lora_rank": None}, "kv_lora_rank is missing"),
    ],
)
def test_another_text_model_is_refused_by_name(wrapped, text, sentence):
    with pytest.raises(ValueError, match=sentence):
        ModelConfig.from_folder(changed(wrapped, **text))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"text_config": None}, "text_config is missing; KimiK25ForConditionalGeneration is read"),
        ({"text_config": [1]}, r"text_config is \[1\]; it must be an object"),
        ({"architectures": ["KimiVLForConditionalGeneration"]}, "is KimiVLForConditionalGenerat"),
    ],
)
def test_another_wrapper_is_refused_by_name(wrapped, fields, sentence):
    write(wrapped, json.loads((wrapped / "config.json").read_text()) | fields)
    with pytest.raises(ValueError, match=sentence):
        ModelConfig.from_folder(wrapped)


def test_a_missing_tensor_is_named(wrapped):
    tensors = load_file(wrapped / "model.safetensors")
    del tensors["language_model.lm_head.weight"]
    save_file(tensors, wrapped / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing from the checkpoint: lm_head\.weight"):
        STORIES["forced degree 1"](wrapped)


def test_plan_takes_the_folder_and_refuses_int4(wrapped):
    result = nanocp("plan", wrapped, "--instances", 2)
    assert result.exit_code == 0 and "The folder has all" in result.output, result.output
    result = nanocp("plan", changed(wrapped, quantization_config=INT4), "--instances", 2)
    assert result.exit_code == 2 and "compressed-tensors" in result.output, result.output
