"""The layer's arithmetic in compiled code: the same calls as the torch functions, which are their slow references.

Enters: rows, weights packed by `linear` and `head_weight`. Leaves: rows. Does not know: exchange, steps, plans.

Every call is one thread's; legends are those of model/layers.py, moe/gate.py, moe/experts.py and attention/.
"""

from __future__ import annotations

import ctypes
import mmap
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
from data_plane.native.build import native_library

_ARENA_BYTES = 64 << 20
_ALIGNMENT = 64
_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "packed_elements": (_LONG, _LONG),
    "pack": (_POINTER, _LONG, _LONG, _POINTER),
    "linear": (_POINTER, _LONG, _POINTER, _LONG, _LONG, _LONG, _POINTER),
    "logits": (_POINTER, _LONG, _POINTER, _LONG, _LONG, _LONG, _POINTER),
    "rms_norm": (_POINTER, _POINTER, _POINTER, _LONG, _LONG, _FLOAT),
    "attention_inputs": (*(_POINTER,) * 6, *(_LONG,) * 4, _FLOAT, _INT, _POINTER, _POINTER),
    "absorb": (*(_POINTER,) * 5, *(_LONG,) * 5, _INT, _POINTER),
    "heads_linear": (_POINTER, _POINTER, *(_LONG,) * 4, _POINTER),
    "mlp": (*(_POINTER,) * 3, *(_LONG,) * 3, _POINTER),
    "experts": (*(_POINTER,) * 5, *(_LONG,) * 6, _POINTER),
    "gate": (*(_POINTER,) * 3, *(_LONG,) * 6, _INT, _INT, _FLOAT, _POINTER, _POINTER),
    "attention": (*(_POINTER,) * 3, _LONG, _POINTER, *(_LONG,) * 4, _FLOAT, _POINTER, _POINTER),
}


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
        (size_out, size_in), rows = self.shape, len(x)
        out = x.new_empty(rows, size_out)
        self._call(x.data_ptr(), x.stride(0), self.packed.data_ptr(), rows, size_out, size_in, out.data_ptr())
        return out


