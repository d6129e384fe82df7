"""Paged attention in compiled code.

Enters: queries, the frames of a layer, page tables. Leaves: partial outputs and LSE. Does not know:
requests, layers. The slow reference is attention/torch_paged.py; legends are those of attention/.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class NativeAttention:
    """Attention that follows the page table instead of gathering; see attention.paged.Attention.

    The widths of queries and of values must be multiples of 32.
    """

    def __init__(self, call: Any, out_width: int, num_groups: int = 1, value_at: int = 0) -> None:
        """Choose how a token's KV is read.

        call: NativeKernels.attention_call. out_width: of a head's values. num_groups: K/V heads,
        each read by as many heads; latent KV is one that all heads read. value_at: where the values
        of the first group begin.
        """
        self._call, self._out_width = call, out_width
        self._num_groups, self._value_at = num_groups, value_at

    def plan(
        self, frame_AP: Tensor, length_A: Tensor, num_queries: int = 1
    ) -> tuple[Tensor, Tensor]:
        """The page tables and lengths of a step, contiguous; see attention.paged.Attention."""
        return frame_AP.contiguous(), length_A.contiguous()

    def run(
        self, q_AHD: Tensor, pool_FSW: Tensor, plan: tuple[Tensor, Tensor], scale: float,
        needs_lse: bool = True,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """(partial output [A, H, O], LSE [A, H]) of the rows; see attention.paged.Attention."""
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
