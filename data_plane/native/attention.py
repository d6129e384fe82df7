"""Paged attention in compiled code, for one thread.

Enters: queries, the frames of a layer, page tables. Leaves: partial outputs and LSE. Does not know:
requests, layers. The slow reference is attention/torch_paged.py; legends are those of attention/.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class NativeAttention:
    """Attention that follows the page table instead of gathering; see attention.backend.Attention.

    The widths of latent KV and of its values must be multiples of 32.
    """

    def __init__(self, call: Any, rank: int) -> None:
        """call: NativeKernels.attention_call. rank: the model's kv_lora_rank."""
        self._call = call
        self._rank = rank

    def plan(self, frame_AP: Tensor, length_A: Tensor) -> tuple[Tensor, Tensor]:
        """The page tables and lengths of a step, contiguous; see attention.backend.Attention."""
        return frame_AP.contiguous(), length_A.contiguous()

    def run(
        self, q_AHD: Tensor, pool_FSD: Tensor, plan: tuple[Tensor, Tensor], scale: float
    ) -> tuple[Tensor, Tensor]:
        """(partial output [A, H, R], LSE [A, H]) of the rows; see attention.backend.Attention."""
        frame_AP, length_A = plan
        q_AHD, (rows, heads, width) = q_AHD.contiguous(), q_AHD.shape
        out, lse = q_AHD.new_empty(rows, heads, self._rank), torch.empty(rows, heads)
        self._call(
            q_AHD.data_ptr(),
            pool_FSD.data_ptr(),
            frame_AP.data_ptr(),
            frame_AP.shape[1],
            length_A.data_ptr(),
            rows,
            heads,
            width,
            self._rank,
            scale,
            out.data_ptr(),
            lse.data_ptr(),
        )
        return out, lse
