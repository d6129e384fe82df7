"""The layer's arithmetic in compiled code: the same calls as the torch functions, which are their
slow references.

Enters: rows, weights packed by `linear` and `head_weight`. Leaves: rows. Does not know: exchange,
steps, plans.

Every call is one thread's; legends are those of model/layers.py, moe/gate.py, experts.py and
rows.py, and attention/. What stands between two calls is short, and asks for no len of a tensor
(which is Python): docs/decisions/0014.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_plane.attention.backend import Attention
from data_plane.model.config import ModelConfig
from data_plane.model.layers import LATENT_NORM_EPS
from data_plane.model.rope import RopeTable
from data_plane.model.weights import LayerWeights, MlpWeights, ModelWeights, MoeWeights
from data_plane.moe.rows import Region
from data_plane.native.build import native_library

_ARENA_BYTES = 64 << 20
_ALIGNMENT = 64
_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
_NOWHERE = (None,) * 4
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "packed_elements": (_LONG, _LONG),
    "pack": (_POINTER, _LONG, _LONG, _POINTER),
    "linear": (_POINTER, _LONG, _POINTER, _LONG, _LONG, _LONG, _POINTER),
    "logits": (_POINTER, _POINTER, _FLOAT, _POINTER, _LONG, _LONG, _LONG, _POINTER),
    "attention_rows": (*(_POINTER,) * 5, _LONG, *(_POINTER,) * 3),
    "absorbed_q": (*(_POINTER,) * 5, _LONG, _POINTER),
    "after_attention": (*(_POINTER,) * 3, _LONG, _POINTER, _POINTER),
    "append": (*(_POINTER,) * 3, _LONG, _LONG),
    "heads_linear": (_POINTER, _POINTER, *(_LONG,) * 4, _POINTER),
    "mlp": (*(_POINTER,) * 3, *(_LONG,) * 3, _POINTER),
    "visit_experts": (
        *(_POINTER,) * 4,
        *(_LONG,) * 3,
        *(_POINTER,) * 4,
        *(_LONG,) * 4,
        *(_POINTER,) * 2,
    ),
    "gate": (*(_POINTER,) * 3, *(_LONG,) * 6, _INT, _INT, _FLOAT, _POINTER, _POINTER),
    "pack_rows": (*(_POINTER,) * 4, *(_LONG,) * 5, *(_POINTER,) * 3),
    "combine_sums": (*(_POINTER,) * 6, *(_LONG,) * 3, _POINTER),
    "attention": (*(_POINTER,) * 3, _LONG, _POINTER, *(_LONG,) * 4, _FLOAT, _POINTER, _POINTER),
}


class _Layer(ctypes.Structure):
    """As kernels.cpp has it."""

    _fields_ = [
        *(
            (name, _POINTER)
            for name in ("input_norm", "down", "q_norm", "kv_norm", "q", "k_up", "o", "post_norm")
        ),
        *(
            (name, _LONG)
            for name in ("hidden", "q_latent", "rank", "rope", "heads", "nope", "value")
        ),
        *(("norm_eps", _FLOAT), ("latent_eps", _FLOAT), ("is_interleaved", _INT)),
    ]


class NativeLinear:
    """x [rows, in] -> x W^T [rows, out]: model.linear.Linear with the kernels' own layout."""

    __slots__ = ("_call", "packed", "shape")

    def __init__(self, call: Any, packed: Tensor, shape: tuple[int, int]) -> None:
        self._call = call
        self.packed = packed
        self.shape = shape
        """(out, in)."""

    def __call__(self, x: Tensor) -> Tensor:
        x = x if x.stride(-1) == 1 else x.contiguous()
        (size_out, size_in), rows = self.shape, x.shape[0]
        out = x.new_empty(rows, size_out)
        self._call(
            x.data_ptr(),
            x.stride(0),
            self.packed.data_ptr(),
            rows,
            size_out,
            size_in,
            out.data_ptr(),
        )
        return out


