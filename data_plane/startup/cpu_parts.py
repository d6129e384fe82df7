"""What computes on a CPU, for an instance, a stage and a profile alike.

Enters: Config, the model. Leaves: kernels and attention, and a sentence for each choice. Does not
know: weights, frames, what they compute for.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from data_plane.attention.backend import Attention, AttentionSite, attention_backend
from data_plane.model.config import ModelConfig
from data_plane.startup.shared_parts import torch_dtype
from data_plane.step.cpu_kernels import Kernels, cpu_kernels
from nanocp.config import Config


class CpuParts(NamedTuple):
    """Kernels and attention of this CPU."""

    kernels: Kernels
    attention: Attention
    sentences: list[str]
    """For an operator: both choices, each with its reason."""


def cpu_parts(config: Config, model: ModelConfig) -> CpuParts:
    """Choose them. Raises ValueError naming what is configured and cannot run here."""
    data_plane, dtype = config.data_plane, torch_dtype(config)
    kernels, kernels_choice = cpu_kernels(
        data_plane.cpu_kernels, dtype, data_plane.threads_per_instance
    )
    site = AttentionSite.of(model, torch.device("cpu"), dtype, kv_dtype=dtype)
    own = kernels.own_attention(model)
    attention, choice = attention_backend(data_plane.attention_backend, site, own)
    return CpuParts(kernels, attention, [f"kernels: {kernels_choice}", f"attention: {choice}"])
