"""Weights from safetensors: no more is read than needed, it is prepared right, faults are named."""

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from data_plane.model import safetensors_reader
from data_plane.model.config import ModelConfig
from data_plane.model.make_checkpoint import make_checkpoint
from data_plane.model.safetensors_reader import SafetensorsReader
from data_plane.model.sizes import is_packed, stored_shapes
from data_plane.model.weights import expert_range, load_weights
from harness.kernels.native_cases import native


def bytes_read():
    """Count the bytes that this process has read of any file with read calls."""
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])


@pytest.fixture(scope="module")
def config(tiny_checkpoint):
    return ModelConfig.from_folder(tiny_checkpoint)


@pytest.fixture(scope="module")
def sharded_checkpoint(tiny_checkpoint, tmp_path_factory):
    """One shard for each expert number, and one for everything else."""
    path = tmp_path_factory.mktemp("sharded")
    shutil.copy(tiny_checkpoint / "config.json", path)
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in load_file(tiny_checkpoint / "model.safetensors").items():
        expert = re.search(r"\.experts\.(\d+)\.", name)
        shards.setdefault(f"expert-{expert[1]}.safetensors" if expert else "rest.safetensors", {})[
            name
        ] = tensor
    for file, tensors in shards.items():
        save_file(tensors, path / file)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


@pytest.fixture
def damaged(tiny_checkpoint, tmp_path):
    """Make a copy of the checkpoint to damage."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "damaged"))


def load(path, experts=range(16), dtype=torch.float32):
    return load_weights(path, ModelConfig.from_folder(path), dtype, experts)


def rewrite(path, change):
    """Save the checkpoint's tensors again after `change(tensors)`."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


# --- the reader ---


