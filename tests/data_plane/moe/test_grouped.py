"""Grouped experts: rows find their slots and come back, and every GEMM agrees with the reference.

DeepEP's exchange and the choice of backends are tested here too.
"""

import sys
from dataclasses import replace

import pytest
import torch

from data_plane.model.config import ModelConfig
from data_plane.model.fp8_weight import Fp8DenseGemm
from data_plane.moe import backend
from data_plane.moe.backend import dispatch_backend, expert_backend, moe_schedule
from data_plane.moe.gpu.deep_gemm import DeepGemm
from data_plane.moe.gpu.grouped import GroupedExperts, GroupedMm
from data_plane.moe.mixture import MoeSchedule
from data_plane.startup.instance import build_instance
from data_plane.startup.shared_parts import moe_backends
from harness.gpu_stand_ins.published_packages import deep_gemm
from harness.kernels.kernel_cases import ExpertCase, in_fp8, visited
from harness.kernels.slow_references import ReferenceGemm
from nanocp.config.data_plane import DataPlaneConfig
from nanocp.config.whole import Config


@pytest.mark.parametrize("gemm", [ReferenceGemm(), GroupedMm()], ids=["reference", "grouped_mm"])
def test_an_expert_in_a_slot_gives_way_to_another_and_weights_stay_where_they_are(gemm):
    generator = torch.Generator().manual_seed(0)
    gate_up_ENX, down_EXI = torch.randn(4, 32, 16, generator=generator), torch.randn(4, 16, 16)
    held = [0, 1, 2]
    experts = GroupedExperts(gemm, gate_up_ENX[held], down_EXI[held])
    before = experts.gate_up.data_ptr(), experts.down.data_ptr()
    experts.put(1, gate_up_ENX[3], down_EXI[3])
    held[1] = 3
    assert before == (experts.gate_up.data_ptr(), experts.down.data_ptr())
    anew = GroupedExperts(gemm, gate_up_ENX[held], down_EXI[held])
    rows = torch.randn(5, 16), torch.tensor([[0, 1], [1, 2], [3, 0], [2, 1], [3, 3]])
    weight_TK = torch.rand(5, 2)
    assert visited(experts, *rows, weight_TK).equal(visited(anew, *rows, weight_TK))


def test_an_expert_in_fp8_brings_its_scales():
    weight_ENX, down_EXI = torch.randn(2, 256, 128), torch.randn(2, 128, 128)
    stored = [in_fp8(weight, (128, 128)) for weight in (weight_ENX, down_EXI)]
    first, other = ([part._replace(values=part.values[i : i + 1], scale=part.scale[i : i + 1])
                     for part in stored] for i in (0, 1))  # fmt: skip
    experts = GroupedExperts(DeepGemm(1, deep_gemm), *first)
    experts.put(0, *(part._replace(values=part.values[0], scale=part.scale[0]) for part in other))
    for held, part in zip((experts.gate_up, experts.down), other, strict=True):
        assert held[0].equal(part.values) and held[1].equal(part.scale)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("gemm", [ReferenceGemm(), GroupedMm()], ids=["reference", "grouped_mm"])
@pytest.mark.parametrize("num_rows", [1, 20])
def test_grouped_experts_agree_with_one_row_and_one_expert_at_a_time(
    gemm, dtype, tolerance, num_rows
):
    case = ExpertCase(dtype, num_rows)
    case.check(case.run(gemm), tolerance)


def test_deep_gemm_is_called_as_published_and_within_the_error_of_fp8():
    case = ExpertCase(torch.bfloat16, hidden=128, size=128)
    y_TX = case.run(DeepGemm(8, deep_gemm))
    error = (y_TX.float() - case.expected).norm() / case.expected.norm()
    assert 0.001 < error < 0.08, error  # three roundings to four bits


def test_deep_gemm_reads_experts_that_are_in_fp8_as_they_are():
    """Rows are rounded to FP8; the weights are not rounded again."""
    case = ExpertCase(torch.bfloat16, hidden=256, size=128, fp8_block=(128, 128))
    gemm = DeepGemm(8, deep_gemm)
    for weight in case.weights:
        values, scale = gemm.prepare_fp8(weight)
        assert (
            values.data_ptr() == weight.values.data_ptr()
            and scale.data_ptr() == weight.scale.data_ptr()
        )
    error = (case.run(gemm).float() - case.expected).norm() / case.expected.norm()
    assert 0.001 < error < 0.05, error  # two roundings to four bits


