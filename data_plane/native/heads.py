"""Queries and KV of attention over K/V heads in compiled code.

Enters: rows, weights packed by packing.py. Leaves: rows. Does not know: attention itself, steps.

The slow references are those functions of model/layers.py that the compiled attention_rows and
attention_queries stand for; the legend of attention_kinds/gqa.py holds here.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from data_plane.model.attention_kinds.gqa import GqaConfig
from data_plane.model.config import ModelConfig
from data_plane.model.rope import RopeTable
from data_plane.model.weights import LayerWeights
from data_plane.native.calls import HeadsFields
from data_plane.native.packing import packed_address


class NativeHeads:
    """Makes queries, keys and values; the rope table must reach every position."""

    def __init__(self, calls: SimpleNamespace) -> None:
        self._calls = calls
        # By the id of a layer. The layer is kept too, so that no other object can get its id.
        self._heads: dict[int, tuple[LayerWeights, Any]] = {}

    def heads_rows(
        self,
        x_BX: Tensor,
        position_B: Tensor,
        layer: LayerWeights,
        rope: RopeTable,
        config: ModelConfig,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Normed rows [B, X], new KV [B, W] and queries [B, H, E]; see layers.attention_rows."""
        kind = config.attention
        assert isinstance(kind, GqaConfig)
        x_BX, rows = x_BX.contiguous(), x_BX.shape[0]
        normed_BX = x_BX.new_empty(x_BX.shape)
        kv_BW = x_BX.new_empty(rows, kind.kv_width)
        q_BHE = x_BX.new_empty(rows, kind.num_heads, kind.head_dim)
        self._calls.heads_rows(
            self._fields(layer, rope, config),
            x_BX.data_ptr(),
            position_B.data_ptr(),
            rope.cos.data_ptr(),
            rope.sin.data_ptr(),
            rows,
            normed_BX.data_ptr(),
            kv_BW.data_ptr(),
            q_BHE.data_ptr(),
        )
        return normed_BX, kv_BW, q_BHE

    def heads_queries(
        self,
        normed_BX: Tensor,
        position_B: Tensor,
        layer: LayerWeights,
        rope: RopeTable,
        config: ModelConfig,
    ) -> Tensor:
        """Queries [B, H, E] of normed rows; see layers.attention_queries."""
        kind = config.attention
        assert isinstance(kind, GqaConfig)
        normed_BX, rows = normed_BX.contiguous(), normed_BX.shape[0]
        q_BHE = normed_BX.new_empty(rows, kind.num_heads, kind.head_dim)
        self._calls.heads_queries(
            self._fields(layer, rope, config),
            normed_BX.data_ptr(),
            position_B.data_ptr(),
            rope.cos.data_ptr(),
            rope.sin.data_ptr(),
            rows,
            q_BHE.data_ptr(),
        )
        return q_BHE

    def _fields(self, layer: LayerWeights, rope: RopeTable, config: ModelConfig) -> Any:
        known = self._heads.get(id(layer))
        if known is None:
            kind, own = config.attention, layer.attention
            assert isinstance(kind, GqaConfig)
            optional = {
                name: None if getattr(own, name) is None else getattr(own, name).data_ptr()
                for name in ("q_bias", "kv_bias", "q_norm", "k_norm")
            }
            fields = HeadsFields(
                input_norm=layer.input_norm.data_ptr(),
                q=packed_address(own.q_proj),
                kv=packed_address(own.kv_proj),
                hidden=kind.hidden_size,
                heads=kind.num_heads,
                kv_heads=kind.num_kv_heads,
                head_dim=kind.head_dim,
                rope=kind.rope_dim,
                norm_eps=config.norm_eps,
                head_eps=kind.norm_eps,
                is_interleaved=rope.is_interleaved,
                norms_are_fp32=layer.input_norm.dtype == torch.float32,
                **optional,
            )
            known = self._heads[id(layer)] = layer, ctypes.pointer(fields)
        return known[1]
