"""Made checkpoints: a seed gives the same weights, other libraries read them, text round-trips."""

import json
from copy import deepcopy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from data_plane.model.config import ModelConfig
from data_plane.model.make_checkpoint import PRESETS, make_checkpoint
from nanocp.cli.main import app

LITTLE = {
    "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 32, "moe_intermediate_size": 16,
}  # fmt: skip


def weights(folder):
    return load_file(folder / "model.safetensors")


def test_the_same_seed_makes_the_same_weights(tmp_path):
    state = torch.random.get_rng_state()
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        make_checkpoint(tmp_path / name, "tiny", seed, overrides=LITTLE)
    assert torch.equal(torch.random.get_rng_state(), state), (
        "the caller's random numbers go on as before"
    )
    first, again, other = (weights(tmp_path / name) for name in "abc")
    assert first.keys() == again.keys() == other.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_weights_that_could_hide_a_mistake_are_not_trivial(tiny_checkpoint):
    tensors = weights(tiny_checkpoint)
    for name, tensor in tensors.items():
        assert tensor.std() > 0.01, f"{name} is constant: a model that leaves it out would pass"
    assert tensors["model.layers.1.mlp.gate.e_score_correction_bias"].abs().max() > 0.05
    assert "model.layers.1.mlp.experts.15.down_proj.weight" in tensors, (
        "one tensor an expert, as published"
    )


def test_greedy_tokens_vary(tiny_oracle):
    logits = tiny_oracle.logits(list(range(2, 66)), list(range(100, 164)))
    assert len(set(logits.argmax(dim=-1).tolist())) > 32
    top = logits.topk(2).values
    assert (top[:, 0] - top[:, 1]).median() > 0.1


def test_sizes_and_presets(tmp_path, tiny_checkpoint):
    assert 6e6 < sum(tensor.numel() for tensor in weights(tiny_checkpoint).values()) < 8e6
    small = AutoConfig.for_model(**PRESETS["small"])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small)
    assert 140e6 < sum(parameter.numel() for parameter in model.parameters()) < 170e6
    assert (small.kv_lora_rank, small.qk_rope_head_dim) == (512, 64), (
        "the widths that other engines' kernels take"
    )
    with pytest.raises(ValueError, match="preset is 'huge'; it must be tiny or small or tiny-v2"):
        make_checkpoint(tmp_path, "huge")
    with pytest.raises(ValueError, match="vocab_size is 257; it must be at least 258"):
        make_checkpoint(tmp_path, "tiny", overrides={"vocab_size": 257})
    assert not list(tmp_path.iterdir())


def test_fields_that_other_engines_read(tiny_checkpoint):
    config = json.loads((tiny_checkpoint / "config.json").read_text())
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    assert (config["topk_method"], config["scoring_func"], config["moe_layer_freq"]) == (
        "noaux_tc",
        "sigmoid",
        1,
    )
    assert json.loads((tiny_checkpoint / "generation_config.json").read_text())["eos_token_id"] == 1


def test_both_spellings_are_one_model(tmp_path):
    make_checkpoint(tmp_path / "new", "tiny", overrides=LITTLE)
    make_checkpoint(tmp_path / "published", "tiny", overrides=LITTLE, published_spelling=True)
    raw = json.loads((tmp_path / "published" / "config.json").read_text())
    assert (
        raw["rope_scaling"]["type"] == "yarn"
        and raw["rope_theta"] == 10_000
        and "rope_parameters" not in raw
    )
    assert ModelConfig.from_folder(tmp_path / "new") == ModelConfig.from_folder(
        tmp_path / "published"
    )
    ids = torch.arange(40)[None]
    logits = [
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)(ids).logits
        for name in ("new", "published")
    ]
    assert torch.equal(*logits)


def test_dtype_shards_and_tied_embeddings(tmp_path):
    overrides = LITTLE | {"tie_word_embeddings": True}
    make_checkpoint(
        tmp_path, "tiny", dtype=torch.bfloat16, overrides=overrides, max_shard_size="20KB"
    )
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 5 and "lm_head.weight" not in index
    tensors = {name: load_file(tmp_path / file)[name] for name, file in index.items()}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint):
    return AutoTokenizer.from_pretrained(tiny_checkpoint)


def test_the_tokenizer_fits_the_model(tokenizer, tiny_checkpoint):
    config = ModelConfig.from_folder(tiny_checkpoint)
    assert len(tokenizer) == config.vocab_size
    assert tokenizer.eos_token_id == config.eos_token_ids[0] == 1 and tokenizer.bos_token_id == 0
    assert all(
        isinstance(tokenizer.decode([token_id]), str) for token_id in range(config.vocab_size)
    )
    assert len(tokenizer("the instance waits for the request").input_ids) < 20, (
        "it learnt something"
    )


@settings(max_examples=100)
@given(st.text(max_size=60))
def test_any_text_round_trips(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert all(0 <= token_id < 512 for token_id in ids)
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_a_larger_vocabulary_is_filled(tmp_path):
    make_checkpoint(tmp_path, "tiny", overrides=LITTLE | {"vocab_size": 3000})
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 3000 and tokenizer.decode([2999])
    assert tokenizer.decode(tokenizer("zebra Ångström 你好").input_ids) == "zebra Ångström 你好"


def test_the_command(tmp_path):
    words = ["make-checkpoint", str(tmp_path / "made")]
    result = CliRunner().invoke(app, [*words, "--dtype", "bfloat16"])
    assert result.exit_code == 0 and "preset tiny, 7.0 million parameters" in result.stdout
    tensors = weights(tmp_path / "made")
    assert tensors["lm_head.weight"].dtype == torch.bfloat16
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert (
        result.stderr.startswith("nanocp make-checkpoint: ")
        and "already holds a checkpoint" in result.stderr
    )
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, ["make-checkpoint", str(tmp_path / "file" / "made")])
    assert result.exit_code == 2
    assert (
        result.stderr.startswith("nanocp make-checkpoint: ")
        and "cannot be a folder" in result.stderr
    )
    assert torch.equal(weights(tmp_path / "made")["lm_head.weight"], tensors["lm_head.weight"])


def test_one_model_changes_no_preset(tmp_path):
    """`transformers` writes defaults into the fields that it is given."""
    before = deepcopy(PRESETS)
    for preset in ("tiny-qwen3-next", "tiny-kimi-linear", "tiny-glm4-moe"):
        make_checkpoint(tmp_path / preset, preset)
    assert before == PRESETS
