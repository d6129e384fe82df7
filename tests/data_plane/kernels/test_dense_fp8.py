"""Dense layers in FP8: rows are rounded in one launch, and steps over such layers are near."""

import math
from dataclasses import replace

import pytest
import torch

from data_plane.kernels.fp8 import quantised_rows
from data_plane.model.make_checkpoint import make_checkpoint
from data_plane.moe.gpu.deep_gemm import DeepGemm, DenseLayer, _quantise
from data_plane.reference.oracle import Oracle
from data_plane.startup.memory_need import memory_need
from harness.exact.fp8_twin import make_twin
from harness.gpu import gpu_cluster
from harness.gpu.gpu_cluster import GpuCluster
from harness.gpu_stand_ins.published_packages import deep_gemm
from harness.kernels.kernel_cases import dense_in_fp8, poisoned
from nanocp.config.data_plane import DataPlaneConfig

BLOCK = (128, 128)


def drawn(num_rows, width, seed=0):
    """Draw rows of very different sizes: one block is 0, one so small that its scale is 1e-10."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, width, generator=generator)
    size = 10 ** (6 * torch.randn(num_rows, width // 128, 1, generator=generator))
    size[0, 0] = 0
    size[-1, -1] = 1e-12
    return (x.view(num_rows, -1, 128) * size).flatten(1).bfloat16()


@pytest.mark.parametrize("width", [128, 1152, 2048])
@pytest.mark.parametrize("num_rows", [1, 3, 64])
def test_rows_are_rounded_bit_by_bit_as_the_reference_rounds(num_rows, width):
    x = drawn(num_rows, width)
    with poisoned():
        values, scale = quantised_rows(x)
    expected, expected_scale = _quantise(x.float().view(num_rows, -1, 128), (2,))
    assert values.view(torch.uint8).equal(expected.view(num_rows, width).view(torch.uint8))
    assert scale.equal(expected_scale[..., 0])


@pytest.mark.parametrize("shape", [(1,), (3,), (64,), (2, 5), (0,)], ids=str)
@pytest.mark.parametrize("columns", [128, 328])
def test_a_layer_is_within_the_error_of_fp8(shape, columns):
    """The last block of a weight need not be whole; DeepGEMM is called as published."""
    x = torch.randn(*shape, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight = dense_in_fp8((columns, 256))
    layer = DeepGemm(8, deep_gemm).dense(weight)
    assert isinstance(layer, DenseLayer) and layer.shape == (columns, 256)
    with poisoned():
        y = layer(x)
    expected = x.float() @ weight.dequantised().T
    assert y.shape == expected.shape and y.dtype == torch.bfloat16
    if x.numel():
        assert 0.001 < (y.float() - expected).norm() / expected.norm() < 0.09


def test_rows_that_do_not_lie_side_by_side_are_taken():
    x = torch.randn(6, 512).bfloat16()
    one, other = (quantised_rows(rows) for rows in (x[::2, :128], x[::2, :128].contiguous()))
    assert one[0].float().equal(other[0].float()) and one[1].equal(other[1])


@pytest.mark.parametrize(
    ("shape", "block"), [((128, 192), BLOCK), ((132, 256), BLOCK), ((128, 256), (64, 128))], ids=str
)
def test_widths_and_blocks_that_deep_gemm_does_not_take_make_no_layer(shape, block):
    assert DeepGemm(8, deep_gemm).dense(dense_in_fp8(shape, block)) is None


WIDE = {
    "num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 8,
    "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 32, "intermediate_size": 256, "moe_intermediate_size": 128, "n_routed_experts": 4,
    "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "vocab_size": 320,
}  # fmt: skip
"""Every dense layer is made of whole blocks, but for the last rows of kv_a.

A token visits every expert: rounding changes no choice.
"""


def test_steps_over_dense_layers_in_fp8_are_near_the_reference(tmp_path, monkeypatch):
    make_checkpoint(tmp_path / "fp8", "tiny", dtype=torch.float8_e4m3fn, overrides=WIDE)
    oracle = Oracle(make_twin(tmp_path / "fp8", tmp_path / "twin"))
    monkeypatch.setattr(gpu_cluster, "TritonGemm", lambda: DeepGemm(4, deep_gemm))
    data_plane = DataPlaneConfig(device="cuda", dtype="bfloat16", expert_backend="deep_gemm")
    cluster = GpuCluster(tmp_path / "fp8", num_parts=2, data_plane=data_plane)
    dense, sparse = cluster.instances[0].step._weights.layers
    layers = [dense.mlp.gate_up, dense.mlp.down, sparse.moe.shared.gate_up, sparse.moe.shared.down]
    for layer in (dense, sparse):
        layers += [layer.attention.down_proj, layer.attention.q_proj, layer.o_proj]
        assert layer.attention.k_up.dtype == layer.attention.v_up.dtype == torch.bfloat16
    assert all(isinstance(layer, DenseLayer) for layer in layers)
    need, without = (
        memory_need(cluster.model, cluster.cluster, each, has_lanes=False, stores_bf16=False)
        for each in (data_plane, replace(data_plane, expert_backend="triton"))
    )
    num_elements = sum(math.prod(layer.shape) for layer in layers)
    assert without.other_weights - need.other_weights == num_elements
    assert without.experts == need.experts
    cluster.add_drawn((5, 70), (1, 2))
    with poisoned():
        for _ in range(2):
            cluster.step()
    for request in cluster.requests:
        expected = oracle.logits(request.ids[: request.num_prompt], request.output)
        found = torch.stack(request.logits)
        assert (found - expected).norm() / expected.norm() < 0.09
