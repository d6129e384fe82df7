"""Rotary embedding, plain or stretched, from a table that grows with the positions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from data_plane.model.rope_config import Llama3Config, RopeConfig


class RopeTable:
    """Rotates vectors, by tables `cos` and `sin` [positions so far, dim / 2] fp32."""

    def __init__(self, config: RopeConfig, dim: int) -> None:
        """dim: width of the rotated vectors."""
        self.is_interleaved = config.interleaved
        self._scale = 1.0 if config.yarn is None else config.yarn.attention_factor
        self._frequency = _frequencies(config, dim)
        self.cos = torch.empty(0, dim // 2)
        self.sin = torch.empty(0, dim // 2)

    def rotate(self, x: Tensor, position_B: Tensor) -> Tensor:
        """Rotate vectors to their positions, in the layout of the checkpoint (docs/decisions/0019).

        x: [B, dim] or [B, heads, dim]; position_B: [B] int64. Returns x's shape and dtype.
        """
        # On a GPU the host must not ask how far: `place` has made the table reach every position.
        if len(position_B) and position_B.device.type == "cpu":
            self.reach(int(position_B.max()))
        cos, sin = self.cos[position_B], self.sin[position_B]
        if x.dim() == 3:
            cos, sin = cos[:, None], sin[:, None]
        if self.is_interleaved:
            first, second = x[..., 0::2].float(), x[..., 1::2].float()
        else:
            first, second = (half.float() for half in x.chunk(2, dim=-1))
        turned = (first * cos - second * sin, second * cos + first * sin)
        if self.is_interleaved:
            return torch.stack(turned, dim=-1).flatten(-2).to(x.dtype)
        return torch.cat(turned, dim=-1).to(x.dtype)

    def reach(self, position: int) -> None:
        """Extend the table to the position."""
        if position < len(self.cos):
            return
        angle = (
            torch.arange(1 << position.bit_length(), dtype=torch.float32)[:, None] * self._frequency
        )
        self.cos, self.sin = angle.cos() * self._scale, angle.sin() * self._scale

    def place(self, device: torch.device, max_len: int) -> None:
        """Extend the table to max_len, and move it to the device for good."""
        self.reach(max_len - 1)
        self.cos, self.sin = self.cos.to(device), self.sin.to(device)


def _frequencies(config: RopeConfig, dim: int) -> Tensor:
    exponent = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    wavelength: Tensor = config.theta**exponent
    plain: Tensor = 1.0 / wavelength
    if config.is_off:
        return torch.zeros_like(plain)
    if config.llama3 is not None:
        return _llama3(plain, config.llama3)
    if config.yarn is None:
        return plain
    yarn = config.yarn

    def turning_dim(rotations: float) -> float:
        """Find the dimension whose wave turns `rotations` times over the original context."""
        return (
            dim
            * math.log(yarn.original_max_len / (rotations * 2 * math.pi))
            / (2 * math.log(config.theta))
        )

    low, high = turning_dim(yarn.beta_fast), turning_dim(yarn.beta_slow)
    if yarn.truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(
        0, 1
    )
    # The order of operations is the reference model's: the last bit of a frequency is a milliradian
    # at position 16,000.
    share = 1 - ramp
    return 1.0 / (yarn.factor * wavelength) * (1 - share) + plain * share


def _llama3(plain: Tensor, stretch: Llama3Config) -> Tensor:
    turns = stretch.original_max_len / (2 * math.pi / plain)
    low, high = stretch.low_freq_factor, stretch.high_freq_factor
    share = (turns - low) / (high - low)
    between = (1 - share) * plain / stretch.factor + share * plain
    slow = torch.where(turns < low, plain / stretch.factor, plain)
    return torch.where((turns >= low) & (turns <= high), between, slow)
