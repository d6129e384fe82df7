"""Multi-head latent attention: all heads share one latent KV of a token (DeepSeek-V2 and V3).

Legend: B rows, X hidden, C q latent (X without q LoRA), R kv_lora_rank, P rope, D = R + P, H heads,
N nope, V value width, T tokens, U tokens so far.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from data_plane.model.attention_kinds.kind import WeightSource
from data_plane.model.config_fields import Fields
from data_plane.model.rope_config import RopeConfig, rope_fields

if TYPE_CHECKING:  # imported where it is needed: what reads a configuration does without
    from torch import Tensor

    from data_plane.model.linear import LinearLayer
    from data_plane.model.rope import RopeTable

LATENT_NORM_EPS = 1e-6
"""Epsilon for q latent and c_kv; the reference model ignores rms_norm_eps there."""


@dataclass(frozen=True, slots=True)
class MlaWeights:
    """A layer's attention weights without the output projection."""

    down_proj: LinearLayer
    """From X to C + R + P with q LoRA (q_a, then kv_a); without, to R + P."""
    q_norm: Tensor | None
    """[C]; None without q LoRA."""
    kv_norm: Tensor
    """[R]."""
    q_proj: LinearLayer
    """From C (X without q LoRA) to H * (N + P)."""
    k_up: Tensor
    """W_UK [H, N, R], packed."""
    v_up: Tensor
    """W_UV [H, R, V], packed."""
    gate: LinearLayer | None = None
    """From X to H."""