def test_deep_gemm_refuses_widths_of_broken_blocks():
    with pytest.raises(ValueError, match="multiples of 128"):
        DeepGemm(8, deep_gemm).prepare(torch.zeros(1, 100, 128))


CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_experts_start_as_configured_and_early_only_in_a_fused_mixture():
    for schedule, alone, in_lanes in (
        ("auto", MoeSchedule.ARRIVAL, MoeSchedule.ORDERED),
        ("arrival", MoeSchedule.ARRIVAL, MoeSchedule.ORDERED),
        ("barrier", MoeSchedule.BARRIER, MoeSchedule.BARRIER),
    ):
        assert moe_schedule(schedule, is_fused=True, has_lanes=False) is alone
        assert moe_schedule(schedule, is_fused=True, has_lanes=True) is in_lanes
    for schedule in ("auto", "barrier"):
        assert moe_schedule(schedule, is_fused=False, has_lanes=False) is None
    with pytest.raises(ValueError, match="moe_schedule is arrival, which needs a fused mixture"):
        moe_schedule("arrival", is_fused=False, has_lanes=False)


def test_the_cpu_loops_over_its_experts_and_uses_the_exchange_and_says_why(tiny_checkpoint):
    model = ModelConfig.from_folder(tiny_checkpoint)
    assert expert_backend("auto", CPU, torch.float32, 8, 8)[0] is None
    assert "runs on the CPU" in expert_backend("auto", CPU, torch.float32, 8, 8)[1]
    obstacle = "it needs native kernels"
    by_default = str(dispatch_backend("auto", model, obstacle, {}))
    assert by_default.startswith("exchange, because not deep_ep: it needs NVIDIA GPUs")
    with pytest.raises(ValueError, match="dispatch_backend is deep_ep: it needs NVIDIA GPUs"):
        dispatch_backend("deep_ep", model, obstacle, {})
    with pytest.raises(ValueError, match=f"dispatch_backend is fused: {obstacle}"):
        dispatch_backend("fused", model, obstacle, {})
    fused = "fused, because kernels are native: a layer's mixture is one call"
    assert str(dispatch_backend("auto", model, "", {})) == fused
    assert str(dispatch_backend("exchange", model, "", {})) == "exchange, as configured"
    by_package = str(dispatch_backend("auto", model, obstacle, {"deep_ep": str}))
    assert by_package == "deep_ep, because it can serve here"
    for name in ("grouped_mm", "triton", "deep_gemm"):
        with pytest.raises(ValueError, match=f"expert_backend is {name}: it needs an NVIDIA GPU"):
            expert_backend(name, CPU, torch.float32, 8, 8)


def test_a_gpu_takes_triton_where_it_is_and_never_loops(monkeypatch):
    with pytest.raises(ValueError, match="expert_backend is loop: it reads counts on the host"):
        expert_backend("loop", GPU, torch.bfloat16, 8, 8)
    assert isinstance(expert_backend("grouped_mm", GPU, torch.bfloat16, 8, 8)[0], GroupedMm)
    with pytest.raises(ValueError, match="deep_gemm is not installed"):
        expert_backend("deep_gemm", GPU, torch.bfloat16, 8, 8)
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    gemm, why = expert_backend("auto", GPU, torch.bfloat16, 8, 8)
    assert isinstance(gemm, GroupedMm) and why == "grouped_mm, because triton is not installed"


def test_a_dense_model_has_deep_gemm_for_its_layers_if_configured(tiny_checkpoint, monkeypatch):
    monkeypatch.setattr(backend, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "deep_gemm", deep_gemm)
    model = replace(ModelConfig.from_folder(tiny_checkpoint), num_experts=0)
    for name in ("deep_gemm", "grouped_mm"):
        data_plane = DataPlaneConfig(device="cuda", dtype="bfloat16", expert_backend=name)
        chosen = moe_backends(Config(data_plane=data_plane), model, range(0), GPU, "")
        assert isinstance(chosen.gemm, Fp8DenseGemm) == (name == "deep_gemm")


def test_start_up_refuses_what_the_cpu_cannot_have(tiny_checkpoint):
    for name, backend_name in (
        ("attention", "flashmla"),
        ("expert", "triton"),
        ("dispatch", "deep_ep"),
        ("dispatch", "nixl_ep"),
    ):
        config = Config(data_plane=DataPlaneConfig(**{f"{name}_backend": backend_name}))
        with pytest.raises(ValueError, match=f"{name}_backend is {backend_name}: it needs"):
            build_instance(config, 0, "refused", tiny_checkpoint)
