"""The arithmetic of a layer in compiled code, on the processors of an instance.

The slow references, with the legend: model/layers.py. Python does little between calls, and never
takes len of a tensor, which runs Python code: docs/decisions/0014.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from data_plane.attention.paged import Attention
from data_plane.model.attention_kinds.delta import DeltaWeights
from data_plane.model.attention_kinds.gqa import GqaConfig
from data_plane.model.attention_kinds.mla import LATENT_NORM_EPS, MlaConfig
from data_plane.model.config import ModelConfig
from data_plane.model.rope import RopeTable
from data_plane.model.weights import LayerWeights, LogitsWeights, MlpWeights
from data_plane.native.attention import NativeAttention
from data_plane.native.build import native_library
from data_plane.native.calls import LayerFields
from data_plane.native.delta import NativeDelta
from data_plane.native.experts import NativeExpertKernels
from data_plane.native.heads import heads_fields
from data_plane.native.packing import NativePacking, packed_address
from data_plane.native.processors import Processors


class NativeKernels(NativePacking, NativeExpertKernels, NativeDelta):
    """The compiled kernels of one dtype; a step.cpu_kernels.Kernels.

    Raises NativeUnavailable if this machine has none for the dtype.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        instructions: str = "",
        num_processors: int = 1,
        keeps_bf16: bool = False,
    ) -> None:
        """Load the kernels. instructions: amx, avx512 or avx2; if empty, the fastest here.

        keeps_bf16: weights stay bf16 where rows are fp32 (model.linear.Packing).
        """
        library, self.instructions = native_library(dtype == torch.bfloat16, instructions)
        processors = Processors(library, num_processors)
        NativePacking.__init__(self, library, dtype, processors, keeps_bf16)
        NativeExpertKernels.__init__(self, self._calls)
        NativeDelta.__init__(self, self._calls)
        # By the id of a layer. The layer is kept too, so that no other object can get its id.
        self._layers: dict[int, tuple[LayerWeights, Any]] = {}
        self._heads: dict[int, tuple[LayerWeights, Any]] = {}
        self.calls = self._calls
        self.attention_call = self._calls.attention

    def attention_rows(
        self,
        x_BX: Tensor,
        position_B: Tensor,
        layer: LayerWeights,
        rope: RopeTable,
        config: ModelConfig,
    ) -> tuple[Tensor, Tensor, Tensor]:
        kind, x_BX, rows = config.attention, x_BX.contiguous(), x_BX.shape[0]
        if isinstance(kind, GqaConfig):
            call, fields = self._calls.heads_rows, self._heads_of(layer, rope, config)
            wire_width, q_width = kind.hidden_size, kind.head_dim
        else:
            call, fields = self._calls.attention_rows, self._layer(layer, rope, config)
            wire_width, q_width = _latent(config).q_latent_dim, kind.kv_width
        wire_q_BC = x_BX.new_empty(rows, wire_width)
        kv_BW = x_BX.new_empty(rows, kind.kv_width)
        q_BHD = x_BX.new_empty(rows, kind.num_heads, q_width)
        call(
            fields,
            x_BX.data_ptr(),
            position_B.data_ptr(),
            rope.cos.data_ptr(),
            rope.sin.data_ptr(),
            rows,
            wire_q_BC.data_ptr(),
            kv_BW.data_ptr(),
            q_BHD.data_ptr(),
        )
        return wire_q_BC, kv_BW, q_BHD

    def attention_queries(
        self,
        wire_q_BC: Tensor,
        position_B: Tensor,
        layer: LayerWeights,
        rope: RopeTable,
        config: ModelConfig,
    ) -> Tensor:
        """Make queries [B, H, D]; the rope table must reach every position."""
        kind, wire_q_BC, rows = config.attention, wire_q_BC.contiguous(), wire_q_BC.shape[0]
        if isinstance(kind, GqaConfig):
            call, fields = self._calls.heads_queries, self._heads_of(layer, rope, config)
            q_width = kind.head_dim
        else:
            call, fields = self._calls.absorbed_q, self._layer(layer, rope, config)
            q_width = kind.kv_width
        q_BHD = wire_q_BC.new_empty(rows, kind.num_heads, q_width)
        call(
            fields,
            wire_q_BC.data_ptr(),
            position_B.data_ptr(),
            rope.cos.data_ptr(),
            rope.sin.data_ptr(),
            rows,
            q_BHD.data_ptr(),
        )
        return q_BHD

    def after_attention(
        self, x_BX: Tensor, o_BHV: Tensor, layer: LayerWeights, rope: RopeTable, config: ModelConfig
    ) -> tuple[Tensor, Tensor]:
        x_BX, o_BHV = x_BX.contiguous(), o_BHV.contiguous()
        sum_BX, normed_BX = torch.empty_like(x_BX), torch.empty_like(x_BX)
        self._calls.after_attention(
            self._layer(layer, rope, config),
            x_BX.data_ptr(),
            o_BHV.data_ptr(),
            x_BX.shape[0],
            sum_BX.data_ptr(),
            normed_BX.data_ptr(),
        )
        return sum_BX, normed_BX

    def append(self, slots_SW: Tensor, slot_B: Tensor, kv_BW: Tensor) -> None:
        kv_BW = kv_BW.contiguous()
        self._calls.append(slots_SW.data_ptr(), slot_B.data_ptr(), kv_BW.data_ptr(), *kv_BW.shape)

    def finish_attention(
        self, partial_BHO: Tensor, layer: LayerWeights, config: ModelConfig
    ) -> Tensor:
        if isinstance(config.attention, GqaConfig):
            return partial_BHO.to(self._dtype)
        partial_BHO = partial_BHO.to(self._dtype).contiguous()
        rows, heads, rank = partial_BHO.shape
        width = config.attention.value_dim
        o_BHV = partial_BHO.new_empty(rows, heads, width)
        self._calls.heads_linear(
            partial_BHO.data_ptr(),
            layer.attention.v_up.data_ptr(),
            rows,
            heads,
            width,
            rank,
            o_BHV.data_ptr(),
        )
        return o_BHV

    def gated_mlp(self, x_BX: Tensor, mlp: MlpWeights) -> Tensor:
        gate_up, down = packed_address(mlp.gate_up), packed_address(mlp.down)
        x_BX = x_BX.contiguous()
        out = torch.empty_like(x_BX)
        size, inner = mlp.down.shape
        self._calls.mlp(
            x_BX.data_ptr(), gate_up, down, x_BX.shape[0], size, inner, mlp.limit, out.data_ptr()
        )
        return out

    def logits(self, x_BX: Tensor, weights: LogitsWeights, config: ModelConfig) -> Tensor:
        """Score hidden rows: [B, vocabulary] fp32; a bf16 model's are not rounded to bf16."""
        x_BX, (rows, size) = x_BX.contiguous(), x_BX.shape
        out = torch.empty(rows, config.vocab_size)
        self._calls.logits(
            x_BX.data_ptr(),
            weights.final_norm.data_ptr(),
            weights.final_norm.dtype == torch.float32,
            config.norm_eps,
            packed_address(weights.lm_head),
            rows,
            config.vocab_size,
            size,
            out.data_ptr(),
        )
        return out

    def own_attention(self, config: ModelConfig) -> Attention | None:
        """Return the compiled attention; None if the model's widths are not multiples of 32."""
        kind = config.attention
        if isinstance(kind, GqaConfig):
            if kind.head_dim % 32:
                return None
            num_groups, width = kind.num_kv_heads, kind.head_dim
            return NativeAttention(self.attention_call, width, num_groups, num_groups * width)
        kind = _latent(config)
        if kind.kv_lora_rank % 32 or kind.kv_width % 32:
            return None
        return NativeAttention(self.attention_call, kind.kv_lora_rank)

    def forget(self, layer: LayerWeights) -> None:
        self._layers.pop(id(layer), None)
        self._heads.pop(id(layer), None)
        self._deltas.pop(id(layer.attention), None)
        if layer.moe is not None:
            self.forget_experts(layer.moe)

    def _heads_of(self, layer: LayerWeights, rope: RopeTable, config: ModelConfig) -> Any:
        known = self._heads.get(id(layer))
        if known is None:
            fields = heads_fields(layer, rope, config)
            known = self._heads[id(layer)] = layer, ctypes.pointer(fields)
        return known[1]

    def _layer(self, layer: LayerWeights, rope: RopeTable, config: ModelConfig) -> Any:
        known = self._layers.get(id(layer))
        if known is None:
            own = layer.attention
            kind = config.delta if isinstance(own, DeltaWeights) else config.attention
            assert kind is not None
            fields = LayerFields(
                input_norm=layer.input_norm.data_ptr(),
                o=packed_address(layer.o_proj),
                post_norm=layer.post_attention_norm.data_ptr(),
                hidden=config.hidden_size,
                heads=kind.num_heads,
                value=kind.value_dim,
                norm_eps=config.norm_eps,
                is_interleaved=rope.is_interleaved,
                norms_are_fp32=layer.input_norm.dtype == torch.float32,
            )
            if isinstance(kind, MlaConfig):
                fields.down, fields.q = packed_address(own.down_proj), packed_address(own.q_proj)
                fields.q_norm = own.q_norm.data_ptr() if own.q_norm is not None else None
                fields.kv_norm, fields.k_up = own.kv_norm.data_ptr(), own.k_up.data_ptr()
                fields.q_latent, fields.rank = kind.q_lora_rank or 0, kind.kv_lora_rank
                fields.rope, fields.nope = kind.rope_dim, kind.nope_dim
                fields.latent_eps = LATENT_NORM_EPS
            known = self._layers[id(layer)] = layer, ctypes.pointer(fields)
        return known[1]


def _latent(config: ModelConfig) -> MlaConfig:
    kind = config.attention
    assert isinstance(kind, MlaConfig), kind
    return kind
