"""FP8 checkpoints as DeepSeek publishes them are de-quantised exactly, only what is needed."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from data_plane.model.config import ModelConfig
from data_plane.model.linear import PlainPacking
from data_plane.model.make_checkpoint import make_checkpoint
from data_plane.model.safetensors_reader import SafetensorsReader
from data_plane.model.weights import expert_range, load_weights
from data_plane.moe.backend import fp8_experts
from data_plane.moe.gpu.deep_gemm import DeepGemm
from data_plane.moe.gpu.grouped import GroupedMm
from harness.exact.fp8_twin import FP8, dequantised, make_twin
from harness.gpu_stand_ins.published_packages import deep_gemm


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Preset tiny has weights of whole blocks, of parts of one (96 rows) and of both (544 rows)."""
    path = tmp_path_factory.mktemp("fp8")
    make_checkpoint(path, "tiny", dtype=FP8)
    return path


@pytest.fixture(scope="module")
def twin(checkpoint, tmp_path_factory):
    return make_twin(checkpoint, tmp_path_factory.mktemp("twin") / "twin")


@pytest.fixture
def damaged(checkpoint, tmp_path):
    """Make a copy of the checkpoint to damage."""
    return Path(shutil.copytree(checkpoint, tmp_path / "damaged"))


def load(path):
    return load_weights(path, ModelConfig.from_folder(path), torch.float32, range(16))


