"""config.json of the models with K/V heads: what is read, and what is refused by name."""

import json
from pathlib import Path

import pytest

from data_plane.model.config import ModelConfig
from data_plane.model.families import FAMILIES
from data_plane.model.presets import PRESETS
from data_plane.model.sizes import stored_shapes
from data_plane.model.weights import expert_range

SHAPES = Path(__file__).parent / "shapes"
"""Configurations in the shape of published models; the makers' own files have more fields."""
# (K/V heads, head width, rotated width), KV width; (dense layers, experts, experts a row).
EXPECTED = {
    "qwen3-235b-a22b": ((4, 128, 128), 1024, (0, 128, 8)),
    "qwen3-30b-a3b": ((4, 128, 128), 1024, (0, 128, 8)),
    "qwen3.5-397b": ((2, 256, 64), 1024, (0, 512, 10)),
    "glm-4.5": ((8, 128, 64), 2048, (3, 160, 8)),
    "mixtral-8x7b": ((8, 128, 128), 2048, (0, 8, 2)),
    "llama-3.1-8b": ((8, 128, 128), 2048, (32, 0, 0)),
    "qwen2.5-7b": ((4, 128, 128), 1024, (28, 0, 0)),
    "qwen3-8b": ((8, 128, 128), 2048, (36, 0, 0)),
}
# Billions of parameters, as the names of the models say, without an MTP layer.
PARAMETERS = {
    "qwen3-235b-a22b": 235, "qwen3-30b-a3b": 30.5, "qwen3.5-397b": 397, "glm-4.5": 352,
    "mixtral-8x7b": 46.7, "llama-3.1-8b": 8.03, "qwen2.5-7b": 7.6, "qwen3-8b": 8.2,
}  # fmt: skip


def published(tmp_path, name, **changes):
    """Read a published config.json with some fields changed."""
    fields = json.loads((SHAPES / f"{name}.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize("name", EXPECTED)
def test_published_configs(tmp_path, name):
    config = published(tmp_path, name)
    heads, kv_width, mixture = EXPECTED[name]
    kind = config.attention
    assert (kind.num_kv_heads, kind.head_dim, kind.rope_dim) == heads
    assert kind.kv_width == kv_width
    found = config.num_dense_layers, config.num_experts, config.num_experts_per_token
    assert found == mixture
    assert not config.rope.interleaved and kind.softmax_scale == kind.head_dim**-0.5
    shapes = stored_shapes(config, range(config.num_experts)).values()
    billions = sum(rows * (columns[0] if columns else 1) for rows, *columns in shapes) / 1e9
    assert billions == pytest.approx(PARAMETERS[name], rel=0.02)


def test_what_distinguishes_the_published_models(tmp_path):
    glm = published(tmp_path, "glm-4.5")
    assert glm.attention.has_bias and glm.attention.has_norms and not glm.softmax_gate
    assert (glm.routed_scale, glm.num_shared_experts) == (2.5, 1)
    qwen = published(tmp_path, "qwen3-235b-a22b")
    assert qwen.attention.has_norms and not qwen.attention.has_bias and qwen.weights_normalised
    assert published(tmp_path, "qwen2.5-7b").attention.has_bias
    llama = published(tmp_path, "llama-3.1-8b")
    assert llama.rope.llama3.factor == 8 and llama.eos_token_ids == (128001, 128008, 128009)
    assert published(tmp_path, "mixtral-8x7b").expert_size == 14336


def test_the_wire_never_carries_more_than_the_heads(tmp_path):
    """The hidden row is the smaller form in every published model, or as large."""
    for name in EXPECTED:
        kind = published(tmp_path, name).attention
        row, heads = (kind.wire_widths(form)[0] for form in ("latent", "absorbed"))
        assert row <= heads, name


@pytest.mark.parametrize(("name", "changes", "sentence"), [
    ("qwen3-30b-a3b", {"mlp_only_layers": [3]}, r"mlp_only_layers is \[3\]; Qwen3Moe.* only"),
    ("qwen3-30b-a3b", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2; .* with 1 only"),
    ("qwen3-30b-a3b", {"use_sliding_window": True}, "use_sliding_window is True; .* False"),
    ("qwen3-30b-a3b", {"attention_bias": True}, "attention_bias is True; .* with False only"),
    ("mixtral-8x7b", {"sliding_window": 4096}, "sliding_window is 4096; .* with None only"),
    ("llama-3.1-8b", {"mlp_bias": True}, "mlp_bias is True; .* with False only"),
    ("llama-3.1-8b", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; .* with 'silu' only"),
    ("llama-3.1-8b", {"num_key_value_heads": 5}, "num_attention_heads is 32; .* multiple of"),
    ("llama-3.1-8b", {"rope_scaling": {"rope_type": "linear", "factor": 2}},
     "the rope type is 'linear'; it must be default, yarn or llama3"),
    ("llama-3.1-8b",
     {"rope_scaling": {"rope_type": "llama3", "high_freq_factor": 1.0,
                       "original_max_position_embeddings": 8192}},
     "high_freq_factor is 1.0; it must be above low_freq_factor"),
    ("qwen2.5-7b", {"layer_types": ["full_attention", "sliding_attention"]},
     "layer_types has full_attention, sliding_attention; every layer must be full"),
    ("glm-4.5", {"partial_rotary_factor": 0.01}, "partial_rotary_factor is 0.01 of a head_dim"),
    ("glm-4.5", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; .* with 'sigmoid'"),
    ("glm-4.5", {"first_k_dense_replace": 92}, "so no layer has the experts"),
    ("llama-3.1-8b", {"architectures": ["GptOssForCausalLM"]},
     "the architecture is GptOssForCausalLM; it must be DeepseekV3ForCausalLM or"),
])  # fmt: skip
def test_what_cannot_run_is_refused_by_name(tmp_path, name, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        published(tmp_path, name, **changes)


def test_fp8_kv_is_for_latent_kv_only(tmp_path):
    with pytest.raises(ValueError, match="kv_dtype is fp8, but the model has K/V heads"):
        published(tmp_path, "qwen3-8b").attention.fp8_rank()


def test_a_dense_model_has_no_experts_on_any_number_of_instances(tmp_path):
    config = published(tmp_path, "llama-3.1-8b")
    assert all(not expert_range(config, instance, 5) for instance in range(5))


def test_every_family_has_a_preset():
    types = {
        fields["model_type"].removesuffix("_text").replace("_", "") for fields in PRESETS.values()
    }
    names = {name.removesuffix("ForCausalLM").replace("_", "").lower() for name in FAMILIES}
    assert types == names