class NativeKernels:
    """See data_plane.step.cpu_kernels.Kernels. Raises NativeUnavailable where the machine has none
    for the dtype."""

    keeps_fp8_experts = False

    def __init__(self, dtype: torch.dtype) -> None:
        self._library = native_library(dtype == torch.bfloat16)
        self._dtype = dtype
        self._arenas = _Arenas()
        # By id, beside what has it, so that the id stays its own: addresses that are the same in
        # every step.
        self._experts: dict[int, tuple[MoeWeights, tuple[Any, Any, int]]] = {}
        self._layers: dict[int, tuple[LayerWeights, Any]] = {}
        self._known_regions: dict[int, tuple[Region, tuple[int | None, ...]]] = {}
        self._calls = _calls(self._library, dtype)
        self.attention_call = self._calls.attention
        """For NativeAttention."""

    # --- weights, packed on load ---

    def linear(self, weight: Tensor) -> NativeLinear:
        """Of a weight [out, in]."""
        size_out, size_in = weight.shape
        return NativeLinear(
            self._calls.linear, self._packed(weight[None], self._dtype), (size_out, size_in)
        )

    def head_weight(self, weight_HKN: Tensor) -> Tensor:
        """A weight of every head, packed: [bytes] uint8."""
        return self._packed(weight_HKN.transpose(1, 2), self._dtype)

    def gate_weight(self, weight_EX: Tensor) -> Tensor:
        """The gate's, which computes in fp32: packed, [bytes] uint8."""
        return self._packed(weight_EX[None], torch.float32)

    def _packed(self, weight_HNK: Tensor, dtype: torch.dtype) -> Tensor:
        num_heads, size_out, size_in = weight_HNK.shape
        calls = self._calls if dtype == self._dtype else _calls(self._library, dtype)
        elements = calls.packed_elements(size_out, size_in)
        packed = self._arenas.empty(num_heads * elements * dtype.itemsize)
        for head, weight_NK in enumerate(weight_HNK):
            plain = weight_NK.to(dtype).contiguous()
            address = packed.data_ptr() + head * elements * dtype.itemsize
            calls.pack(plain.data_ptr(), size_out, size_in, address)
        return packed

    # --- a layer ---

    def attention_rows(
        self,
        x_BX: Tensor,
        position_B: Tensor,
        layer: LayerWeights,
        rope: RopeTable,
        config: ModelConfig,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See layers.attention_rows. The table must reach every position."""
        x_BX, rows = x_BX.contiguous(), x_BX.shape[0]
        latent_BC, kv_BD = (
            x_BX.new_empty(rows, config.q_latent_dim),
            x_BX.new_empty(rows, config.latent_dim),
        )
        q_BHD = x_BX.new_empty(rows, config.num_heads, config.latent_dim)
        self._calls.attention_rows(
            *(self._layer(layer, rope, config), x_BX.data_ptr(), position_B.data_ptr()),
            *(rope.cos.data_ptr(), rope.sin.data_ptr(), rows),
            *(latent_BC.data_ptr(), kv_BD.data_ptr(), q_BHD.data_ptr()),
        )
        return latent_BC, kv_BD, q_BHD

    def absorbed_q(
        self,
        latent_BC: Tensor,
        position_B: Tensor,
        layer: LayerWeights,
        rope: RopeTable,
        config: ModelConfig,
    ) -> Tensor:
        """See layers.absorbed_q. The table must reach every position."""
        latent_BC, rows = latent_BC.contiguous(), latent_BC.shape[0]
        q_BHD = latent_BC.new_empty(rows, config.num_heads, config.latent_dim)
        self._calls.absorbed_q(
            *(self._layer(layer, rope, config), latent_BC.data_ptr(), position_B.data_ptr()),
            *(rope.cos.data_ptr(), rope.sin.data_ptr(), rows, q_BHD.data_ptr()),
        )
        return q_BHD

    def after_attention(
        self, x_BX: Tensor, o_BHV: Tensor, layer: LayerWeights, rope: RopeTable, config: ModelConfig
    ) -> tuple[Tensor, Tensor]:
        """See layers.after_attention."""
        x_BX, o_BHV = x_BX.contiguous(), o_BHV.contiguous()
        sum_BX, normed_BX = torch.empty_like(x_BX), torch.empty_like(x_BX)
        self._calls.after_attention(
            *(self._layer(layer, rope, config), x_BX.data_ptr(), o_BHV.data_ptr()),
            *(x_BX.shape[0], sum_BX.data_ptr(), normed_BX.data_ptr()),
        )
        return sum_BX, normed_BX

    def append(self, slots_SD: Tensor, slot_B: Tensor, kv_BD: Tensor) -> None:
        """See layers.append."""
        kv_BD = kv_BD.contiguous()
        self._calls.append(slots_SD.data_ptr(), slot_B.data_ptr(), kv_BD.data_ptr(), *kv_BD.shape)

    def _layer(self, layer: LayerWeights, rope: RopeTable, config: ModelConfig) -> Any:
        known = self._layers.get(id(layer))
        if known is None:
            fields = _Layer(
                *(layer.input_norm.data_ptr(), _packed(layer.down_proj)),
                layer.q_norm.data_ptr() if layer.q_norm is not None else None,
                *(
                    layer.kv_norm.data_ptr(),
                    _packed(layer.q_proj),
                    layer.k_up.data_ptr(),
                    _packed(layer.o_proj),
                ),
                *(
                    layer.post_attention_norm.data_ptr(),
                    config.hidden_size,
                    config.q_lora_rank or 0,
                ),
                *(
                    config.kv_lora_rank,
                    config.rope_dim,
                    config.num_heads,
                    config.nope_dim,
                    config.v_dim,
                ),
                *(config.norm_eps, LATENT_NORM_EPS, rope.is_interleaved),
            )
            known = self._layers[id(layer)] = layer, ctypes.pointer(fields)
        return known[1]

    def up_project(self, partial_BHR: Tensor, layer: LayerWeights) -> Tensor:
        """See layers.up_project."""
        partial_BHR = partial_BHR.to(self._dtype).contiguous()
        rows, heads, rank = partial_BHR.shape
        width = layer.o_proj.shape[1] // heads
        o_BHV = partial_BHR.new_empty(rows, heads, width)
        self._calls.heads_linear(
            *(
                partial_BHR.data_ptr(),
                layer.v_up.data_ptr(),
                rows,
                heads,
                width,
                rank,
                o_BHV.data_ptr(),
            )
        )
        return o_BHV

    def gated_mlp(self, x_BX: Tensor, mlp: MlpWeights) -> Tensor:
        """See layers.gated_mlp."""
        gate_up, down, x_BX = _packed(mlp.gate_up), _packed(mlp.down), x_BX.contiguous()
        out = torch.empty_like(x_BX)
        size, inner = mlp.down.shape
        self._calls.mlp(x_BX.data_ptr(), gate_up, down, x_BX.shape[0], size, inner, out.data_ptr())
        return out

    def logits(self, x_BX: Tensor, weights: ModelWeights, config: ModelConfig) -> Tensor:
        """See layers.logits; bf16 models' are not rounded to bf16."""
        x_BX, (rows, size) = x_BX.contiguous(), x_BX.shape
        out = torch.empty(rows, config.vocab_size)
        self._calls.logits(
            *(
                x_BX.data_ptr(),
                weights.final_norm.data_ptr(),
                config.norm_eps,
                _packed(weights.lm_head),
            ),
            *(rows, config.vocab_size, size, out.data_ptr()),
        )
        return out

    # --- experts ---

    def gate(self, x_BX: Tensor, moe: MoeWeights, config: ModelConfig) -> tuple[Tensor, Tensor]:
        """See gate.gate."""
        x_BX = x_BX.contiguous()
        rows, size = x_BX.shape
        expert_BK = torch.empty(rows, config.num_experts_per_token, dtype=torch.int64)
        weight_BK = torch.empty(rows, config.num_experts_per_token)
        bias = None if moe.gate_bias is None else moe.gate_bias.data_ptr()
        self._calls.gate(
            *(x_BX.data_ptr(), moe.gate.data_ptr(), bias, rows, size, config.num_experts),
            *(config.num_groups, config.num_groups_per_token, config.num_experts_per_token),
            *(config.softmax_gate, config.weights_normalised, config.routed_scale),
            *(expert_BK.data_ptr(), weight_BK.data_ptr()),
        )
        return expert_BK, weight_BK

    def visit_experts(
        self,
        x_BX: Tensor,
        expert_BK: Tensor,
        weight_BK: Tensor,
        own: Tensor,
        arrived: Sequence[Region],
        answers: Sequence[Region],
        moe: MoeWeights,
    ) -> tuple[Tensor, list[int]]:
        """See experts.visit_experts. Rows are read where they are, and sums written where they go."""
        own = own.contiguous()
        x_BX, expert_BK, weight_BK = (
            x_BX.contiguous(),
            expert_BK.contiguous(),
            weight_BK.contiguous(),
        )
        num_own, size, counts = own.shape[0], x_BX.shape[1], (_LONG * len(arrived))()
        own_sum = x_BX.new_empty(num_own, size)
        gate_up, down, inner = self._addresses_of_experts(moe)
        self._calls.visit_experts(
            *(x_BX.data_ptr(), expert_BK.data_ptr(), weight_BK.data_ptr(), own.data_ptr()),
            *(
                num_own,
                expert_BK.shape[1],
                len(arrived),
                self._regions(arrived),
                self._regions(answers),
            ),
            *(
                gate_up,
                down,
                moe.experts.start,
                len(moe.mlps),
                size,
                inner,
                own_sum.data_ptr(),
                counts,
            ),
        )
        return own_sum, list(counts)

    def _addresses_of_experts(self, moe: MoeWeights) -> tuple[Any, Any, int]:
        """Of their two weights, and the width between them."""
        known = self._experts.get(id(moe))
        if known is None:
            array = _POINTER * len(moe.mlps)
            gate_up, down = (
                array(*(_packed(mlp.gate_up) for mlp in moe.mlps)),
                array(*(_packed(mlp.down) for mlp in moe.mlps)),
            )
            inner = moe.mlps[0].down.shape[1] if moe.mlps else 0
            known = self._experts[id(moe)] = moe, (gate_up, down, inner)
        return known[1]

    # --- rows on their way to experts and back ---

    def pack_rows(
        self,
        x_BX: Tensor,
        expert_BK: Tensor,
        weight_BK: Tensor,
        live_B: Tensor,
        experts_each: int,
        regions: Sequence[Region | None],
    ) -> tuple[Tensor, list[int]]:
        """See rows.pack_rows."""
        x_BX, expert_BK, weight_BK = (
            x_BX.contiguous(),
            expert_BK.contiguous(),
            weight_BK.contiguous(),
        )
        (rows, size), num_regions = x_BX.shape, len(regions)
        rows_NB, counts = torch.empty(num_regions, rows, dtype=torch.int64), (_LONG * num_regions)()
        self._calls.pack_rows(
            *(x_BX.data_ptr(), expert_BK.data_ptr(), weight_BK.data_ptr(), live_B.data_ptr()),
            *(rows, expert_BK.shape[1], size, experts_each, num_regions),
            *(self._regions(regions), rows_NB.data_ptr(), counts),
        )
        return rows_NB, list(counts)

    def combine_sums(
        self,
        x_BX: Tensor,
        shared_BX: Tensor | None,
        own_sum: Tensor,
        rows_NB: Tensor,
        counts: Sequence[int],
        regions: Sequence[Region | None],
    ) -> Tensor:
        """See rows.combine_sums; a bf16 sum is rounded once."""
        (num_regions, rows), size = rows_NB.shape, own_sum.shape[1]
        x_BX = x_BX.contiguous()
        out_BX = torch.empty_like(x_BX)
        self._calls.combine_sums(
            *(
                x_BX.data_ptr(),
                None if shared_BX is None else shared_BX.data_ptr(),
                own_sum.data_ptr(),
            ),
            *(self._regions(regions), rows_NB.data_ptr(), (_LONG * num_regions)(*counts)),
            *(num_regions, rows, size, out_BX.data_ptr()),
        )
        return out_BX

    def _regions(self, regions: Sequence[Region | None]) -> Any:
        """Their addresses, as rows.h has them."""
        addresses: list[int | None] = []
        for region in regions:
            addresses += _NOWHERE if region is None else self._region(region)
        return (_POINTER * len(addresses))(*addresses)

    def _region(self, region: Region) -> tuple[int | None, ...]:
        known = self._known_regions.get(id(region))
        if known is None:
            fields = ("count", "expert", "weight", "hidden")
            addresses = tuple(
                region[name].data_ptr() if name in region else None for name in fields
            )
            known = self._known_regions[id(region)] = region, addresses
        return known[1]

    def own_attention(self, config: ModelConfig) -> Attention | None:
        """See data_plane.step.cpu_kernels.Kernels."""
        takes = config.kv_lora_rank % 32 == 0 and config.latent_dim % 32 == 0
        return NativeAttention(self.attention_call, config.kv_lora_rank) if takes else None


class NativeAttention:
    """See attention.backend.Attention. Follows the page table instead of gathering; widths are
    multiples of 32."""

    def __init__(self, call: Any, rank: int) -> None:
        self._call = call
        self._rank = rank

    def plan(self, frame_AP: Tensor, length_A: Tensor) -> tuple[Tensor, Tensor]:
        """See attention.backend.Attention.plan."""
        return frame_AP.contiguous(), length_A.contiguous()

    def run(
        self, q_AHD: Tensor, pool_FSD: Tensor, plan: tuple[Tensor, Tensor], scale: float
    ) -> tuple[Tensor, Tensor]:
        """See attention.backend.Attention.run."""
        frame_AP, length_A = plan
        q_AHD, (rows, heads, width) = q_AHD.contiguous(), q_AHD.shape
        out, lse = q_AHD.new_empty(rows, heads, self._rank), torch.empty(rows, heads)
        self._call(
            *(
                q_AHD.data_ptr(),
                pool_FSD.data_ptr(),
                frame_AP.data_ptr(),
                frame_AP.shape[1],
                length_A.data_ptr(),
            ),
            *(rows, heads, width, self._rank, scale, out.data_ptr(), lse.data_ptr()),
        )
        return out, lse


def _calls(library: ctypes.CDLL, dtype: torch.dtype) -> SimpleNamespace:
    """The functions of one dtype, by name."""
    calls = SimpleNamespace()
    for name, arguments in _SIGNATURES.items():
        function = library[f"nanocp_{name}_{'bf16' if dtype == torch.bfloat16 else 'f32'}"]
        function.argtypes = arguments
        function.restype = _LONG if name == "packed_elements" else None
        setattr(calls, name, function)
    return calls


def _packed(layer: Any) -> int:
    address: int = layer.packed.data_ptr()
    return address


class _Arenas:
    """Weights side by side in huge pages: reading them all at every step costs a sixth less
    (docs/log.md)."""

    def __init__(self) -> None:
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8, aligned to a cache line."""
        if self._used + num_bytes > len(self._arena):
            self._arena, self._used = _huge_pages(max(num_bytes, _ARENA_BYTES)), 0
        part = self._arena[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return part


def _huge_pages(num_bytes: int) -> Tensor:
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(memory, np.uint8))