def test_the_made_checkpoint_is_as_published(checkpoint):
    """Matrices of attention and MLPs are FP8 with fp32 scales, all else is bf16."""
    stored = load_file(checkpoint / "model.safetensors")
    assert json.loads((checkpoint / "config.json").read_text())["quantization_config"] == {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
    layer = "model.layers.1."
    attention = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    mlps = ("mlp.experts.15.up_proj", "mlp.shared_experts.down_proj")
    for name in (*(f"self_attn.{name}" for name in attention), *mlps):
        assert stored[f"{layer}{name}.weight"].dtype == FP8
        assert stored[f"{layer}{name}.weight_scale_inv"].dtype == torch.float32
        assert stored[f"{layer}{name}.weight"].float().abs().max() == 448, (
            "the scales use all of FP8's range"
        )
    assert stored[layer + "self_attn.q_a_proj.weight_scale_inv"].shape == (1, 2)
    assert (
        stored[layer + "mlp.gate.weight"].dtype == stored["lm_head.weight"].dtype == torch.bfloat16
    )


@settings(max_examples=60)
@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    block=st.tuples(st.integers(1, 16), st.integers(1, 16)),
    wanted=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_every_element_is_its_value_times_its_blocks_scale(
    tmp_path_factory, shape, block, wanted, seed
):
    path, generator = tmp_path_factory.mktemp("one"), torch.Generator().manual_seed(seed)
    values = (torch.randn(shape, generator=generator) * 100).to(FP8)
    scale = torch.rand(
        [-(-size // step) for size, step in zip(shape, block, strict=True)], generator=generator
    )
    save_file(
        {"before": torch.zeros(3), "t": values, "t_scale_inv": scale}, path / "model.safetensors"
    )
    target = torch.empty(shape, dtype=wanted)
    SafetensorsReader(path, block).read_into("t", target)
    assert torch.equal(target, dequantised(values, scale, block).to(wanted))


@pytest.mark.parametrize("num_instances", [1, 4])
def test_an_instance_reads_its_own_experts_and_their_scales_only(
    checkpoint, num_instances, monkeypatch
):
    read = []
    original = SafetensorsReader.read_into
    monkeypatch.setattr(
        SafetensorsReader,
        "read_into",
        lambda self, name, target: (read.append(name), original(self, name, target)),
    )
    config = ModelConfig.from_folder(checkpoint)
    experts = expert_range(config, num_instances - 1, num_instances)
    load_weights(checkpoint, config, torch.float32, experts)
    stored = load_file(checkpoint / "model.safetensors")
    others = [
        f".experts.{expert}." for expert in range(config.num_experts) if expert not in experts
    ]
    assert sorted(read) == sorted(
        name for name in stored if not any(other in name for other in others)
    )


def test_the_made_weights_are_the_seeds_own_but_for_rounding(twin, tmp_path):
    """They differ by half of FP8's last place: 1/16 of the value, or of the step near zero."""
    make_checkpoint(tmp_path, "tiny", dtype=torch.bfloat16)
    made, plain = load_file(twin / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert made.keys() == plain.keys()
    for name, tensor in plain.items():
        smallest_step = tensor.float().abs().max() / 448 * 2**-9
        assert (
            (made[name] - tensor.float()).abs() <= tensor.float().abs() / 16 + smallest_step / 2
        ).all(), name


def test_shards_hold_what_one_file_does(checkpoint, tmp_path):
    make_checkpoint(tmp_path, "tiny", dtype=FP8, max_shard_size="2MB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    whole, sharded = load(checkpoint), load(tmp_path)
    x = torch.randn(2, 128, generator=torch.Generator().manual_seed(1))
    for one, other in zip(whole.layers[3].moe.mlps, sharded.layers[3].moe.mlps, strict=True):
        assert torch.equal(one.down(x), other.down(x))


# --- weights that stay in FP8 ---

KEPT = PlainPacking(keeps_fp8=True)


def test_kept_experts_are_the_stored_bytes_and_are_never_dequantised(checkpoint, monkeypatch):
    read = []
    original = SafetensorsReader.read_into
    monkeypatch.setattr(
        SafetensorsReader,
        "read_into",
        lambda self, name, target: (read.append(name), original(self, name, target)),
    )
    config, reports = ModelConfig.from_folder(checkpoint), []
    weights = load_weights(
        checkpoint, config, torch.bfloat16, range(4, 8), lambda *progress: reports.append(progress),
        packing=KEPT,
    )  # fmt: skip
    assert reports[-1][0] == reports[-1][1]
    assert all(name.endswith("_scale_inv") for name in read if ".experts." in name)
    stored = load_file(checkpoint / "model.safetensors")
    for number, mlp in enumerate(weights.layers[2].moe.mlps, start=4):
        prefix = f"model.layers.2.mlp.experts.{number}."
        for linear, names in ((mlp.gate_up, ("gate", "up")), (mlp.down, ("down",))):
            values, scale = (
                torch.cat([stored[f"{prefix}{name}_proj.weight{kind}"] for name in names])
                for kind in ("", "_scale_inv")
            )
            assert linear.weight.values.dtype == FP8
            assert linear.weight.values.view(torch.uint8).equal(values.view(torch.uint8))
            assert linear.weight.scale.equal(scale) and linear.weight.block == (128, 128)
            assert linear.weight.dequantised().equal(dequantised(values, scale))
    assert weights.layers[2].moe.shared.down.weight.values.dtype == FP8


def test_kept_dense_layers_are_the_stored_bytes_and_no_block_has_rows_of_two_weights(tmp_path):
    """With 128 rows q_a ends where a block does; 96 rows of kv_a, the last part, need not."""
    make_checkpoint(tmp_path, "tiny", dtype=FP8, overrides={"q_lora_rank": 128})
    stored = load_file(tmp_path / "model.safetensors")
    config = ModelConfig.from_folder(tmp_path)
    weights = load_weights(tmp_path, config, torch.bfloat16, range(2), packing=KEPT)
    dense, sparse = weights.layers[0], weights.layers[1]
    for layer, prefix, names in (
        (dense.attention.down_proj, "0.self_attn.", ("q_a_proj", "kv_a_proj_with_mqa")),
        (sparse.attention.q_proj, "1.self_attn.", ("q_b_proj",)),
        (sparse.o_proj, "1.self_attn.", ("o_proj",)),
        (dense.mlp.gate_up, "0.mlp.", ("gate_proj", "up_proj")),
        (sparse.moe.shared.down, "1.mlp.shared_experts.", ("down_proj",)),
    ):
        values, scale = (
            torch.cat([stored[f"model.layers.{prefix}{name}.weight{kind}"] for name in names])
            for kind in ("", "_scale_inv")
        )
        assert layer.weight.values.view(torch.uint8).equal(values.view(torch.uint8))
        assert layer.weight.scale.equal(scale)
    assert dense.attention.k_up.dtype == weights.lm_head.weight.dtype == torch.bfloat16


def test_fused_weights_of_broken_blocks_or_of_two_dtypes_are_dequantised(damaged):
    """In preset tiny q_a has 96 rows; a plain up makes gate and up plain, and leaves down.

    The head is always de-quantised.
    """
    name, head = "model.layers.0.mlp.up_proj.weight", "lm_head.weight"

    def change(tensors):
        tensors[name] = tensors[name].to(torch.bfloat16)
        tensors[head], tensors[head + "_scale_inv"] = tensors[head].to(FP8), torch.ones(4, 2)

    damage(damaged, change)
    config = ModelConfig.from_folder(damaged)
    kept, plain = (
        load_weights(damaged, config, torch.float32, range(2), packing=packing)
        for packing in (KEPT, PlainPacking())
    )
    assert kept.lm_head.weight.equal(plain.lm_head.weight)
    kept, plain = kept.layers[0], plain.layers[0]
    for layer, expected in (
        (kept.attention.down_proj, plain.attention.down_proj),
        (kept.mlp.gate_up, plain.mlp.gate_up),
    ):
        assert layer.weight.equal(expected.weight)
    assert kept.mlp.down.weight.values.dtype == FP8
    assert kept.mlp.down.weight.dequantised().equal(plain.mlp.down.weight)


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_an_expert_that_is_no_number_in_fp8_is_refused_by_name(damaged, byte):
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    damage(damaged, lambda tensors: tensors[name].view(torch.uint8)[5].fill_(byte))
    with pytest.raises(ValueError, match=f"tensor {name} has values that are no finite numbers"):
        load_weights(
            damaged, ModelConfig.from_folder(damaged), torch.float32, range(2, 4), packing=KEPT
        )


def test_a_layer_with_an_expert_that_is_no_fp8_is_dequantised_as_a_whole(damaged):
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    damage(damaged, lambda tensors: tensors.update({name: tensors[name].to(torch.bfloat16)}))
    weights = load_weights(
        damaged, ModelConfig.from_folder(damaged), torch.float32, range(2, 4), packing=KEPT
    )
    one, other = weights.layers[1].moe.mlps[0].down, weights.layers[2].moe.mlps[0].down
    assert (one.weight.dtype, other.weight.values.dtype) == (torch.float32, FP8)


@pytest.mark.parametrize(("gemm", "change", "said"), [
    (DeepGemm(8, deep_gemm), {}, None),
    (DeepGemm(8, deep_gemm), {"fp8_block": (64, 128)}, "deep_gemm reads blocks of 128x128"),
    (GroupedMm(), {}, "this expert_backend takes no FP8; triton and deep_gemm do"),
    (DeepGemm(8, deep_gemm),
     {"expert_size": 96},
     "moe_intermediate_size is 96, so that gate and up would share"),
])  # fmt: skip
def test_whether_weights_stay_in_fp8_is_said(checkpoint, gemm, change, said):
    model = replace(ModelConfig.from_folder(checkpoint), **change)
    kept, sentence = fp8_experts(model, gemm, "bfloat16")
    assert kept == (said is None)
    assert (said or "experts and dense layers that deep_gemm takes stay so, all else") in sentence
    assert fp8_experts(replace(model, fp8_block=None), gemm, "bfloat16") == (False, "")


# --- damage ---


def damage(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


NAME = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.mark.parametrize(("change", "sentence"), [
    (lambda tensors: tensors.pop(NAME + "_scale_inv"),
     rf"1 tensor is missing from the checkpoint: {NAME}_scale_inv$"),
    (lambda tensors: tensors.update({NAME + "_scale_inv": torch.ones(1, 1)}),
     rf"{NAME}_scale_inv has shape \[1, 1\]; by config.json it must have \[1, 2\]"),
    (lambda tensors: tensors.update({"model.norm.weight": torch.ones(256).to(FP8)}),
     "model.norm.weight is F8_E4M3, which only a matrix may be"),
], ids=["scales that are missing", "scales of other blocks", "a norm in FP8"])  # fmt: skip
def test_what_is_wrong_with_a_tensor_is_named(damaged, change, sentence):
    damage(damaged, change)
    with pytest.raises(ValueError, match=sentence):
        load(damaged)


def test_fp8_weights_without_a_word_in_config_are_named(damaged):
    config = json.loads((damaged / "config.json").read_text())
    del config["quantization_config"]
    (damaged / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match=r"_proj.weight is F8_E4M3, .* only with a quantization_config"
    ):
        load(damaged)
