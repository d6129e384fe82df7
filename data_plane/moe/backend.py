"""The choice of an instance's expert GEMM and dispatch, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import NamedTuple

import torch

from data_plane.model.config import ModelConfig
from data_plane.model.fp8_weight import Fp8DenseGemm
from data_plane.moe.gpu.grouped import Fp8GroupedGemm, GroupedGemm, GroupedMm
from data_plane.moe.mixture import MoeSchedule

_NO_GPU = "it needs NVIDIA GPUs, and this instance runs on the CPU"


class BackendChoice(NamedTuple):
    """A backend's name, and why; together a sentence for operators."""

    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.name}, {self.why}"


def expert_backend(
    name: str, device: torch.device, dtype: torch.dtype, expected_rows: int, max_rows: int
) -> tuple[GroupedGemm | None, str]:
    """Choose the experts' GEMM: (it, a sentence why).

    name: auto, loop (the GEMM None), grouped_mm, triton or deep_gemm. expected_rows: of an expert
    in a step of max_rows rows an instance. Raises ValueError naming the obstacle.
    """
    is_gpu = device.type == "cuda"
    if name in ("auto", "loop") and not is_gpu:
        why = (
            "as configured"
            if name == "loop"
            else "because this instance runs on the CPU, where its weights are packed"
        )
        return None, f"loop, {why}"
    if name == "auto":
        has_triton = find_spec("triton") is not None
        name = "triton" if has_triton else "grouped_mm"
        why = f"because triton is {'' if has_triton else 'not '}installed"
    else:
        why = "as configured"
    obstacle = _expert_obstacle(name, is_gpu, dtype)
    if obstacle:
        raise ValueError(f"expert_backend is {name}: {obstacle}; auto picks one that works")
    # Packages of the GPU extras are imported only where they run.
    gemm: GroupedGemm = GroupedMm()
    if name == "triton":
        from data_plane.moe.gpu.gemm import TritonGemm

        gemm = TritonGemm(expected_rows / max_rows)
    elif name == "deep_gemm":
        from data_plane.moe.gpu.deep_gemm import DeepGemm

        gemm = DeepGemm(expected_rows)
    return gemm, f"{name}, {why}"


def fp8_experts(model: ModelConfig, gemm: GroupedGemm, dtype: str) -> tuple[bool, str]:
    """Decide whether FP8 layers stay so, and say why.

    dtype: of other weights. Returns (False, "") for a checkpoint without FP8.
    """
    if model.fp8_block is None:
        return False, ""
    rows, columns = model.fp8_block
    stored = f"FP8 in blocks of {rows}x{columns}"
    if not isinstance(gemm, Fp8GroupedGemm):
        obstacle = "this expert_backend takes no FP8; triton and deep_gemm do"
    elif model.expert_size % rows:
        obstacle = (
            f"moe_intermediate_size is {model.expert_size}, so that gate and up would share blocks"
        )
    else:
        obstacle = gemm.fp8_obstacle((rows, columns))
    if obstacle:
        return False, f"{stored}, de-quantised to {dtype}, experts too: {obstacle}"
    dense = " and dense layers that deep_gemm takes" if isinstance(gemm, Fp8DenseGemm) else ""
    return True, f"{stored}; experts{dense} stay so, all else is de-quantised to {dtype}"


def _expert_obstacle(name: str, is_gpu: bool, dtype: torch.dtype) -> str:
    if name == "loop":
        return "" if not is_gpu else "it reads counts on the host, which no captured step can"
    if not is_gpu:
        return "it needs an NVIDIA GPU, and this instance runs on the CPU"
    package = {"triton": "triton", "deep_gemm": "deep_gemm"}.get(name)
    if package and find_spec(package) is None:
        return f"the package {package} is not installed"
    if name == "deep_gemm" and dtype != torch.bfloat16:
        return f"it takes bfloat16 rows, not {dtype}"
    return ""


def dispatch_backend(
    name: str,
    model: ModelConfig,
    fused_obstacle: str,
    obstacles: Mapping[str, Callable[[], str]],
) -> BackendChoice:
    """Choose one of DISPATCH_BACKENDS.

    fused_obstacle: why no MoE layer can be one call here, or empty. obstacles: the same of other
    backends by name; none on a CPU. Raises ValueError naming the obstacle.
    """
    if name == "exchange":
        return BackendChoice(name, "as configured")
    if model.has_shared_gate:
        fused_obstacle = "the model's shared expert has a gate of its own, which one call has not"
    if name == "fused" or (name == "auto" and not fused_obstacle):
        if fused_obstacle:
            raise ValueError(
                f"dispatch_backend is fused: {fused_obstacle}; exchange works everywhere"
            )
        why = "because kernels are native" if name == "auto" else "as configured"
        return BackendChoice("fused", f"{why}: a layer's mixture is one call")
    obstacle = obstacles.get("deep_ep" if name == "auto" else name, lambda: _NO_GPU)()
    if name == "auto":
        if obstacle:
            return BackendChoice("exchange", f"because not deep_ep: {obstacle}")
        return BackendChoice("deep_ep", "because it can serve here")
    if obstacle:
        raise ValueError(f"dispatch_backend is {name}: {obstacle}; exchange works everywhere")
    return BackendChoice(name, "as configured")


def moe_schedule(schedule: str, is_fused: bool, has_lanes: bool) -> MoeSchedule | None:
    """Return the order of work, one of MOE_SCHEDULES, in a fused MoE layer; None if not fused.

    has_lanes: another lane computes while rows are awaited. Raises ValueError for `arrival` if it
    is not fused.
    """
    if schedule == "arrival" and not is_fused:
        raise ValueError(
            "moe_schedule is arrival, which needs a fused mixture (dispatch_backend fused, native "
            "kernels); auto works everywhere"
        )
    if not is_fused:
        return None
    if schedule == "barrier":
        return MoeSchedule.BARRIER
    return MoeSchedule.ORDERED if has_lanes else MoeSchedule.ARRIVAL
