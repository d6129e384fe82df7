"""FlashAttention 3's decode over paged K/V heads as an attention backend.

Public signature: tests/harness/gpu_stand_ins/published_packages.py. Unlike ours: keys and values
are two views of a frame; the lse is [A, H, 1], undefined for a row without KV.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from data_plane.attention.paged import Attention
from nanocp.values.plan import PAGE_SIZE


class FlashAttentionHeads(Attention):
    """The attention backend `flash_attention`."""

    def __init__(self, num_kv_heads: int, head_dim: int, package: Any = None) -> None:
        """package: flash_attn_interface; a test passes a stand-in."""
        self._package = package or import_module("flash_attn_interface")
        self._num_kv_heads, self._head_dim = num_kv_heads, head_dim

    def plan(
        self, frame_AP: Tensor, length_A: Tensor, num_queries: int = 1
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the page table, the lengths, and the flags of empty rows [A, 1].

        Lengths decide about empty rows: an overflow of the lse must not pass for one.
        """
        page_P = torch.arange(frame_AP.shape[1], device=frame_AP.device)
        frame_AP = frame_AP.masked_fill(page_P * PAGE_SIZE >= length_A[:, None], 0)
        return frame_AP, length_A, length_A[:, None] == 0

    def run(
        self, q_AHE: Tensor, pool_FSW: Tensor, plan: tuple[Tensor, Tensor, Tensor], scale: float,
        needs_lse: bool = True,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        frame_AP, length_A, is_empty_A1 = plan
        kv = pool_FSW.view(*pool_FSW.shape[:2], 2, self._num_kv_heads, self._head_dim)
        out, lse, *_ = self._package.flash_attn_with_kvcache(
            q_AHE[:, None],
            kv[:, :, 0],
            kv[:, :, 1],
            cache_seqlens=length_A,
            page_table=frame_AP,
            softmax_scale=scale,
            causal=False,
            return_softmax_lse=True,
        )
        if needs_lse:
            lse[..., 0].masked_fill_(is_empty_A1, float("-inf"))
        return out[:, 0], lse[..., 0]
