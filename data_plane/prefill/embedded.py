"""The prefill that ships with the service: the whole model in one process (3; prefill is external
by design).

Enters: prompts. Leaves: pages of KV as bytes, as every instance's ring takes them. Does not know:
tickets, rings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
import torch

from data_plane.attention.fp8_latent import quantise
from data_plane.model.config import ModelConfig
from data_plane.model.weights import Progress, load_weights, say_nothing, stored_shapes
from data_plane.prefill.pages import prefill_pages
from data_plane.startup.shared_parts import torch_dtype
from nanocp.config import Config
from nanocp.sampling import PromptLogprobs


class EmbeddedPrefill:
    """A prefill_runner.PrefillModel."""

    def __init__(self, config: Config, checkpoint: Path, progress: Progress = say_nothing) -> None:
        """Load every expert. Raises ValueError naming what is wrong with the checkpoint, or that it
        does not fit."""
        refuse_too_large(config, checkpoint)
        self._model = ModelConfig.from_folder(checkpoint)
        experts = range(self._model.num_experts)
        self._weights = load_weights(
            checkpoint, self._model, torch_dtype(config), experts, progress
        )
        self._is_fp8 = config.data_plane.kv_dtype == "fp8"
        self._chunk_tokens = config.prefill.chunk_tokens

    def pages(
        self,
        token_ids: Sequence[int],
        num_tokens: int,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> Iterator[tuple[int, np.ndarray]]:
        """See prefill_runner.PrefillModel: the work between two pages is at most one chunk."""
        for page, kv_LSD in prefill_pages(
            self._weights, self._model, token_ids, num_tokens, self._chunk_tokens, prompt_logprobs
        ):
            kept = quantise(kv_LSD, self._model.kv_lora_rank) if self._is_fp8 else kv_LSD
            yield page, kept.contiguous().view(torch.uint8).numpy()


def refuse_too_large(config: Config, checkpoint: Path) -> None:
    """Raise ValueError if the whole model does not fit the memory that is free: it would be killed
    half-way.

    Instances share the rest: each loads its own experts, and all of attention.
    """
    model = ModelConfig.from_folder(checkpoint)
    shapes = stored_shapes(model, range(model.num_experts)).values()
    needed = sum(math.prod(shape) for shape in shapes) * torch_dtype(config).itemsize
    available = psutil.virtual_memory().available
    if needed > available:
        raise ValueError(
            f"the embedded prefill holds the whole model in one process: {needed / 2**30:.1f} GiB in "
            f"{config.data_plane.dtype}, but {available / 2**30:.1f} GiB of memory are free; use --synthetic-kv, or a "
            "machine with more memory"
        )


def build_prefill(
    config: Config, checkpoint: Path, progress: Progress = say_nothing
) -> EmbeddedPrefill:
    """The factory that a MemberSpec names."""
    torch.set_num_threads(config.data_plane.threads_per_instance)
    return EmbeddedPrefill(config, checkpoint, progress)
