"""Weights that stay bf16 where rows are fp32: results equal, bit by bit, those of widened weights.

At last, which checkpoints' weights stay so.
"""

import pytest
import torch
from safetensors.torch import load_file, save_file

from data_plane.model.config import ModelConfig
from data_plane.model.weights import load_weights, stores_bf16
from data_plane.native.kernels import NativeKernels
from data_plane.startup.cpu_parts import cpu_parts
from harness.kernels.mixture_cases import MixtureCase
from harness.kernels.native_cases import native
from nanocp.config.data_plane import DataPlaneConfig
from nanocp.config.whole import Config

SETS = ("avx512", "avx2")
ROWS = (0, 1, 2, 7, 12, 33)


def kept_and_widened(instructions):
    """Load kernels of fp32 rows that keep weights in bf16, and those that widen them."""
    widened = native((torch.float32, instructions))
    return NativeKernels(torch.float32, instructions, keeps_bf16=True), widened


def randn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def assert_equal(values, expected):
    for value, wanted in zip(values, expected, strict=True):
        assert value.dtype == torch.float32 and torch.equal(value, wanted)


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("shape", [(512, 256), (96, 33), (1, 7), (65, 64), (119, 31), (130, 2)])
def test_linear(instructions, shape):
    weight = randn(*shape).bfloat16()
    kept, widened = (kernels.linear(weight) for kernels in kept_and_widened(instructions))
    pairs = (shape[1] + 1) // 2
    assert len(kept.packed) * shape[1] == len(widened.packed) * pairs
    for num_rows in range(34):
        x = randn(num_rows, 2 * shape[1])
        # Rows side by side, and rows that are a part of wider ones.
        for rows in (x[:, : shape[1]].contiguous(), x[:, shape[1] :]):
            assert_equal([kept(rows)], [widened(rows)])


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("preset", ["tiny", "tiny-qwen2", "tiny-glm4-moe", "tiny-qwen3"])
def test_layers(models, preset, instructions):
    """Latent KV, biases, norms, half of a head rotated, tied embeddings, shared experts."""
    path, results = models(f"{preset}, in bf16").path, []
    config = ModelConfig.from_folder(path)
    kind = config.attention
    for kernels in kept_and_widened(instructions):
        weights = load_weights(path, config, torch.float32, range(2), packing=kernels)
        assert weights.embedding.dtype == (torch.bfloat16 if kernels.keeps_bf16 else torch.float32)
        assert weights.final_norm.dtype == torch.float32
        weights.rope.reach(6000)
        results.append([])
        for num_rows in ROWS:
            x_BX, position_B = randn(num_rows, config.hidden_size), torch.arange(num_rows) * 179
            o_BHV = randn(num_rows, kind.num_heads, kind.value_dim)
            for layer in weights.layers[-2:]:
                rows = kernels.attention_rows(x_BX, position_B, layer, weights.rope, config)
                queries = kernels.attention_queries(
                    rows[0], position_B, layer, weights.rope, config
                )
                _, _, width = rows[2].shape
                rank = getattr(kind, "kv_lora_rank", width)
                partial = rows[2][..., :rank].contiguous()
                results[-1] += [
                    *rows,
                    queries,
                    kernels.finish_attention(partial, layer, config),
                    *kernels.after_attention(x_BX, o_BHV, layer, weights.rope, config),
                ]
                mlps = [layer.mlp] if layer.mlp else [*layer.moe.mlps, layer.moe.shared]
                results[-1] += [kernels.gated_mlp(x_BX, mlp) for mlp in mlps if mlp]
                if layer.moe:
                    results[-1].append(kernels.gate(x_BX, layer.moe, config)[1])
            results[-1].append(kernels.logits(x_BX, weights, config))
    assert_equal(*results)


@pytest.mark.parametrize("instructions", SETS)
def test_mixtures(tiny_checkpoint, instructions):
    """In parts and in one call, on whole blocks and on cut ones."""
    kept_and_widened(instructions)
    config, form = ModelConfig.from_folder(tiny_checkpoint), (torch.float32, instructions)
    for shape in ({}, {"hidden_size": 41, "expert_size": 25}):
        kept, widened = (
            MixtureCase(config, form, 2, seed=5, num_epochs=3, keeps_bf16=keeps, **shape)
            for keeps in (True, False)
        )
        expected = widened.run(widened.in_parts)
        for outs in (kept.run(kept.in_parts), kept.run(kept.in_one_call(2, 0))):
            for ours, theirs in zip(outs, expected, strict=True):
                assert_equal(ours, theirs)


def keeps(folder, dtype="float32", kernels="auto"):
    """Whether an instance on this checkpoint keeps weights in bf16, and says so."""
    config = Config(data_plane=DataPlaneConfig(dtype=dtype, cpu_kernels=kernels))
    parts = cpu_parts(config.data_plane, ModelConfig.from_folder(folder), folder)
    assert parts.kernels.keeps_bf16 == any("weights: bf16" in each for each in parts.sentences)
    return parts.kernels.keeps_bf16


def test_what_stays_bf16(models):
    native((torch.float32, ""))
    folder = models("tiny, in bf16").path
    assert keeps(folder) and not keeps(folder, "bfloat16") and not keeps(folder, kernels="torch")
    assert not keeps(models("tiny").path) and not keeps(models("tiny, in FP8").path)


@pytest.mark.parametrize(("name", "is_kept"), [
    ("model.layers.1.mlp.experts.15.down_proj.weight", False),
    ("model.layers.1.mlp.gate.weight", True),
    ("model.norm.weight", True),
])  # fmt: skip
def test_one_matrix_in_fp32_widens_all_but_norms_and_gates_may_be(models, tmp_path, name, is_kept):
    folder = models("tiny, in bf16").path
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors[name].float() + 1e-6
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert stores_bf16(tmp_path, ModelConfig.from_folder(tmp_path)) == is_kept
