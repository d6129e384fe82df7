"""Latent KV in FP8, in the layout of FlashMLA's FP8 cache (flash_mla_interface.py at 9241ae3).

A token is R values in e4m3, NUM_SCALES fp32 scales, each for R / NUM_SCALES values, then the
rotated key in bf16; 656 bytes at 512 + 64. Legend: R kv_lora_rank, P rope, W bytes of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from data_plane.model.sizes import NUM_SCALES

_FP8 = torch.float8_e4m3fn
_FP8_MAX = torch.finfo(_FP8).max


def quantise(kv: Tensor, rank: int) -> Tensor:
    """Pack latent KV [..., R + P] of any float dtype into [..., W] uint8."""
    grouped = kv[..., :rank].float().reshape(*kv.shape[:-1], NUM_SCALES, -1)
    # The bound keeps a group of zeros from dividing by 0; its scale may be anything.
    scale = (grouped.abs().amax(dim=-1) / _FP8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    values = (grouped / scale[..., None]).to(_FP8).flatten(-2)
    rope = kv[..., rank:].to(torch.bfloat16).contiguous()
    return torch.cat(
        (values.view(torch.uint8), scale.view(torch.uint8), rope.view(torch.uint8)), dim=-1
    )


def dequantise(packed: Tensor, rank: int) -> Tensor:
    """Unpack latent KV [..., W] uint8 into [..., R + P] fp32."""
    values, scale, rope = views(packed, rank)
    grouped = values.float().reshape(*scale.shape, -1) * scale[..., None]
    return torch.cat((grouped.flatten(-2), rope.float()), dim=-1)


def views(packed: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """View packed KV: (values [..., R] e4m3, scales [..., NUM_SCALES] fp32, key [..., P] bf16)."""
    scales_end = rank + 4 * NUM_SCALES
    values = packed.view(_FP8)[..., :rank]
    scales = packed.view(torch.float32)[..., rank // 4 : scales_end // 4]
    return values, scales, packed.view(torch.bfloat16)[..., scales_end // 2 :]
