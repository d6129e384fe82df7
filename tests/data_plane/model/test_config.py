"""config.json: both spellings mean the same; what this service cannot run is refused by name."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3RotaryEmbedding,
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_interleave,
    yarn_apply_mscale,
)

from data_plane.model.config import ModelConfig
from data_plane.model.make_checkpoint import PRESETS
from data_plane.model.rope import RopeTable
from harness.exact.rope_layout import side_by_side

FOLDER = Path(__file__).parent / "published"
PUBLISHED = json.loads((FOLDER / "deepseek-v3.json").read_text())
LITE = json.loads((FOLDER / "deepseek-v2-lite.json").read_text())
FP8 = PUBLISHED["quantization_config"]
MISSING = object()


def read_config(folder, changes=None, generation=None, base=PUBLISHED):
    """Read a published config with some fields changed (MISSING: left out)."""
    fields = {
        name: value for name, value in (base | (changes or {})).items() if value is not MISSING
    }
    (folder / "config.json").write_text(json.dumps(fields))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.from_folder(folder)


def test_the_published_config(tmp_path):
    config = read_config(tmp_path)
    assert (config.num_layers, config.num_dense_layers, config.num_experts,
            config.num_experts_per_token) == (61, 3, 256, 8)  # fmt: skip
    assert (config.attention.kv_width, config.attention.q_latent_dim) == (576, 1536)
    assert config.eos_token_ids == (1,)
    assert (
        config.rope.interleaved and config.rope.yarn is not None and config.rope.yarn.factor == 40
    )
    assert config.max_len == 163840
    assert config.fp8_block == (128, 128)
    # 192^-0.5 * (0.1 ln 40 + 1)^2, as DeepSeek's own inference code has it.
    assert config.attention.softmax_scale == pytest.approx(0.1352337788608801)


@pytest.mark.parametrize(("name", "expected"), [
    ("kimi-k2",
     {"num_experts": 384, "num_groups": 1, "num_dense_layers": 1, "routed_scale": 2.827,
      "num_heads": 64}),
    ("deepseek-v2-lite",
     {"num_experts": 64, "num_experts_per_token": 6, "num_shared_experts": 2, "q_lora_rank": None,
      "num_groups": 1}),
    ("deepseek-v2",
     {"num_experts": 160, "q_lora_rank": 1536, "num_groups": 8, "num_groups_per_token": 3}),
])  # fmt: skip
def test_other_published_configs(tmp_path, name, expected):
    shutil.copy(FOLDER / f"{name}.json", tmp_path / "config.json")
    config = ModelConfig.from_folder(tmp_path)
    owner = {field: config if hasattr(config, field) else config.attention for field in expected}
    assert {field: getattr(owner[field], field) for field in expected} == expected
    is_v2 = "v2" in name
    assert (config.softmax_gate, config.weights_normalised) == (is_v2, not is_v2)
    assert config.fp8_block == (None if is_v2 else (128, 128))
    assert config.rope.yarn.attention_factor == 1.0
    # 192^-0.5 * (0.1 * mscale * ln factor + 1)^2.
    mscale = 0.0707 * math.log(40) + 1 if is_v2 else 0.1 * math.log(32) + 1
    assert config.attention.softmax_scale == pytest.approx(192**-0.5 * mscale**2)


def test_what_may_be_absent_in_deepseek_v2(tmp_path):
    """`transformers` does not write these fields."""
    names = (
        "scoring_func", "moe_layer_freq", "topk_method", "norm_topk_prob", "n_group", "topk_group",
    )  # fmt: skip
    shutil.copy(FOLDER / "deepseek-v2-lite.json", tmp_path / "config.json")
    assert read_config(
        tmp_path, dict.fromkeys(names, MISSING), base=LITE
    ) == ModelConfig.from_folder(tmp_path)


def test_greedy_has_no_groups(tmp_path):
    config = read_config(tmp_path, {"n_group": 8, "topk_group": 3}, base=LITE)
    assert (config.num_groups, config.num_groups_per_token) == (1, 1)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [({"scoring_func": "sigmoid"},
      "scoring_func is 'sigmoid'; DeepseekV2.* is supported with 'softmax' only"),
     ({"topk_method": "noaux_tc"},
      "topk_method is 'noaux_tc'; .* with 'greedy' or 'group_limited_greedy' only"),
     ({"norm_topk_prob": True},
      "norm_topk_prob is True; DeepseekV2ForCausalLM is supported with False only"),
     ({"mlp_bias": True}, "mlp_bias is True; .* with False only"),
     ({"rope_interleave": False}, "rope_interleave is False; .* with True only"),
     ({"topk_method": "group_limited_greedy", "n_group": 7},
      "n_routed_experts is 64; it must be a multiple of n_group"),
     ({"n_routed_experts": MISSING},
      "n_routed_experts is missing; it must be an integer of at least 1")],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)  # fmt: skip
def test_what_deepseek_v2_cannot_run_is_refused_by_name(tmp_path, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        read_config(tmp_path, changes, base=LITE)


def test_both_spellings_of_rope_mean_the_same(tmp_path):
    published = read_config(tmp_path)
    scaling = PUBLISHED["rope_scaling"]
    new = {**scaling, "rope_type": "yarn", "rope_theta": 10000}
    del new["type"]
    assert (
        read_config(
            tmp_path, {"rope_scaling": MISSING, "rope_theta": MISSING, "rope_parameters": new}
        )
        == published
    )
    # As transformers 5.24 writes it where kinds of layers differ.
    for name in ("rope_parameters", "rope_scaling"):
        changes = {"rope_scaling": MISSING, "rope_theta": MISSING, name: {"full_attention": new}}
        assert read_config(tmp_path, changes) == published
    mixed = {**scaling, "rope_type": "yarn"}
    assert read_config(tmp_path, {"rope_scaling": mixed}) == published


@pytest.mark.parametrize("changes", [
    {"rope_scaling": None},
    {"rope_scaling": MISSING},
    {"rope_scaling": MISSING, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    {"rope_scaling": {"type": "default"}},
])  # fmt: skip
def test_plain_rope(tmp_path, changes):
    config = read_config(tmp_path, changes)
    assert config.rope.yarn is None and config.rope.theta == 10_000
    assert config.attention.softmax_scale == pytest.approx(192**-0.5)


def test_what_may_be_absent(tmp_path):
    names = (
        "q_lora_rank", "topk_method", "scoring_func", "moe_layer_freq", "first_k_dense_replace",
        "n_group",
    )  # fmt: skip
    absent = dict.fromkeys((*names, "topk_group", "norm_topk_prob", "tie_word_embeddings"), MISSING)
    config = read_config(tmp_path, absent)
    assert config.attention.q_lora_rank == 1536
    assert (config.num_dense_layers, config.num_groups, config.num_groups_per_token) == (3, 8, 4)
    assert config.weights_normalised and not config.tied_embeddings


def test_fields_that_transformers_may_write_otherwise(tmp_path):
    config = read_config(
        tmp_path, {"n_routed_experts": MISSING, "num_local_experts": 64, "q_lora_rank": None}
    )
    assert (config.num_experts, config.attention.q_lora_rank) == (64, None)


def test_end_of_sequence_ids_come_from_the_generation_config_first(tmp_path):
    assert read_config(tmp_path, {"eos_token_id": [5, 6]}).eos_token_ids == (5, 6)
    assert read_config(tmp_path, {"eos_token_id": MISSING}).eos_token_ids == ()
    assert read_config(tmp_path, generation={"eos_token_id": [7, 1]}).eos_token_ids == (7, 1)
    assert read_config(tmp_path, generation={"temperature": 0.6}).eos_token_ids == (1,)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [({"architectures": ["GptOssForCausalLM"]},
      "is GptOssForCausalLM; it must be DeepseekV3ForCausalLM or DeepseekV2For"),
     ({"architectures": MISSING},
      "the architecture is none .model_type 'deepseek_v3'.; it must be"),
     ({"architectures": [None]}, r"architectures is \[None\]; it must be a list of names"),
     ({"layer_types": 5}, "layer_types is 5; it must be a list of names"),
     ({"layer_types": "full_attention"}, "layer_types is 'full_attention'; it must be a list"),
     ({"scoring_func": "softmax"},
      "scoring_func is 'softmax'; DeepseekV3.* is supported with 'sigmoid' only"),
     ({"topk_method": "greedy"}, "topk_method is 'greedy'; .* with 'noaux_tc' only"),
     ({"moe_layer_freq": 2}, "moe_layer_freq is 2; .* with 1 only"),
     ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; .* with 'silu' only"),
     ({"attention_bias": True}, "attention_bias is True; .* with False only"),
     ({"quantization_config": {"quant_method": "awq"}},
      "the weights are quantized .awq.; they must be float32"),
     ({"quantization_config": FP8 | {"fmt": "e5m2"}},
      "the weights are quantized .fp8, e5m2.; they must be float32"),
     ({"quantization_config": {"quant_method": "fp8"}},
      "weight_block_size is None; it must be the rows and columns"),
     ({"quantization_config": FP8 | {"weight_block_size": [128]}},
      r"weight_block_size is .128.; it must be the rows"),
     ({"quantization_config": FP8 | {"weight_block_size": [0, 9]}},
      r"weight_block_size is .0, 9.; it must be"),
     ({"quantization_config": "fp8"}, "quantization_config is 'fp8'; it must be an object"),
     ({"first_k_dense_replace": 61},
      "first_k_dense_replace is 61 of 61 layers, so no layer has the experts"),
     ({"n_routed_experts": 250}, "n_routed_experts is 250; it must be a multiple of n_group .8."),
     ({"n_routed_experts": 8}, "a group has 1 expert; the gate scores groups by two experts"),
     ({"topk_group": 9}, "topk_group is 9; it must be from 1 to n_group .8."),
     ({"num_experts_per_tok": 129}, "num_experts_per_tok is 129; the chosen groups have 128"),
     ({"qk_rope_head_dim": 63}, "qk_rope_head_dim is 63; it must be even"),
     ({"rope_scaling": {"type": "dynamic", "factor": 2}},
      "the rope type is 'dynamic'; it must be default, yarn or llama3"),
     ({"hidden_size": MISSING}, "hidden_size is missing; it must be an integer of at least 1"),
     ({"hidden_size": 0}, "hidden_size is 0; it must be an integer of at least 1"),
     ({"hidden_size": "big"}, "hidden_size is 'big'; it must be an integer"),
     ({"hidden_size": True}, "hidden_size is True; it must be an integer"),
     ({"first_k_dense_replace": -1},
      "first_k_dense_replace is -1; it must be an integer of at least 0"),
     ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'; it must be a finite number"),
     ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'; it must be an object"),
     ({"rope_scaling": {"type": "yarn", "factor": "x"}},
      "rope_scaling: factor is 'x'; it must be a finite number"),
     ({"rope_scaling": {"type": "yarn", "factor": -2}},
      "rope_scaling: factor is -2.0; it must be above 0"),
     ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; only 1.0 is supported"),
     ({"eos_token_id": 129280}, "eos_token_id has 129280; ids must be from 0 to 129279"),
     ({"eos_token_id": [1, -1]}, "eos_token_id has -1; ids must be from 0 to 129279"),
     ({"architectures": 5}, "architectures is 5; it must be a list of names"),
     ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'; it must be an id or a list of ids"),
     ({"eos_token_id": [1, None]}, "eos_token_id is .1, None.; it must be an id or a list of ids")],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)  # fmt: skip
def test_what_cannot_run_is_refused_by_name(tmp_path, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        read_config(tmp_path, changes)


def test_a_folder_that_is_no_checkpoint(tmp_path):
    with pytest.raises(
        ValueError, match=r"config\.json is missing; a checkpoint is a Hugging Face folder"
    ):
        ModelConfig.from_folder(tmp_path)
    for text, sentence in (
        ("{", "is not JSON"),
        ("[]", "holds a list; it must hold a JSON object"),
        ("\xff", "is not"),
    ):
        (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(ValueError, match=sentence):
            ModelConfig.from_folder(tmp_path)


def yarns(**fixed):
    optional = {
        "mscale": st.sampled_from([0.5, 0.707, 1.0]),
        "mscale_all_dim": st.sampled_from([0.0, 0.707, 1.0]),
        "attention_factor": st.sampled_from([1.0, 1.3]),
        "beta_fast": st.sampled_from([16, 32, 32.5]),
        "beta_slow": st.sampled_from([1, 2]),
        "truncate": st.booleans(),
    }
    return st.fixed_dictionaries(
        {
            "factor": st.sampled_from([1.0, 2.5, 4.0, 40.0]),
            "original_max_position_embeddings": st.sampled_from([64, 1024, 4096]),
            "rope_theta": st.sampled_from([10_000.0, 500_000.0]),
        },
        optional=optional,
    ).map(lambda parameters: {"rope_type": "yarn", **parameters, **fixed})


@settings(max_examples=40)
@given(
    st.one_of(yarns(), st.just({"rope_type": "default", "rope_theta": 1_000.0})),
    st.booleans(),
    st.integers(0, 16_000),
)
def test_rotation_and_scale_are_those_of_transformers(
    tmp_path_factory, parameters, interleaved, position
):
    transformers.logging.set_verbosity_error()  # it warns of odd factors
    folder = tmp_path_factory.mktemp("config")
    reference = DeepseekV3Config(
        **(PRESETS["tiny"] | {"rope_parameters": dict(parameters), "rope_interleave": interleaved}),
        architectures=["DeepseekV3ForCausalLM"],
    )
    reference.save_pretrained(folder)
    config = ModelConfig.from_folder(folder)
    assert config.attention.softmax_scale == pytest.approx(
        yarn_apply_mscale(parameters, (64 + 32) ** -0.5), rel=1e-12
    )

    x_BHP = torch.randn(3, 2, 32, generator=torch.Generator().manual_seed(position))
    position_B = torch.tensor([position, 0, 16_383])
    cos, sin = DeepseekV3RotaryEmbedding(reference)(x_BHP, position_B[None])
    rotate = apply_rotary_pos_emb_interleave if interleaved else apply_rotary_pos_emb
    expected, _ = rotate(x_BHP.transpose(0, 1)[None], x_BHP.transpose(0, 1)[None], cos, sin)
    expected_BHP = expected[0].transpose(0, 1)
    if interleaved:
        expected_BHP = side_by_side(expected_BHP)
    found = RopeTable(config.rope, 32).rotate(x_BHP, position_B)
    torch.testing.assert_close(found, expected_BHP, atol=2e-6, rtol=1e-5)