def test_every_tensor_is_what_the_library_reads(tiny_checkpoint):
    reader = SafetensorsReader(tiny_checkpoint)
    with safe_open(tiny_checkpoint / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (it is not a dict)
            expected = file.get_tensor(name)
            target = torch.full_like(expected, torch.nan)
            reader.read_into(name, target)
            assert torch.equal(target, expected), name


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_values_are_converted(tmp_path, stored, wanted):
    values = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(stored)
    save_file({"before": torch.zeros(7), "t": values}, tmp_path / "model.safetensors")
    target = torch.empty(3, 5, dtype=wanted)
    SafetensorsReader(tmp_path).read_into("t", target)
    assert torch.equal(target, values.to(wanted))


def test_a_dtype_that_is_no_float_is_refused_by_name(tmp_path):
    save_file({"t": torch.zeros(4, dtype=torch.int32)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="the tensor t is I32; it must be one of F32, BF16, F16"):
        SafetensorsReader(tmp_path).read_into("t", torch.empty(4))


# --- what an instance reads ---


@pytest.mark.parametrize("num_instances", [1, 2, 4])
def test_an_instance_reads_its_own_experts_and_nothing_of_the_others(
    tiny_checkpoint, config, num_instances
):
    with safe_open(tiny_checkpoint / "model.safetensors", framework="pt") as file:
        sizes = {name: 4 * file.get_tensor(name).numel() for name in file.keys()}  # noqa: SIM118
    expert_bytes = sum(size for name, size in sizes.items() if ".experts." in name)
    needed = sum(sizes.values()) - expert_bytes + expert_bytes // num_instances
    overhead = 200_000  # headers: a shard's is read once, config.json never again
    experts = expert_range(config, num_instances - 1, num_instances)
    before = bytes_read()
    load_weights(tiny_checkpoint, config, torch.float32, experts)
    assert needed <= bytes_read() - before <= needed + overhead


def test_shards_without_a_tensor_of_ours_need_not_exist(sharded_checkpoint, tmp_path):
    path = Path(shutil.copytree(sharded_checkpoint, tmp_path / "copy"))
    for expert in range(4, 16):
        (path / f"expert-{expert}.safetensors").unlink()
    load(path, range(4))
    with pytest.raises(
        ValueError, match=r"expert-4\.safetensors is missing, but the checkpoint needs it"
    ):
        load(path, range(5))


def test_shards_hold_what_one_file_does(sharded_checkpoint, tiny_checkpoint):
    whole, sharded = load(tiny_checkpoint, range(3, 5)), load(sharded_checkpoint, range(3, 5))
    x = torch.randn(2, 256, generator=torch.Generator().manual_seed(1))
    assert torch.equal(whole.embedding, sharded.embedding) and torch.equal(
        whole.lm_head(x), sharded.lm_head(x)
    )
    for one, other in zip(whole.layers[3].moe.mlps, sharded.layers[3].moe.mlps, strict=True):
        assert torch.equal(one.gate_up(x), other.gate_up(x))


def test_what_is_needed_is_what_a_checkpoint_holds(tiny_checkpoint, config):
    tensors = load_file(tiny_checkpoint / "model.safetensors")
    assert stored_shapes(config, range(16)) == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }


def test_more_than_a_hundred_shards(tmp_path, monkeypatch):
    """DeepSeek-V3 has 163: each shard's header is read once, and one file is open at a time."""
    overrides = {"num_hidden_layers": 12, "intermediate_size": 256, "moe_intermediate_size": 64}
    make_checkpoint(tmp_path / "one", "tiny", overrides=overrides)
    make_checkpoint(tmp_path / "many", "tiny", overrides=overrides, max_shard_size="30KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 100
    headers, open_files, original = [], [], safetensors_reader._read_header
    monkeypatch.setattr(
        safetensors_reader, "_read_header", lambda path: (headers.append(path), original(path))[1]
    )
    config = ModelConfig.from_folder(tmp_path / "many")
    whole = load(tmp_path / "one", range(4, 8))
    headers.clear()
    sharded = load_weights(
        tmp_path / "many",
        config,
        torch.float32,
        range(4, 8),
        lambda done, total: open_files.append(
            {file.path for file in psutil.Process().open_files()}
        ),
    )
    assert len(headers) == len(set(headers))
    assert max(sum(path.endswith(".safetensors") for path in paths) for paths in open_files) <= 1
    x = torch.randn(2, 256, generator=torch.Generator().manual_seed(1))
    assert torch.equal(whole.lm_head(x), sharded.lm_head(x))
    for one, other in zip(whole.layers[3].moe.mlps, sharded.layers[3].moe.mlps, strict=True):
        assert torch.equal(one.down(one.gate_up(x)[:, :64]), other.down(other.gate_up(x)[:, :64]))


def test_progress_counts_every_element_once(tiny_checkpoint, config):
    reports = []
    load_weights(
        tiny_checkpoint,
        config,
        torch.float32,
        range(4),
        lambda done, total: reports.append((done, total)),
    )
    total = sum(math.prod(shape) for shape in stored_shapes(config, range(4)).values())
    assert reports[-1] == (total, total) and {each_total for _, each_total in reports} == {total}
    assert [done for done, _ in reports] == sorted({done for done, _ in reports})


LARGE = {
    "vocab_size": 8192, "hidden_size": 512, "num_hidden_layers": 3, "intermediate_size": 2048,
    "moe_intermediate_size": 512, "n_routed_experts": 32,
}  # fmt: skip
"""A quarter of the model is about 110 MB in fp32; its largest tensor 17 MB, all experts 200 MB."""
MEASURE = """
import re, sys
from pathlib import Path
import torch
from data_plane.model.config import ModelConfig
from data_plane.step.cpu_kernels import cpu_kernels
from data_plane.model.linear import Linear, PlainPacking
from data_plane.model.weights import load_weights

def status(field):
    text = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(field + r":\\s+(\\d+) kB", text)[1])

Linear(torch.zeros(64, 64))  # the library's own start
config = ModelConfig.from_folder(sys.argv[1])
if sys.argv[2] == "kept":
    packing = PlainPacking(keeps_fp8=True)
else:
    packing, _ = cpu_kernels(sys.argv[2], torch.float32, 1, keeps_bf16=True)
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
weights = load_weights(sys.argv[1], config, torch.float32, range(8), packing=packing)
print(status("VmHWM") - before)
"""


@pytest.mark.parametrize(
    ("dtype", "packing"),
    [
        (torch.bfloat16, "native"),
        (torch.float8_e4m3fn, "kept"),
        *(
            pytest.param(dtype, "torch", marks=pytest.mark.system)
            for dtype in (torch.bfloat16, torch.float8_e4m3fn)
        ),
    ],
    ids=str,
)
def test_loading_never_holds_more_than_the_share_and_one_tensor(tmp_path, dtype, packing):
    """Weights are packed by the kernels of that name, or stay in FP8; native kernels keep bf16."""
    if packing == "native":
        native((torch.float32, ""))
    make_checkpoint(tmp_path, "tiny", dtype=dtype, overrides=LARGE)

    def element_bytes(name, shape):
        if packing == "kept" and name.endswith("_proj.weight") and not re.search("q_a|kv_b", name):
            return 1
        return 2 if packing == "native" and is_packed(name, shape) else 4

    sizes = [
        element_bytes(name, shape) * math.prod(shape)
        for name, shape in stored_shapes(ModelConfig.from_folder(tmp_path), range(8)).items()
    ]
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, tmp_path, packing],
        capture_output=True,
        text=True,
        check=True,
    )
    headers_and_allocator = 14 << 20  # 6 were seen; a second tensor is 17
    assert sum(sizes) * 0.95 < int(run.stdout) < sum(sizes) + max(sizes) + headers_and_allocator


