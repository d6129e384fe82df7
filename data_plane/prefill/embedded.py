"""The prefill that ships with the service: the whole model in one process.

Enters: prompts. Leaves: pages of KV as bytes, as every instance's ring takes them. Does not know:
checkpoints, tickets, rings. Prefill is external by design (paper, section 3): this one serves
prompts that one process can prefill.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from data_plane.attention.fp8_latent import quantise
from data_plane.model.config import ModelConfig
from data_plane.model.weights import ModelWeights
from data_plane.prefill.pages import prefill_pages
from nanocp.sampling import PromptLogprobs


class EmbeddedPrefill:
    """A member.prefill_runner.PrefillModel that runs in its member's own process."""

    def __init__(
        self, model: ModelConfig, weights: ModelWeights, chunk_tokens: int, is_fp8: bool
    ) -> None:
        """Keep what prompts are run with; `weights` must hold every expert.

        chunk_tokens: prompt tokens that are run at a time. is_fp8: pages are written in FP8
        (fp8_latent.py), else in the weights' dtype.
        """
        self._model, self._weights = model, weights
        self._chunk_tokens = chunk_tokens
        self._fp8_rank = model.attention.fp8_rank() if is_fp8 else None

    def pages(
        self,
        token_ids: Sequence[int],
        num_tokens: int,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (page, its bytes as uint8); the work between two pages is at most one chunk.

        The contract is that of prefill_runner.PrefillModel.pages.
        """
        for page, kv_LSW in prefill_pages(
            self._weights, self._model, token_ids, num_tokens, self._chunk_tokens, prompt_logprobs
        ):
            yield page, payload_of(kv_LSW, self._fp8_rank)


def payload_of(kv_LSW: Tensor, fp8_rank: int | None) -> np.ndarray:
    """The bytes of a page, or of some layers of it, as instances keep them: uint8.

    fp8_rank: the model's kv_lora_rank if they keep KV in FP8, else None.
    """
    kept = kv_LSW if fp8_rank is None else quantise(kv_LSW, fp8_rank)
    payload: np.ndarray = kept.contiguous().view(torch.uint8).numpy()
    return payload
