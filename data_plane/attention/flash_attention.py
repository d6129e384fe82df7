"""FlashAttention 3's decode over paged K/V heads as an attention backend.

Enters: queries, a layer's frames, a page table and lengths on the device. Leaves: (partial_o, lse)
by our conventions. Does not know: how it computes.

tests/harness/gpu_stand_ins/published_packages.py keeps its public signature, with the source. It
differs from ours in three ways. It takes keys and values apart, which are two views of a frame. The
lse is [A, H, 1], and that of a row without KV is not said. It reads no length on the host, so a
call can be captured in a graph.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from data_plane.attention.paged import Attention
from nanocp.values.plan import PAGE_SIZE


class FlashAttentionHeads(Attention):
    """The attention backend `flash_attention`; see paged.Attention."""

    def __init__(self, num_kv_heads: int, head_dim: int, package: Any = None) -> None:
        """package: flash_attn_interface; a test passes a stand-in."""
        self._package = package or import_module("flash_attn_interface")
        self._num_kv_heads, self._head_dim = num_kv_heads, head_dim

    def plan(
        self, frame_AP: Tensor, length_A: Tensor, num_queries: int = 1
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Plan a step: its page table, lengths, and which rows [A, 1] are empty.

        Entries after a row's pages become 0. The kernel loads several pages at once, and nothing
        promises that it looks up only those that have tokens. A row is empty by its length, not by
        its lse: an overflow must not pass for an empty row.
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
