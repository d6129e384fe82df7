"""Paged attention in compiled code.

The slow reference, with the legend, is attention/torch_paged.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from data_plane.attention.paged import Attention


class NativeAttention(Attention):
    """Attention that follows the page table instead of gathering.

    Widths of queries and values are multiples of 32.
    """

    def __init__(self, call: Any, out_width: int, num_groups: int = 1, value_at: int = 0) -> None:
        """call: NativeKernels.attention_call. out_width: of a head's values.

        num_groups: K/V heads, 1 for latent KV. value_at: offset of the first group's values.
        """
        self._call, self._out_width = call, out_width
        self._num_groups, self._value_at = num_groups, value_at

    def plan(
        self, frame_AP: Tensor, length_A: Tensor, num_queries: int = 1
    ) -> tuple[Tensor, Tensor]:
        return frame_AP.contiguous(), length_A.contiguous()

    def run(
        self, q_AHD: Tensor, pool_FSW: Tensor, plan: tuple[Tensor, Tensor], scale: float,
        needs_lse: bool = True,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        frame_AP, length_A = plan
        q_AHD, (rows, heads, width) = q_AHD.contiguous(), q_AHD.shape
        out, lse = q_AHD.new_empty(rows, heads, self._out_width), torch.empty(rows, heads)
        self._call(
            q_AHD.data_ptr(),
            pool_FSW.data_ptr(),
            frame_AP.data_ptr(),
            frame_AP.shape[1],
            length_A.data_ptr(),
            rows,
            heads // self._num_groups,
            width,
            self._out_width,
            self._num_groups,
            pool_FSW.shape[2],
            self._value_at,
            scale,
            out.data_ptr(),
            lse.data_ptr(),
        )
        return out, lse
