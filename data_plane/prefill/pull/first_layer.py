"""KV of layer 0, recomputed: the proof that an engine's blocks hold this prompt, in this layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from data_plane.model.attention_kinds.mla import MlaConfig
from data_plane.model.config import ModelConfig
from data_plane.model.linear import TorchPacking
from data_plane.model.norm import rms_norm
from data_plane.model.rope import RopeTable
from data_plane.model.weights import Progress, WeightLoader, open_tensors


class FirstLayer:
    """The embedding and layer 0 up to its KV, which needs no other token than its own."""

    def __init__(
        self, checkpoint: Path, model: ModelConfig, dtype: torch.dtype, progress: Progress
    ) -> None:
        """Read these weights. Raises ValueError naming the checkpoint's fault."""
        first = replace(model, num_layers=1, num_mtp_layers=0)
        reader, shapes = open_tensors(checkpoint, first, range(0))
        loader = WeightLoader(reader, first, dtype, range(0), shapes, progress, TorchPacking())
        self._kind, self._norm_eps, self._dtype = first.attention, first.norm_eps, dtype
        self._embedding = loader.embedding()
        self._norm = loader.tensor("model.layers.0.input_layernorm.weight")
        self._attention = self._kind.load(loader, f"model.layers.0.{first.names.attention}")
        self._rope = RopeTable(first.rope, self._kind.rope_dim)
        kind, width = first.attention, first.attention.kv_width
        self.unmoved = slice(width // 2, width)
        """What positions do not change of a token's KV: the latent, or the values of heads."""
        if isinstance(kind, MlaConfig):
            self.unmoved = slice(kind.kv_lora_rank)
        num_unmoved = len(range(width)[self.unmoved])
        self._unmoved = torch.empty(model.vocab_size, num_unmoved, dtype=dtype)
        self._is_known = torch.zeros(model.vocab_size, dtype=torch.bool)

    @torch.inference_mode()
    def kv(self, token_ids: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Compute the KV of tokens at their positions, [tokens, width]."""
        x_TX = rms_norm(self._embedding[torch.tensor(token_ids)], self._norm, self._norm_eps)
        return self._kind.inputs(x_TX, torch.tensor(positions), self._attention, self._rope)[1]

    def unmoved_kv(self, token_ids: Sequence[int]) -> Tensor:
        """Return the part `unmoved` of tokens' KV, [tokens, width]; each id is computed once."""
        ids = torch.tensor(token_ids)
        if len(new := torch.unique(ids[~self._is_known[ids]])):
            self._unmoved[new] = self.kv(new.tolist(), [0] * len(new))[:, self.unmoved]
            self._is_known[new] = True
        return self._unmoved[ids]
