"""Start-up of the embedded prefill: from a checkpoint folder to a model that makes pages.

Enters: Config, checkpoint folder. Leaves: an EmbeddedPrefill with every expert. Does not know: what
starts it, gRPC, Ray.
"""

from __future__ import annotations

import math
from pathlib import Path

import psutil
import torch

from data_plane.model.config import ModelConfig
from data_plane.model.weights import Progress, load_weights, say_nothing, stored_shapes
from data_plane.prefill.embedded import EmbeddedPrefill
from data_plane.startup.shared_parts import torch_dtype
from nanocp.config import Config


def build_prefill(
    config: Config, checkpoint: Path, progress: Progress = say_nothing
) -> EmbeddedPrefill:
    """Load the whole model, every expert included; a MemberSpec names this factory.

    progress: see model.weights.Progress. Raises ValueError naming what is wrong with the
    checkpoint, or that it does not fit this machine's free memory.
    """
    torch.set_num_threads(config.data_plane.threads_per_instance)
    model, dtype = ModelConfig.from_folder(checkpoint), torch_dtype(config)
    _refuse_too_large(config, model, dtype)
    weights = load_weights(checkpoint, model, dtype, range(model.num_experts), progress)
    is_fp8 = config.data_plane.kv_dtype == "fp8"
    return EmbeddedPrefill(model, weights, config.prefill.chunk_tokens, is_fp8)


def _refuse_too_large(config: Config, model: ModelConfig, dtype: torch.dtype) -> None:
    """Raise ValueError if the model does not fit: the system would kill the process half-way.

    It is compared with the memory that is free now. Instances share the rest: each loads its own
    experts, and all of attention.
    """
    shapes = stored_shapes(model, range(model.num_experts)).values()
    needed = sum(math.prod(shape) for shape in shapes) * dtype.itemsize
    available = psutil.virtual_memory().available
    if needed > available:
        raise ValueError(
            "the embedded prefill holds the whole model in one process: "
            f"{needed / 2**30:.1f} GiB in {config.data_plane.dtype}, but {available / 2**30:.1f} "
            "GiB of memory are free; use --synthetic-kv, or a machine with more memory"
        )
