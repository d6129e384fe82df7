"""Weights in the layout of the compiled kernels, side by side in huge pages."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from data_plane.kv.huge_pages import huge_pages
from data_plane.native.calls import calls_of
from data_plane.native.processors import Processors

_ARENA_BYTES = 64 << 20
_ALIGNMENT = 64


class NativeLinear:
    """A linear layer, x [rows, in] -> x W^T [rows, out], with the kernels' layout of W."""

    __slots__ = ("_call", "packed", "shape")

    def __init__(self, call: Any, packed: Tensor, shape: tuple[int, int]) -> None:
        self._call = call
        self.packed = packed
        """[bytes] uint8: W in the kernels' layout."""
        self.shape = shape
        """(out, in) of W."""

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


def packed_address(layer: Any) -> int:
    """The address of a NativeLinear's packed weight."""
    address: int = layer.packed.data_ptr()
    return address


class NativePacking:
    """Packs weights for the kernels of one dtype; a model.linear.Packing."""

    keeps_fp8 = False
    """The kernels have no FP8 arithmetic."""
    keeps_heads = False

    def __init__(
        self, library: ctypes.CDLL, dtype: torch.dtype, processors: Processors, keeps_bf16: bool
    ) -> None:
        """dtype: of rows. keeps_bf16: pack weights of bf16 where rows are fp32."""
        self._dtype = dtype
        self.keeps_bf16 = keeps_bf16 and dtype == torch.float32
        """For all matrices but gates'."""
        self._weight_dtype = torch.bfloat16 if keeps_bf16 else dtype
        self.processors = processors
        self._calls = calls_of(library, dtype, self._weight_dtype, processors.address)
        self._fp32_calls = calls_of(library, torch.float32, torch.float32, processors.address)
        self._arenas = _Arenas()

    def linear(self, weight: Tensor) -> NativeLinear:
        """Pack a weight [out, in] of a linear layer."""
        size_out, size_in = weight.shape
        packed = self._packed(weight[None], self._weight_dtype, self._calls)
        return NativeLinear(self._calls.linear, packed, (size_out, size_in))

    def head_weight(self, weight_HKN: Tensor) -> Tensor:
        """Pack a weight [heads, in, out] of every head: [bytes] uint8."""
        return self._packed(weight_HKN.transpose(1, 2), self._weight_dtype, self._calls)

    def gate_weight(self, weight_EX: Tensor) -> Tensor:
        """Pack a gate's weight [experts, hidden] in fp32, the gate's dtype: [bytes] uint8."""
        return self._packed(weight_EX[None], torch.float32, self._fp32_calls)

    def _packed(self, weight_HNK: Tensor, dtype: torch.dtype, calls: Any) -> Tensor:
        num_heads, size_out, size_in = weight_HNK.shape
        elements = calls.packed_elements(size_out, size_in)
        packed = self._arenas.empty(num_heads * elements * dtype.itemsize)
        for head, weight_NK in enumerate(weight_HNK):
            plain = weight_NK.to(dtype).contiguous()
            address = packed.data_ptr() + head * elements * dtype.itemsize
            calls.pack(plain.data_ptr(), size_out, size_in, address)
        return packed


class _Arenas:
    """Memory of huge pages for weights: reading them takes a sixth less time (docs/log.md)."""

    def __init__(self) -> None:
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, num_bytes: int) -> Tensor:
        if self._used + num_bytes > len(self._arena):
            memory = huge_pages(max(num_bytes, _ARENA_BYTES))
            self._arena, self._used = torch.from_numpy(memory), 0
        part = self._arena[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return part
