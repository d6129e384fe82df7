"""Attention over K/V heads, each shared by a group of query heads (Llama, Qwen, GLM, Mixtral).

A token's KV is all heads' keys, normed and rotated, then their values.

Legend: that of kind.py, G K/V heads, E width of a head, W = 2GE.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from data_plane.model.attention_kinds.kind import WeightSource
from data_plane.model.config_fields import Fields
from data_plane.model.rope_config import rope_fields

if TYPE_CHECKING:  # imported where it is needed: what reads a configuration does without
    from torch import Tensor

    from data_plane.model.linear import LinearLayer
    from data_plane.model.rope import RopeTable


@dataclass(frozen=True, slots=True)
class GqaWeights:
    """A layer's attention weights without the output projection."""

    q_proj: LinearLayer
    """From X to H * E."""
    kv_proj: LinearLayer
    """From X to 2 * G * E: keys, then values."""
    q_bias: Tensor | None
    """[H * E]."""
    kv_bias: Tensor | None
    """[2 * G * E]."""
    q_norm: Tensor | None
    """[E], for each head."""
    k_norm: Tensor | None
    """[E]."""
    gate: LinearLayer | None = None
    """From X to H * E."""


@dataclass(frozen=True, slots=True)
class GqaConfig:
    """Widths of attention over K/V heads; a kind.AttentionKind."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_dim: int
    """Width of the rotated first part of a head."""
    has_bias: bool
    has_norms: bool
    norm_eps: float
    has_gate: bool = False
    """True if q_proj also makes a gate of each head's values."""

    @classmethod
    def read(
        cls, raw: Fields, has_bias: bool, has_norms: bool, has_gate: bool = False
    ) -> GqaConfig:
        """Read config.json; raises ValueError naming the wrong field."""
        hidden_size, num_heads = raw.positive("hidden_size"), raw.positive("num_attention_heads")
        num_kv_heads = num_heads
        if raw.get("num_key_value_heads") is not None:
            num_kv_heads = raw.positive("num_key_value_heads")
        if num_heads % num_kv_heads:
            raise ValueError(
                f"config.json: num_attention_heads is {num_heads}; it must be a multiple of "
                f"num_key_value_heads ({num_kv_heads})"
            )
        head_dim = hidden_size // num_heads
        if raw.get("head_dim") is not None:
            head_dim = raw.positive("head_dim")
        parameters = rope_fields(raw)
        share = parameters.number("partial_rotary_factor", raw.number("partial_rotary_factor", 1.0))
        rope_dim = int(head_dim * share)
        if not 2 <= rope_dim <= head_dim or rope_dim % 2:
            raise ValueError(
                f"config.json: partial_rotary_factor is {share} of a head_dim of {head_dim}; "
                f"the rotated width must be even and from 2 to {head_dim}, not {rope_dim}"
            )
        return cls(
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rope_dim=rope_dim,
            has_bias=has_bias,
            has_norms=has_norms,
            norm_eps=raw.number("rms_norm_eps", 1e-6),
            has_gate=has_gate,
        )

    @property
    def kv_width(self) -> int:
        """Width of a token's KV in one layer."""
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def value_dim(self) -> int:
        """Width of a head's output."""
        return self.head_dim

    @property
    def softmax_scale(self) -> float:
        """Factor of attention scores before the softmax."""
        return float(self.head_dim**-0.5)

    def fp8_rank(self) -> int:
        """Raise ValueError: keys and values are kept in the dtype of the weights."""
        raise ValueError(
            "kv_dtype is fp8, but the model has K/V heads; FP8 keeps latent KV only, so kv_dtype "
            "must be auto"
        )

    def wire_widths(self, wire_form: str) -> tuple[int, int]:
        """Return the elements of a row on Q-route, and of a head on Res-route.

        latent: the normed hidden row goes out. absorbed: every head's query. Values return; for
        Qwen3-235B-A22B in bf16 24,832 bytes a row and layer, or 33,024.
        """
        return self.hidden_size if wire_form == "latent" else self._heads_width, self.head_dim

    @property
    def _heads_width(self) -> int:
        return self.num_heads * self.head_dim

    def stored_shapes(self, prefix: str, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Return a layer's tensors for `load`, name -> shape."""
        kv = self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {}
        for name, width in (("q", self._heads_width * (1 + self.has_gate)), ("k", kv), ("v", kv)):
            shapes[f"{prefix}{name}_proj.weight"] = (width, hidden_size)
            if self.has_bias:
                shapes[f"{prefix}{name}_proj.bias"] = (width,)
        if self.has_norms:
            shapes[prefix + "q_norm.weight"] = shapes[prefix + "k_norm.weight"] = (self.head_dim,)
        return shapes

    def load(self, source: WeightSource, prefix: str) -> GqaWeights:
        """Read a layer's weights."""
        import torch

        def bias(*names: str) -> Tensor | None:
            if not self.has_bias:
                return None
            return torch.cat([source.tensor(f"{prefix}{name}_proj.bias") for name in names])

        def norm(name: str) -> Tensor | None:
            return source.tensor(f"{prefix}{name}_norm.weight") if self.has_norms else None

        gate = None
        if self.has_gate:
            both = source.staged(prefix + "q_proj.weight").view(
                self.num_heads, 2, self.head_dim, -1
            )
            q_proj, gate = (
                source.packing.linear(part.flatten(0, 1).contiguous()) for part in both.unbind(1)
            )
        else:
            q_proj = source.linear(prefix + "q_proj.weight")
        return GqaWeights(
            q_proj=q_proj,
            kv_proj=source.linear(prefix + "k_proj.weight", prefix + "v_proj.weight"),
            q_bias=bias("q"),
            kv_bias=bias("k", "v"),
            q_norm=norm("q"),
            k_norm=norm("k"),
            gate=gate,
        )

    def inputs(
        self, x_BX: Tensor, position_B: Tensor, weights: GqaWeights, rope: RopeTable
    ) -> tuple[Tensor, Tensor]:
        """Project normed hidden rows [B, X] to (the same rows, new KV [B, W])."""
        import torch

        kv_BW = _with_bias(weights.kv_proj(x_BX), weights.kv_bias)
        key, value = kv_BW.chunk(2, dim=1)
        key = self._turned(key, position_B, weights.k_norm, rope)
        return x_BX, torch.cat((key.flatten(1), value), dim=1)

    def queries(
        self, wire_q_BC: Tensor, position_B: Tensor, weights: GqaWeights, rope: RopeTable
    ) -> Tensor:
        """Make the queries of normed hidden rows, [B, H, E]."""
        q = _with_bias(weights.q_proj(wire_q_BC), weights.q_bias)
        return self._turned(q, position_B, weights.q_norm, rope)

    def finish(self, partial_BHO: Tensor, weights: GqaWeights) -> Tensor:
        """Return the partial outputs [B, H, E] in the weights' dtype."""
        return partial_BHO

    def prefill_queries(
        self, wire_q_TC: Tensor, position_T: Tensor, weights: GqaWeights, rope: RopeTable
    ) -> Tensor:
        """Make the queries of normed hidden rows, [T, H, E]."""
        return self.queries(wire_q_TC, position_T, weights, rope)

    @property
    def least_plain_chunk(self) -> int:
        """No chunk: queries need plain keys and values anyway."""
        return sys.maxsize

    def keys_and_values(self, kv_UW: Tensor, weights: GqaWeights) -> tuple[Tensor, Tensor]:
        """Repeat each K/V head for its group: keys and values [H, U, E]."""
        key_HUE, value_HUE = (
            heads_of(half, self.head_dim)
            .transpose(0, 1)
            .repeat_interleave(self.num_heads // self.num_kv_heads, dim=0)
            for half in kv_UW.chunk(2, dim=1)
        )
        return key_HUE, value_HUE

    def _turned(
        self, x: Tensor, position_B: Tensor, norm: Tensor | None, rope: RopeTable
    ) -> Tensor:
        import torch

        from data_plane.model.norm import rms_norm

        x = heads_of(x, self.head_dim)
        if norm is not None:
            x = rms_norm(x, norm, self.norm_eps)
        if self.rope_dim == self.head_dim:
            return rope.rotate(x, position_B)
        turned = rope.rotate(x[..., : self.rope_dim], position_B)
        return torch.cat((turned, x[..., self.rope_dim :]), dim=-1)


def heads_of(x: Tensor, head_dim: int) -> Tensor:
    """View rows [B, heads * E] as heads [B, heads, E]."""
    return x.view(x.shape[0], x.shape[1] // head_dim, head_dim)


def _with_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias
