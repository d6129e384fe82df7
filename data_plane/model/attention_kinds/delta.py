"""Linear attention by the gated delta rule: Gated DeltaNet and Kimi Delta Attention.

A row keeps a recurrent state, [H, K, V], and no KV. Legend: that of attention/delta_rule.py, X
hidden, C = 2JK + HV channels of the convolution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from data_plane.model.attention_kinds.kind import WeightSource

if TYPE_CHECKING:  # imported where it is needed: what reads a configuration does without
    from torch import Tensor

    from data_plane.model.linear import LinearLayer

NORM_EPS = 1e-6
"""Epsilon of the norms of queries and keys; config.json has none."""


class DeltaNames(NamedTuple):
    """A checkpoint's names of a layer's tensors; matrices without `.weight`."""

    prefix: str
    qkv: tuple[str, ...]
    """Queries, keys and values. One name without a `gate`: key head by key head, its query, key,
    values and gates; `beta` then has the decays too.
    """
    conv: tuple[str, ...]
    gate: tuple[str, ...]
    """Two names: it is of low rank."""
    decay: tuple[str, ...]
    """Two names: they are of low rank."""
    beta: str
    norm: str
    output: str


class DeltaInputs(NamedTuple):
    """The delta rule's inputs from rows."""

    channels_BC: Tensor
    """[B, C] before the convolution."""
    decay_BHD: Tensor
    """fp32, logarithms: at most 0."""
    beta_BH: Tensor
    """fp32: the share of a correction."""
    gate_BHV: Tensor
    """fp32, before its activation."""


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """A layer's weights without the output projection."""

    inputs: LinearLayer
    """From X to C, the gate (or its rank), the decays (or their rank) and H betas."""
    gate_up: LinearLayer | None
    """From the gate's rank to H * V, if low."""
    decay_up: LinearLayer | None
    """From the decays' rank to H * D, if low."""
    conv: Tensor
    """[C, inputs of a channel]."""
    decay_rate: Tensor
    """[H, 1] fp32."""
    decay_bias: Tensor
    """[H, D] fp32."""
    norm: Tensor
    """[V]."""


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """Widths and rules of linear attention layers."""

    hidden_size: int
    num_key_heads: int
    num_heads: int
    """Value heads, a multiple of the key heads."""
    key_dim: int
    value_dim: int
    conv_size: int
    """Tokens, the newest included."""
    norm_eps: float
    has_channel_decay: bool
    """True if each channel of a key has its decay (Kimi), else a head has one (Qwen)."""
    decay_bound: float | None
    """Least logarithm of a decay (Ling), if bounded."""
    names: DeltaNames

    @property
    def num_channels(self) -> int:
        """Channels of the convolution, C."""
        return 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim

    @property
    def decay_width(self) -> int:
        """Decays of a head, D."""
        return self.key_dim if self.has_channel_decay else 1

    def stored_shapes(self, layer: str) -> dict[str, tuple[int, ...]]:
        """Return a layer's tensors for `load`, name -> shape."""
        names, prefix, hidden = self.names, layer + self.names.prefix, self.hidden_size
        heads, keys = self.num_heads, self.num_key_heads * self.key_dim
        values, decays = heads * self.value_dim, heads * self.decay_width
        rates = (1, 1, heads, 1) if len(names.decay) == 2 else (heads,)
        shapes: dict[str, tuple[int, ...]] = {
            prefix + "A_log": rates,
            prefix + "dt_bias": (decays,),
            f"{prefix}{names.norm}.weight": (self.value_dim,),
        }
        widths = (keys, keys, values)
        for name, width in zip(names.conv, _parts(widths, names.conv), strict=True):
            shapes[f"{prefix}{name}.weight"] = (width, 1, self.conv_size)
        if not names.gate:
            shapes[f"{prefix}{names.qkv[0]}.weight"] = (2 * keys + 2 * values, hidden)
            shapes[f"{prefix}{names.beta}.weight"] = (2 * heads, hidden)
            return shapes
        for name, width in zip(names.qkv, _parts(widths, names.qkv), strict=True):
            shapes[f"{prefix}{name}.weight"] = (width, hidden)
        for of, width in ((names.gate, values), (names.decay, decays)):
            shapes[f"{prefix}{of[0]}.weight"] = (self._rank(of, width), hidden)
            if len(of) == 2:
                shapes[f"{prefix}{of[1]}.weight"] = (width, self.value_dim)
        shapes[f"{prefix}{names.beta}.weight"] = (heads, hidden)
        return shapes

    def _rank(self, names: tuple[str, ...], width: int) -> int:
        return width if len(names) == 1 else self.value_dim

    def load(self, source: WeightSource, layer: str) -> DeltaWeights:
        """Read a layer's weights without the output projection."""
        import torch

        names, prefix, heads = self.names, layer + self.names.prefix, self.num_heads

        def matrix(name: str) -> str:
            return f"{prefix}{name}.weight"

        conv = torch.cat([source.tensor(matrix(name)) for name in names.conv])
        if names.gate:
            first = [*names.qkv, names.gate[0], names.decay[0], names.beta]
            inputs = source.linear(*map(matrix, first))
        else:
            inputs = self._inputs_by_key_head(source, matrix(names.qkv[0]), matrix(names.beta))
        gate_up, decay_up = (
            source.linear(matrix(of[1])) if len(of) == 2 else None
            for of in (names.gate, names.decay)
        )
        rate = source.tensor(prefix + "A_log", torch.float32)
        bias = source.tensor(prefix + "dt_bias", torch.float32)
        norm = source.tensor(matrix(names.norm))
        rate_H1, bias_HD = rate.exp().view(heads, 1), bias.view(heads, -1)
        return DeltaWeights(inputs, gate_up, decay_up, conv[:, 0], rate_H1, bias_HD, norm)

    def _inputs_by_key_head(self, source: WeightSource, qkvz: str, ba: str) -> LinearLayer:
        import torch

        of_key = self.num_heads // self.num_key_heads
        values = of_key * self.value_dim
        parts = source.staged(qkvz).view(self.num_key_heads, -1, self.hidden_size)
        q, k, v, z = torch.split(parts, [self.key_dim, self.key_dim, values, values], dim=1)
        b, a = source.staged(ba).view(self.num_key_heads, -1, self.hidden_size).chunk(2, dim=1)
        rows = [part.flatten(0, 1) for part in (q, k, v, z, a, b)]
        return source.packing.linear(torch.cat(rows))

    def projections(
        self, x_BX: Tensor, weights: DeltaWeights
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Project normed hidden rows to channels [B, C], gates, decays and betas.

        They are [B, H * V], [B, H * D] and [B, H]; a row's columns lie side by side.
        """
        import torch

        heads, values = self.num_heads, self.num_heads * self.value_dim
        gate_width = values if weights.gate_up is None else self.value_dim
        decay_width = heads * self.decay_width if weights.decay_up is None else self.value_dim
        sizes = [self.num_channels, gate_width, decay_width, heads]
        channels, gate, decay, beta = torch.split(weights.inputs(x_BX), sizes, dim=1)
        if weights.gate_up is not None:
            gate = weights.gate_up(gate)
        if weights.decay_up is not None:
            decay = weights.decay_up(decay)
        return channels, gate, decay, beta

    def inputs(self, x_BX: Tensor, weights: DeltaWeights) -> DeltaInputs:
        """Project normed hidden rows to the delta rule's inputs."""
        import torch.nn.functional as F

        heads = self.num_heads
        channels, gate, decay, beta = self.projections(x_BX, weights)
        decay = decay.float().view(len(x_BX), heads, self.decay_width) + weights.decay_bias
        if self.decay_bound is None:
            decay = -weights.decay_rate * F.softplus(decay)
        else:
            decay = self.decay_bound * (weights.decay_rate * decay).sigmoid()
        gate = gate.float().view(len(x_BX), heads, self.value_dim)
        return DeltaInputs(channels, decay, beta.float().sigmoid(), gate)

    def heads(self, seen_BCS: Tensor, weights: DeltaWeights) -> tuple[Tensor, Tensor, Tensor]:
        """Convolve the channels of a token and those before it; make queries, keys and values.

        seen_BCS: each row's last `conv_size` tokens, its own last. Returns queries and keys [B, J,
        K], normed, and values [B, H, V]; all fp32.
        """
        import torch
        import torch.nn.functional as F

        rows, keys = len(seen_BCS), self.num_key_heads * self.key_dim
        convolved = F.silu((seen_BCS * weights.conv).sum(dim=-1)).float()
        sizes = [keys, keys, self.num_heads * self.value_dim]
        q, k, v = torch.split(convolved, sizes, dim=1)
        q, k = (_normed(x.view(rows, self.num_key_heads, self.key_dim)) for x in (q, k))
        return q * self.key_dim**-0.5, k, v.view(rows, self.num_heads, self.value_dim)

    def finish(self, o_BHV: Tensor, gate_BHV: Tensor, weights: DeltaWeights) -> Tensor:
        """Norm each head's output [B, H, V] fp32 and gate it; in the dtype of the weights."""
        import torch
        import torch.nn.functional as F

        o_BHV = o_BHV * torch.rsqrt(o_BHV.pow(2).mean(dim=-1, keepdim=True) + self.norm_eps)
        gate_BHV = gate_BHV.sigmoid() if self.has_channel_decay else F.silu(gate_BHV)
        return (o_BHV * weights.norm * gate_BHV).to(weights.norm.dtype)


def _parts(widths: tuple[int, ...], names: tuple[str, ...]) -> tuple[int, ...]:
    return widths if len(names) == len(widths) else (sum(widths),)


def _normed(x: Tensor) -> Tensor:
    return x * (x.square().sum(dim=-1, keepdim=True) + NORM_EPS).rsqrt()
