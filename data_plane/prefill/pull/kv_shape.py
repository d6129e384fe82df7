"""The KV of the model, and how an engine may keep it: regions, and orders within a block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from data_plane.model.attention_kinds.gqa import GqaConfig
from data_plane.model.config import ModelConfig
from data_plane.prefill.connector import vllm_layout
from data_plane.prefill.pull.side_channel import EngineMemory

_ORDERS = ("vec", "amx", "HNC", "NHC")
"""Orders of K/V heads in a block: those of vLLM's kernels for the CPU, head-major, token-major."""
_TILE = 16


class KvShape(NamedTuple):
    """KV of the model, as pages need it."""

    model: ModelConfig
    dtype: torch.dtype
    fp8_rank: int | None
    """kv_lora_rank if instances keep KV in FP8."""

    @property
    def width(self) -> int:
        """Numbers of a token's KV in one layer."""
        return self.model.attention.kv_width

    def check(self, memory: EngineMemory) -> list[int]:
        """Return the regions of the model's layers in order, one of an MTP layer behind them.

        Raises ValueError naming the field that does not fit.
        """
        num_regions, width = len(memory.kv_caches_base_addr), self.width
        num_bytes = memory.block_size * width * self.dtype.itemsize
        names = memory.region_names or [f"layers.{region}" for region in range(num_regions)]
        numbers = [next((int(p) for p in name.split(".") if p.isdigit()), -1) for name in names]
        order = sorted(range(len(numbers)), key=numbers.__getitem__)
        model, kinds = self.model, set(memory.region_mem_types or ["VRAM"])
        for field, found, must, is_right in (
            ("dcp_size", memory.dcp_size, "1", memory.dcp_size == 1),
            ("pcp_size", memory.pcp_size, "1", memory.pcp_size == 1),
            ("ssm_sizes", memory.ssm_sizes, "(0, 0): no states", not any(memory.ssm_sizes)),
            ("region_group_ids", memory.region_group_ids, "one group of blocks",
             len(set(memory.region_group_ids or [0])) == 1),
            ("region_mem_types", memory.region_mem_types, "DRAM alone or VRAM alone",
             len(kinds) == 1 and kinds <= {"DRAM", "VRAM"}),
            ("region_names", names, f"layers from 0 to {model.num_layers - 1} or more, each once",
             sorted(numbers) == list(range(num_regions)) and num_regions >= model.num_layers),
            ("block_lens", memory.block_lens, f"{num_bytes} each, for {memory.block_size} tokens "
             f"of {width} numbers in {self.dtype} (--kv-cache-dtype auto)",
             memory.block_lens == [num_bytes] * num_regions),
            ("block_strides", memory.block_strides, f"{num_bytes} or more for each region",
             len(memory.block_strides) == num_regions and min(memory.block_strides) >= num_bytes),
        ):  # fmt: skip
            if not is_right:
                raise ValueError(f"{field} of the engine's handshake: {found}; it must be {must}")
        return order[: model.num_kept_layers]

    def views(self, raw: Tensor, size: int, order: str) -> tuple[Tensor, ...]:
        """Return a layer's parts of raw blocks [blocks, numbers], as PagedKv takes them."""
        kind = self.model.attention
        if not isinstance(kind, GqaConfig):
            return (raw.view(len(raw), size, -1),)
        if order == "NHC":
            kv = raw.view(len(raw), size, kind.num_kv_heads, -1).transpose(1, 2)
        else:
            kv = raw.view(len(raw), kind.num_kv_heads, size, -1)
        kernel = order if order.islower() else None
        return vllm_layout.heads("layer 0", kv, kind.num_kv_heads, kind.head_dim, kernel)

    def orders(self, size: int) -> Sequence[str]:
        """Return the orders of a block's numbers that are possible; latent KV has one."""
        kind = self.model.attention
        if not isinstance(kind, GqaConfig):
            return ("",)
        fits_tiles = size % _TILE == 0 and kind.head_dim % _TILE == 0
        return [order for order in _ORDERS if order != "amx" or fits_tiles]
