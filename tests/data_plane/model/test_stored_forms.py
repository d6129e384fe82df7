"""What the weights are decides, not what was once said of them; a form that is not read is refused.

The forms are those of ModelOpt (hf_quant_config.json), AutoAWQ, compressed-tensors, DeepSeek's
blocks with F8_E8M0 scales, and bf16 tensors under an entry that was left in config.json.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from data_plane.model.config import ModelConfig
from data_plane.model.make_checkpoint import make_checkpoint
from data_plane.model.safetensors_reader import has_fp8
from data_plane.startup.memory_need import memory_need
from nanocp.cli.plan.memory import DeviceName, Hardware, report_folder
from nanocp.config.whole import Config
from nanocp.serve.served import check_model, open_checkpoint

BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
UP = "model.layers.1.mlp.experts.3.up_proj"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("forms") / "fp8"
    make_checkpoint(path, "tiny", dtype=torch.float8_e4m3fn)
    return path


def edited(folder, tmp_path, tensors=None, fields=None, files=None):
    """Copy the folder; tensors: changes them. fields: of config.json. files: name -> JSON."""
    stored = load_file(folder / "model.safetensors")
    if tensors is not None:
        tensors(stored)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | (fields or {})
    for name, content in {"config.json": config, **(files or {})}.items():
        (tmp_path / name).write_text(json.dumps(content))
    return tmp_path


def plain(stored):
    for name in [name for name in stored if name.endswith("_scale_inv")]:
        del stored[name]
    for name, tensor in stored.items():
        stored[name] = tensor.to(torch.bfloat16)


def e8m0(stored):
    stored[UP + ".weight_scale_inv"] = stored[UP + ".weight_scale_inv"].to(torch.float8_e8m0fnu)


def one_scale(stored):
    del stored[UP + ".weight_scale_inv"]
    stored[UP + ".weight_scale"] = torch.tensor(0.5)


def packed(stored):
    del stored[UP + ".weight_scale_inv"]
    stored[UP + ".qweight"] = stored.pop(UP + ".weight").to(torch.int32)


def nibbles(stored):
    stored[UP + ".weight"] = stored[UP + ".weight"].view(torch.uint8)


@pytest.mark.parametrize(("tensors", "sentence"), [
    (e8m0, f"{UP}.weight_scale_inv is F8_E8M0; it must be one of F32, BF16"),
    (one_scale, f"the weight of {UP} is quantized, as {UP}.weight_scale says; it must be"),
    (packed, f"the weight of {UP} is quantized, as {UP}.qweight says; it must be one"),
    (nibbles, f"{UP}.weight is U8; it must be one of F32"),
])  # fmt: skip
def test_a_form_that_is_not_read_is_refused_at_the_door(folder, tmp_path, tensors, sentence):
    path = edited(folder, tmp_path, tensors)
    with pytest.raises(ValueError, match=sentence):
        report_folder(path, Hardware())
    if tensors is not packed:  # what is missing is named by who loads it
        with pytest.raises(ValueError, match=sentence):
            open_checkpoint(Config(), path)


@pytest.mark.parametrize("fields", [BLOCKS, {"quant_method": "fp8"}, BLOCKS | {"fmt": "e5m2"}])
def test_plain_tensors_under_an_entry_that_was_left_are_plain(folder, tmp_path, capsys, fields):
    path = edited(folder, tmp_path, plain, {"quantization_config": fields})
    assert has_fp8(folder) is True and has_fp8(path) is False
    model = ModelConfig.from_folder(path)
    assert model.fp8_block is None
    hardware = Hardware(device=DeviceName("h100"))
    assert report_folder(path, hardware)
    config = hardware.config()
    need = memory_need(model, config.cluster, config.data_plane, False, stores_bf16=True)
    num_frames = int((0.9 * 80e9 - 5.7e9 - need.fixed) // need.page)
    assert f"{num_frames:,} pages" in capsys.readouterr().out


def test_experts_that_are_bf16_are_counted_so_though_attention_is_fp8(folder, tmp_path, capsys):
    def some(stored):
        for name in [name for name in stored if ".experts." in name]:
            stored[name] = stored[name].to(torch.bfloat16)
            if name.endswith("_scale_inv"):
                del stored[name]

    # The page rounds to 10 MB; how many frames are left shows the bytes.
    hardware, shown = Hardware(device=DeviceName("h100"), memory_gb=8.0), {}
    for what, change in (("some", some), ("all", None)):
        (tmp_path / what).mkdir()
        path = edited(folder, tmp_path / what, change)
        assert ModelConfig.from_folder(path).fp8_block == (128, 128)
        assert report_folder(path, hardware)
        shown[what] = capsys.readouterr().out
    assert shown["some"] != shown["all"]


@pytest.mark.parametrize(("quantization", "sentence"), [
    ({"quant_method": "awq", "bits": 4}, r"weights are quantized \(awq\); they must be"),
    ({"quant_method": "gptq"}, r"weights are quantized \(gptq\); they must be"),
    ({"quant_method": "compressed-tensors", "format": "pack-quantized"},
     r"quantized \(compressed-tensors, pack-quantized\)"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, r"quantized \(modelopt, NVFP4\)"),
    ({"quant_method": "mxfp4"}, r"weights are quantized \(mxfp4\)"),
    ({"bits": 4}, "quantized .without a quant_method.; they must be"),
])  # fmt: skip
# The third is that of MLX.
@pytest.mark.parametrize("entry", ["quantization_config", "compression_config", "quantization"])
def test_what_config_says_is_refused_by_what_it_says(
    folder, tmp_path, quantization, sentence, entry
):
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config | {entry: quantization}))
    with pytest.raises(ValueError, match=sentence):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize("algorithm", ["NVFP4", "FP8", "FP8_PB_WO", "W4A8_AWQ", "MIXED_PRECISION"])
def test_what_modelopt_says_beside_config_is_refused_by_name(folder, tmp_path, algorithm):
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match=f"hf_quant_config.json: quant_algo is '{algorithm}'; wei"):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "said", "sentence"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128}, "bits is 4"),  # AutoGPTQ
        ("quantize_config.json", {"quant_method": "gptq", "bits": 4}, "quant_method is 'gptq'"),
        ("quant_config.json", {"zero_point": True, "w_bit": 4, "version": "GEMM"}, "w_bit is 4"),
    ],
)
def test_what_other_tools_say_beside_config_is_refused_by_name(
    folder, tmp_path, name, said, sentence
):
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    ModelConfig.from_folder(tmp_path)
    (tmp_path / name).write_text(json.dumps(said))
    with pytest.raises(ValueError, match=f"{name}: {sentence}; weights of this form are not read"):
        ModelConfig.from_folder(tmp_path)


def test_modelopt_may_say_something_of_the_kv_alone(folder, tmp_path):
    said = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    path = edited(folder, tmp_path, files={"hf_quant_config.json": said})
    check_model(Config(), ModelConfig.from_folder(path), path)