class NativeKernels:
    """See data_plane.kernels.Kernels. Raises NativeUnavailable where the machine has none for the dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._library = native_library(dtype == torch.bfloat16)
        self._dtype = dtype
        self._arenas = _Arenas()
        self._expert_addresses: dict[int, tuple[MoeWeights, Any, Any]] = {}
        """By id of a layer's experts: themselves, so that the id stays theirs, and where their weights are."""
        self._calls = _calls(self._library, dtype)
        self.attention_call = self._calls.attention
        """For NativeAttention."""

    # --- weights, packed on load ---

    def linear(self, weight: Tensor) -> NativeLinear:
        """Of a weight [out, in]."""
        size_out, size_in = weight.shape
        return NativeLinear(self._calls.linear, self._packed(weight[None], self._dtype), (size_out, size_in))

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

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See layers.rms_norm."""
        x = x.contiguous()
        out = torch.empty_like(x)
        self._calls.rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), len(x), x.shape[1], eps)
        return out

    def attention_inputs(
        self, x_BX: Tensor, position_B: Tensor, layer: LayerWeights, rope: RopeTable, config: ModelConfig
    ) -> tuple[Tensor, Tensor]:
        """See layers.attention_inputs. The table must reach every position."""
        down, has_q_lora = layer.down_proj(x_BX), layer.q_norm is not None
        rows, rank = len(down), config.kv_lora_rank
        size_q = down.shape[1] - config.latent_dim
        latent_BC, kv_BD = down.new_empty(rows, size_q), down.new_empty(rows, config.latent_dim)
        self._calls.attention_inputs(
            *(down.data_ptr(), layer.q_norm.data_ptr() if layer.q_norm is not None else None),
            *(layer.kv_norm.data_ptr(), position_B.data_ptr(), rope.cos.data_ptr(), rope.sin.data_ptr()),
            *(rows, size_q, rank, config.rope_dim, LATENT_NORM_EPS, rope.is_interleaved),
            *(latent_BC.data_ptr(), kv_BD.data_ptr()),
        )
        return latent_BC if has_q_lora else x_BX, kv_BD

    def absorbed_q(
        self, latent_BC: Tensor, position_B: Tensor, layer: LayerWeights, rope: RopeTable, config: ModelConfig
    ) -> Tensor:
        """See layers.absorbed_q. The table must reach every position."""
        q = layer.q_proj(latent_BC)
        q_BHD = q.new_empty(len(q), config.num_heads, config.latent_dim)
        self._calls.absorb(
            *(q.data_ptr(), layer.k_up.data_ptr(), position_B.data_ptr(), rope.cos.data_ptr(), rope.sin.data_ptr()),
            *(len(q), config.num_heads, config.nope_dim, config.rope_dim, config.kv_lora_rank),
            *(rope.is_interleaved, q_BHD.data_ptr()),
        )
        return q_BHD

    def up_project(self, partial_BHR: Tensor, layer: LayerWeights) -> Tensor:
        """See layers.up_project."""
        partial_BHR = partial_BHR.to(self._dtype).contiguous()
        rows, heads, rank = partial_BHR.shape
        width = layer.o_proj.shape[1] // heads
        o_BHV = partial_BHR.new_empty(rows, heads, width)
        self._calls.heads_linear(
            *(partial_BHR.data_ptr(), layer.v_up.data_ptr(), rows, heads, width, rank, o_BHV.data_ptr())
        )
        return o_BHV

    def gated_mlp(self, x_BX: Tensor, mlp: MlpWeights) -> Tensor:
        """See layers.gated_mlp."""
        gate_up, down, x_BX = _packed(mlp.gate_up), _packed(mlp.down), x_BX.contiguous()
        out = torch.empty_like(x_BX)
        size, inner = mlp.down.shape
        self._calls.mlp(x_BX.data_ptr(), gate_up, down, len(x_BX), size, inner, out.data_ptr())
        return out

    def logits(self, x_BX: Tensor, weights: ModelWeights, config: ModelConfig) -> Tensor:
        """See layers.logits; bf16 models' are not rounded to bf16."""
        normed_BX = self.rms_norm(x_BX, weights.final_norm, config.norm_eps)
        rows, size = normed_BX.shape
        out = torch.empty(rows, config.vocab_size)
        self._calls.logits(
            normed_BX.data_ptr(), size, _packed(weights.lm_head), rows, config.vocab_size, size, out.data_ptr()
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

    def experts_forward(self, x_TX: Tensor, expert_TK: Tensor, weight_TK: Tensor, moe: MoeWeights) -> Tensor:
        """See experts.experts_forward."""
        if not moe.mlps:
            return torch.zeros_like(x_TX)
        if id(moe) not in self._expert_addresses:
            addresses = ctypes.c_void_p * len(moe.mlps)
            gate_ups = addresses(*(_packed(mlp.gate_up) for mlp in moe.mlps))
            self._expert_addresses[id(moe)] = moe, gate_ups, addresses(*(_packed(mlp.down) for mlp in moe.mlps))
        _, gate_up, down = self._expert_addresses[id(moe)]
        x_TX, expert_TK, weight_TK = x_TX.contiguous(), expert_TK.contiguous(), weight_TK.contiguous()
        y_TX = torch.empty_like(x_TX)
        rows, size = x_TX.shape
        self._calls.experts(
            *(x_TX.data_ptr(), expert_TK.data_ptr(), weight_TK.data_ptr(), gate_up, down),
            *(rows, expert_TK.shape[1], moe.experts.start, len(moe.mlps), size, moe.mlps[0].down.shape[1]),
            y_TX.data_ptr(),
        )
        return y_TX

    def own_attention(self, config: ModelConfig) -> Attention | None:
        """See data_plane.kernels.Kernels."""
        takes = config.kv_lora_rank % 32 == 0 and config.latent_dim % 32 == 0
        return NativeAttention(self.attention_call, config.kv_lora_rank) if takes else None


class NativeAttention:
    """See attention.backend.Attention. Follows the page table instead of gathering; widths are multiples of 32."""

    def __init__(self, call: Any, rank: int) -> None:
        self._call = call
        self._rank = rank

    def plan(self, frame_AP: Tensor, length_A: Tensor) -> tuple[Tensor, Tensor]:
        """See attention.backend.Attention.plan."""
        return frame_AP.contiguous(), length_A.contiguous()

    def run(self, q_AHD: Tensor, pool_FSD: Tensor, plan: tuple[Tensor, Tensor], scale: float) -> tuple[Tensor, Tensor]:
        """See attention.backend.Attention.run."""
        frame_AP, length_A = plan
        q_AHD, (rows, heads, width) = q_AHD.contiguous(), q_AHD.shape
        out, lse = q_AHD.new_empty(rows, heads, self._rank), torch.empty(rows, heads)
        self._call(
            *(q_AHD.data_ptr(), pool_FSD.data_ptr(), frame_AP.data_ptr(), frame_AP.shape[1], length_A.data_ptr()),
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
    """Weights side by side in huge pages: reading them all at every step costs a sixth less (docs/log.md)."""

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
