"""Fields of a layer with K/V heads for the compiled kernels."""

from __future__ import annotations

import torch

from data_plane.model.attention_kinds.gqa import GqaConfig
from data_plane.model.config import ModelConfig
from data_plane.model.rope import RopeTable
from data_plane.model.weights import LayerWeights
from data_plane.native.calls import HeadsFields
from data_plane.native.packing import packed_address


def heads_fields(layer: LayerWeights, rope: RopeTable, config: ModelConfig) -> HeadsFields:
    """Make the fields of struct Heads; they are valid as long as the layer lives."""
    kind, own = config.attention, layer.attention
    assert isinstance(kind, GqaConfig)
    optional = {
        name: None if getattr(own, name) is None else getattr(own, name).data_ptr()
        for name in ("q_bias", "kv_bias", "q_norm", "k_norm")
    }
    return HeadsFields(
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
