"""What computes on a CPU, for an instance, a stage and a profile alike."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from data_plane.attention.backend import AttentionSite, attention_backend
from data_plane.attention.paged import Attention
from data_plane.model.config import ModelConfig
from data_plane.model.weights import stores_bf16
from data_plane.startup.shared_parts import torch_dtype
from data_plane.step.cpu_kernels import Kernels, cpu_kernels
from nanocp.config.data_plane import DataPlaneConfig


class CpuParts(NamedTuple):
    """Kernels and attention of this CPU."""

    kernels: Kernels
    attention: Attention
    sentences: list[str]


def cpu_parts(data_plane: DataPlaneConfig, model: ModelConfig, checkpoint: Path) -> CpuParts:
    """Choose them. Raises ValueError naming what is configured and cannot run here."""
    dtype = torch_dtype(data_plane)
    kernels, kernels_choice = kernels_for(data_plane, model, checkpoint)
    site = AttentionSite.of(model, torch.device("cpu"), dtype, kv_dtype=dtype)
    own = kernels.own_attention(model)
    attention, choice = attention_backend(data_plane.attention_backend, site, own)
    sentences = [f"kernels: {kernels_choice}", f"attention: {choice}"]
    if kernels.keeps_bf16:
        sentences.append("weights: bf16, as the checkpoint has them; arithmetic in float32")
    return CpuParts(kernels, attention, sentences)


def kernels_for(own: DataPlaneConfig, model: ModelConfig, checkpoint: Path) -> tuple[Kernels, str]:
    """Choose the kernels for a checkpoint's weights; see step.cpu_kernels.cpu_kernels."""
    dtype = torch_dtype(own)
    keeps_bf16 = dtype == torch.float32 and stores_bf16(checkpoint, model)
    return cpu_kernels(own.cpu_kernels, dtype, own.threads_per_instance, keeps_bf16)