@dataclass(frozen=True, slots=True)
class MlaConfig:
    """Latent attention's widths; a kind.AttentionKind."""

    hidden_size: int
    num_heads: int
    q_lora_rank: int | None
    """None: queries come from the hidden state directly."""
    kv_lora_rank: int
    nope_dim: int
    """Width of the unrotated part of a head's query and key."""
    rope_dim: int
    value_dim: int
    softmax_mscale: float = 1.0
    """Yarn's; its square multiplies the softmax scale."""
    has_gate: bool = False

    @classmethod
    def read_gated(cls, raw: Fields, rope: RopeConfig) -> MlaConfig:
        """Read config.json of a model whose heads have gates; raises as `read`."""
        return cls.read(raw, rope, has_gate=True)

    @classmethod
    def read(cls, raw: Fields, rope: RopeConfig, has_gate: bool = False) -> MlaConfig:
        """Read config.json; raises ValueError naming the wrong field."""
        # Published Ling folders say 0.5, and every engine rotates all of qk_rope_head_dim.
        for fields in () if has_gate else (raw, rope_fields(raw)):
            if (share := fields.get("partial_rotary_factor", 1.0)) != 1.0:
                raise ValueError(
                    f"{fields.where}: partial_rotary_factor is {share!r}; only 1.0 is supported"
                )
        config = cls(
            hidden_size=raw.positive("hidden_size"),
            num_heads=raw.positive("num_attention_heads"),
            q_lora_rank=raw.positive("q_lora_rank") if raw.get("q_lora_rank") is not None else None,
            kv_lora_rank=raw.positive("kv_lora_rank"),
            nope_dim=raw.positive("qk_nope_head_dim"),
            rope_dim=raw.positive("qk_rope_head_dim"),
            value_dim=raw.positive("v_head_dim"),
            softmax_mscale=1.0 if rope.yarn is None else rope.yarn.softmax_mscale,
            has_gate=has_gate,
        )
        if config.rope_dim % 2:
            raise ValueError(f"config.json: qk_rope_head_dim is {config.rope_dim}; it must be even")
        return config

    @property
    def kv_width(self) -> int:
        """Width of a token's latent KV: normed c_kv, then the rotated key."""
        return self.kv_lora_rank + self.rope_dim

    @property
    def q_latent_dim(self) -> int:
        """Width of the q latent: q_lora_rank, or the hidden size without it."""
        return self.hidden_size if self.q_lora_rank is None else self.q_lora_rank

    @property
    def softmax_scale(self) -> float:
        """Factor of attention scores before the softmax."""
        mscale = self.softmax_mscale
        return float((self.nope_dim + self.rope_dim) ** -0.5 * mscale * mscale)

    def fp8_rank(self) -> int:
        """Return the width of c_kv, which FP8 keeps in scaled groups."""
        return self.kv_lora_rank

    def wire_widths(self, wire_form: str) -> tuple[int, int]:
        """Return the elements of a row on Q-route, and of a head on Res-route.

        latent: q latents go out, values return; 36,352 bytes a row and layer at DeepSeek-V3's
        widths in bf16. absorbed, the paper's form: every head's absorbed q and latent-space
        outputs; 279,040 bytes.
        """
        if wire_form == "latent":
            return self.q_latent_dim, self.value_dim
        return self.num_heads * self.kv_width, self.kv_lora_rank

    def stored_shapes(self, prefix: str, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Return a layer's tensors for `load`, name -> shape."""
        shapes: dict[str, tuple[int, ...]] = {}
        q_name, heads = "q_proj.weight", self.num_heads
        if self.q_lora_rank is not None:
            q_name = "q_b_proj.weight"
            shapes[prefix + "q_a_proj.weight"] = (self.q_lora_rank, hidden_size)
            shapes[prefix + "q_a_layernorm.weight"] = (self.q_lora_rank,)
        if self.has_gate:
            shapes[prefix + "g_proj.weight"] = (heads, hidden_size)
        kv_b = (heads * (self.nope_dim + self.value_dim), self.kv_lora_rank)
        return shapes | {
            prefix + q_name: (heads * (self.nope_dim + self.rope_dim), self.q_latent_dim),
            prefix + "kv_a_proj_with_mqa.weight": (self.kv_width, hidden_size),
            prefix + "kv_a_layernorm.weight": (self.kv_lora_rank,),
            prefix + "kv_b_proj.weight": kv_b,
        }

    def load(self, source: WeightSource, prefix: str) -> MlaWeights:
        """Read a layer's weights."""
        has_q_lora = self.q_lora_rank is not None
        q_a = [prefix + "q_a_proj.weight"] if has_q_lora else []
        k_up, v_up = self._kv_up(source, prefix + "kv_b_proj.weight")
        return MlaWeights(
            down_proj=source.linear(*q_a, prefix + "kv_a_proj_with_mqa.weight"),
            q_norm=source.tensor(prefix + "q_a_layernorm.weight") if has_q_lora else None,
            kv_norm=source.tensor(prefix + "kv_a_layernorm.weight"),
            q_proj=source.linear(prefix + ("q_b_proj.weight" if has_q_lora else "q_proj.weight")),
            k_up=k_up,
            v_up=v_up,
            gate=source.linear(prefix + "g_proj.weight") if self.has_gate else None,
        )

    def _kv_up(self, source: WeightSource, name: str) -> tuple[Tensor, Tensor]:
        kv_b = source.staged(name).view(
            self.num_heads, self.nope_dim + self.value_dim, self.kv_lora_rank
        )
        k_up = source.packing.head_weight(kv_b[:, : self.nope_dim])
        v_up = source.packing.head_weight(kv_b[:, self.nope_dim :].transpose(1, 2))
        return k_up, v_up

    def inputs(
        self, x_BX: Tensor, position_B: Tensor, weights: MlaWeights, rope: RopeTable
    ) -> tuple[Tensor, Tensor]:
        """Project normed hidden rows [B, X] to (normed q latent [B, C], new latent KV [B, D])."""
        import torch

        from data_plane.model.norm import rms_norm

        down = weights.down_proj(x_BX)
        kv_BD = down[:, -self.kv_width :]
        latent_BC = x_BX
        if weights.q_norm is not None:
            latent_BC = rms_norm(down[:, : -self.kv_width], weights.q_norm, LATENT_NORM_EPS)
        c_kv = rms_norm(kv_BD[:, : self.kv_lora_rank], weights.kv_norm, LATENT_NORM_EPS)
        return latent_BC, torch.cat(
            (c_kv, rope.rotate(kv_BD[:, self.kv_lora_rank :], position_B)), dim=1
        )

    def queries(
        self, wire_q_BC: Tensor, position_B: Tensor, weights: MlaWeights, rope: RopeTable
    ) -> Tensor:
        """Make absorbed queries of q latents, [B, H, D]: W_UK in the first R, then the rotated."""
        import torch

        q_nope, q_rope = self._plain_queries(wire_q_BC, position_B, weights, rope)
        absorbed_HBR = q_nope.transpose(0, 1).bmm(weights.k_up)
        return torch.cat((absorbed_HBR.transpose(0, 1), q_rope), dim=2)

    def finish(self, partial_BHO: Tensor, weights: MlaWeights) -> Tensor:
        """Apply W_UV to outputs in latent space [B, H, R]: [B, H, V]."""
        o_HBV = partial_BHO.to(weights.v_up.dtype).transpose(0, 1).bmm(weights.v_up)
        return o_HBV.transpose(0, 1)

    def prefill_queries(
        self, wire_q_TC: Tensor, position_T: Tensor, weights: MlaWeights, rope: RopeTable
    ) -> Tensor:
        """Make queries [T, H, N + P] of q latents, nothing absorbed."""
        import torch

        return torch.cat(self._plain_queries(wire_q_TC, position_T, weights, rope), dim=-1)

    @property
    def least_plain_chunk(self) -> int:
        """Tokens of a chunk from which plain keys and values cost less.

        They take R * (N + V) products a head and key, but a query then takes fewer than 2 (R + P).
        """
        saved = 2 * (self.kv_width - max(self.nope_dim + self.rope_dim, self.value_dim))
        made = self.kv_lora_rank * (self.nope_dim + self.value_dim)
        return made // saved + 1 if saved > 0 else sys.maxsize

    def keys_and_values(self, kv_UW: Tensor, weights: MlaWeights) -> tuple[Tensor, Tensor]:
        """Compute keys [H, U, N + P] and values [H, U, V] from latent KV."""
        latent_UR, rope_UP = kv_UW[:, : self.kv_lora_rank], kv_UW[:, self.kv_lora_rank :]
        key = kv_UW.new_empty(self.num_heads, len(kv_UW), self.nope_dim + self.rope_dim)
        key[..., : self.nope_dim] = latent_UR.matmul(weights.k_up.transpose(1, 2))
        key[..., self.nope_dim :] = rope_UP
        return key, latent_UR.matmul(weights.v_up)

    def _plain_queries(
        self, latent_BC: Tensor, position_B: Tensor, weights: MlaWeights, rope: RopeTable
    ) -> tuple[Tensor, Tensor]:
        q = weights.q_proj(latent_BC).view(
            len(latent_BC), self.num_heads, self.nope_dim + self.rope_dim
        )
        return q[..., : self.nope_dim], rope.rotate(q[..., self.nope_dim :], position_B)