def test_experts_are_shared_out_as_evenly_as_they_can_be(config):
    ranges = [expert_range(config, instance, 4) for instance in range(4)]
    assert [list(experts) for experts in ranges] == [list(range(i, i + 4)) for i in (0, 4, 8, 12)]
    ranges = [expert_range(config, instance, 3) for instance in range(3)]
    assert ranges == [range(6), range(6, 11), range(11, 16)]


# --- how they are prepared ---


def test_weights_do_what_the_stored_ones_do(tiny_checkpoint, config):
    """Each linear map, as the reference spells it, applied to random rows."""
    tensors = load_file(tiny_checkpoint / "model.safetensors")
    weights = load(tiny_checkpoint, range(4, 8))
    layer, prefix = weights.layers[1], "model.layers.1."
    kind, own = config.attention, layer.attention
    rows = lambda width: torch.randn(5, width, generator=torch.Generator().manual_seed(width))  # noqa: E731
    stored = lambda name: tensors[prefix + name + ".weight"]  # noqa: E731
    x = rows(config.hidden_size)
    down = torch.cat((stored("self_attn.q_a_proj"), stored("self_attn.kv_a_proj_with_mqa")))
    torch.testing.assert_close(own.down_proj(x), x @ down.T)
    latent = rows(kind.q_lora_rank)
    torch.testing.assert_close(own.q_proj(latent), latent @ stored("self_attn.q_b_proj").T)
    kv_b = stored("self_attn.kv_b_proj").view(
        kind.num_heads, kind.nope_dim + kind.value_dim, kind.kv_lora_rank
    )
    c_kv = rows(kind.kv_lora_rank)
    keys, values = torch.einsum("hor,br->hbo", kv_b, c_kv).split(
        [kind.nope_dim, kind.value_dim], dim=2
    )
    torch.testing.assert_close(torch.einsum("hnr,br->hbn", own.k_up, c_kv), keys)
    torch.testing.assert_close(torch.einsum("br,hrv->hbv", c_kv, own.v_up), values)
    assert layer.mlp is None and len(layer.moe.mlps) == 4 and layer.moe.held == [4, 5, 6, 7]
    gate_up = torch.cat((stored("mlp.experts.6.gate_proj"), stored("mlp.experts.6.up_proj")))
    torch.testing.assert_close(layer.moe.mlps[2].gate_up(x), x @ gate_up.T)
    assert torch.equal(layer.moe.gate_bias, tensors[prefix + "mlp.gate.e_score_correction_bias"])
    assert weights.layers[0].moe is None and weights.layers[0].mlp is not None


def test_the_gate_stays_fp32_in_bf16(tiny_checkpoint):
    weights = load(tiny_checkpoint, range(1), torch.bfloat16)
    assert weights.embedding.dtype == weights.layers[1].attention.k_up.dtype == torch.bfloat16
    assert (
        weights.layers[1].moe.gate.dtype == weights.layers[1].moe.gate_bias.dtype == torch.float32
    )


def test_tied_embeddings_have_no_head_of_their_own(tmp_path):
    make_checkpoint(tmp_path, "tiny", overrides={"tie_word_embeddings": True})
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    weights, x = (
        load(tmp_path, range(1)),
        torch.randn(3, 256, generator=torch.Generator().manual_seed(0)),
    )
    torch.testing.assert_close(weights.lm_head(x), x @ weights.embedding.T)


def test_layers_behind_the_last_are_passed_over(damaged):
    """Published checkpoints have a layer for multi-token prediction there."""
    rewrite(
        damaged,
        lambda tensors: tensors.update(
            {"model.layers.4.eh_proj.weight": torch.zeros(2, dtype=torch.int8)}
        ),
    )
    assert len(load(damaged, range(1)).layers) == 4


# --- damage ---


def test_a_missing_tensor_is_named(damaged):
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    rewrite(damaged, lambda tensors: tensors.pop(name))
    with pytest.raises(
        ValueError, match=rf"damaged: 1 tensor is missing from the checkpoint: {re.escape(name)}$"
    ):
        load(damaged)
    assert load(damaged, range(3)), "another instance's tensor is no loss"


def test_of_many_missing_tensors_the_first_are_named_before_any_is_read(damaged, monkeypatch):
    def drop(tensors):
        for name in [name for name in tensors if "layers.2." in name]:
            del tensors[name]

    rewrite(damaged, drop)
    monkeypatch.setattr(SafetensorsReader, "read_into", None)
    with pytest.raises(
        ValueError, match=r"62 tensors are missing from the checkpoint: .* and 58 more$"
    ) as caught:
        load(damaged)
    assert str(caught.value).count("model.layers.2.") == 4


def test_a_tensor_of_another_shape_is_named(damaged):
    name = "model.layers.1.self_attn.o_proj.weight"
    rewrite(damaged, lambda tensors: tensors.update({name: tensors[name][:, :-1].contiguous()}))
    with pytest.raises(
        ValueError, match=rf"{re.escape(name)} has shape \[256, 511\]; by config.json it must have"
    ):
        load(damaged)


@pytest.mark.parametrize("kept", [0, 4, 8, 1000, -1])
def test_a_truncated_file_is_named(damaged, kept):
    file = damaged / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"damaged/model\.safetensors is truncated"):
        load(damaged)


@pytest.mark.parametrize("content", [
    b"<html>not found</html>" * 50,
    (20).to_bytes(8, "little") + b"{" * 20,
    (30).to_bytes(8, "little") + json.dumps({"a": {"dtype": "F32"}}).ljust(30).encode(),
    (2).to_bytes(8, "little") + b"[]",
])  # fmt: skip
def test_a_file_that_is_no_safetensors_is_named(damaged, content):
    (damaged / "model.safetensors").write_bytes(content)
    with pytest.raises(
        ValueError, match=r"damaged/model\.safetensors is (truncated or )?not a safetensors file"
    ):
        load(damaged)


def test_bytes_behind_the_last_tensor_are_refused(damaged):
    with (damaged / "model.safetensors").open("ab") as file:
        file.write(b"more")
    with pytest.raises(
        ValueError,
        match=r"model\.safetensors is malformed: it has \d+ bytes, but its header describes",
    ):
        load(damaged)


def test_a_folder_without_weights_is_named(damaged):
    (damaged / "model.safetensors").unlink()
    with pytest.raises(
        ValueError,
        match=r"damaged has neither model\.safetensors nor model\.safetensors\.index\.json",
    ):
        load(damaged)


def test_an_index_that_is_none_or_lies_is_named(sharded_checkpoint, tmp_path):
    path = Path(shutil.copytree(sharded_checkpoint, tmp_path / "copy"))
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    name = "model.norm.weight"
    content["weight_map"][name] = "expert-1.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(
        ValueError, match=rf"{re.escape(name)} \(not in expert-1\.safetensors, where .*index"
    ):
        load(path)
    for text in ("{}", '{"weight_map": {"model.norm.weight": null}}'):
        index.write_text(text)
        with pytest.raises(ValueError, match=r"index\.json is not a safetensors index"):
            load(path)


def test_both_names_of_kimi_linears_dense_layers_are_read(tmp_path):
    """The published folder has mlp., what `transformers` saves block_sparse_moe."""
    make_checkpoint(tmp_path, "tiny-kimi-linear")
    (file,) = tmp_path.glob("*.safetensors")
    model, tensors = ModelConfig.from_folder(tmp_path), load_file(file)
    saved, published = "model.layers.0.block_sparse_moe.", "model.layers.0.mlp."
    assert any(name.startswith(saved) for name in tensors)
    found = [load_weights(tmp_path, model, torch.float32, range(model.num_experts))]
    save_file({name.replace(saved, published): each for name, each in tensors.items()}, file)
    found.append(load_weights(tmp_path, model, torch.float32, range(model.num_experts)))
    rows = torch.randn(2, model.hidden_size)
    assert torch.equal(*(each.layers[0].mlp.gate_up(rows) for each in found))
