"""Linear attention layers in config.json, by architecture."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from data_plane.model.attention_kinds.delta import DeltaConfig, DeltaNames
from data_plane.model.config_fields import Fields


class LinearLayers(NamedTuple):
    """The linear attention layers of a model."""

    delta: DeltaConfig
    indices: tuple[int, ...]
    """Ascending."""


_QWEN3_NEXT = DeltaNames(
    prefix="linear_attn.",
    qkv=("in_proj_qkvz",),
    conv=("conv1d",),
    gate=(),
    decay=(),
    beta="in_proj_ba",
    norm="norm",
    output="out_proj",
)
_QWEN3_5 = _QWEN3_NEXT._replace(
    qkv=("in_proj_qkv",), gate=("in_proj_z",), decay=("in_proj_a",), beta="in_proj_b"
)
_KIMI = DeltaNames(
    prefix="self_attn.",
    qkv=("q_proj", "k_proj", "v_proj"),
    conv=("q_conv1d", "k_conv1d", "v_conv1d"),
    gate=("g_a_proj", "g_b_proj"),
    decay=("f_a_proj", "f_b_proj"),
    beta="b_proj",
    norm="o_norm",
    output="o_proj",
)
_LING = _KIMI._replace(prefix="attention.", gate=("g_proj",), decay=("f_proj",), output="dense")


def kimi_linear(raw: Fields) -> LinearLayers:
    """Read Kimi-Linear's: in linear_attn_config, or as `transformers` writes them."""
    own = raw.inner("linear_attn_config") or Fields({})
    published: Any = own.get("kda_layers")
    layers = None
    if published is not None:
        num_layers = raw.positive("num_hidden_layers")
        layers = ["full_attention"] * num_layers
        for number in published:
            if not isinstance(number, int) or not 1 <= number <= num_layers:
                raise ValueError(
                    f"{own.where}: kda_layers has {number!r}; it must be numbers of layers, from "
                    f"1 to {num_layers}"
                )
            layers[number - 1] = "linear_attention"
    if layers is None and raw.get("layer_types") is None:
        raise ValueError(
            "config.json: linear_attn_config has no kda_layers; they must be the numbers of the "
            "linear attention layers, or layer_types must say of each layer what it is"
        )
    fields, names = raw, ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    if own.get("num_heads") is not None:
        fields, names = own, ("num_heads", "head_dim", "short_conv_kernel_size")
    num_heads, head_dim, conv_size = map(fields.positive, names)
    return LinearLayers(
        _kimi_delta(raw, num_heads, head_dim, conv_size, _KIMI), _indices(raw, layers, None)
    )


def ling(raw: Fields) -> LinearLayers:
    """Read Ling's: Kimi's with a bound of the decays, and matrices of full rank."""
    bound = raw.number("kda_lower_bound", -5.0) if raw.get("kda_safe_gate", True) else None
    delta = _kimi_delta(
        raw,
        num_heads=raw.positive("linear_num_heads", "num_attention_heads"),
        head_dim=raw.positive("linear_head_dim", "head_dim"),
        conv_size=raw.positive("short_conv_kernel_size"),
        names=_LING,
        bound=bound,
    )
    return LinearLayers(delta, _indices(raw, None, "layer_group_size"))


def _gated_delta_net(raw: Fields, names: DeltaNames) -> LinearLayers:
    num_key_heads = raw.positive("linear_num_key_heads")
    num_heads = raw.positive("linear_num_value_heads")
    if num_heads % num_key_heads:
        raise ValueError(
            f"config.json: linear_num_value_heads is {num_heads}; it must be a multiple of "
            f"linear_num_key_heads ({num_key_heads})"
        )
    delta = DeltaConfig(
        hidden_size=raw.positive("hidden_size"),
        num_key_heads=num_key_heads,
        num_heads=num_heads,
        key_dim=raw.positive("linear_key_head_dim"),
        value_dim=raw.positive("linear_value_head_dim"),
        conv_size=raw.positive("linear_conv_kernel_dim"),
        norm_eps=raw.number("rms_norm_eps", 1e-6),
        has_channel_decay=False,
        decay_bound=None,
        names=names,
    )
    return LinearLayers(delta, _indices(raw, None, "full_attention_interval"))


qwen3_next = partial(_gated_delta_net, names=_QWEN3_NEXT)
qwen3_5 = partial(_gated_delta_net, names=_QWEN3_5)


def _kimi_delta(
    raw: Fields,
    num_heads: int,
    head_dim: int,
    conv_size: int,
    names: DeltaNames,
    bound: float | None = None,
) -> DeltaConfig:
    return DeltaConfig(
        hidden_size=raw.positive("hidden_size"),
        num_key_heads=num_heads,
        num_heads=num_heads,
        key_dim=head_dim,
        value_dim=head_dim,
        conv_size=conv_size,
        norm_eps=raw.number("rms_norm_eps", 1e-6),
        has_channel_decay=True,
        decay_bound=bound,
        names=names,
    )


def _indices(raw: Fields, kinds: Sequence[str] | None, interval: str | None) -> tuple[int, ...]:
    """Find the linear attention layers.

    kinds: of every layer, by default layer_types. interval: else the field with the distance of
    full attention layers; 4 if absent.
    """
    num_layers = raw.positive("num_hidden_layers")
    kinds = raw.get("layer_types") if kinds is None else kinds
    if kinds is None:
        every = raw.positive(interval) if interval and raw.get(interval) is not None else 4
        return tuple(index for index in range(num_layers) if (index + 1) % every)
    if len(kinds) != num_layers or not {*kinds} <= {"linear_attention", "full_attention"}:
        raise ValueError(
            f"config.json: layer_types has {len(kinds)} layers, of {', '.join(sorted({*kinds}))}; "
            f"it must say of each of {num_layers} layers (num_hidden_layers) whether it is "
            "linear_attention or full_attention"
        )
    if "full_attention" not in kinds:
        raise ValueError(
            "config.json: layer_types has no full_attention; one layer at least must keep KV"
        )
    return tuple(index for index, kind in enumerate(kinds) if kind == "linear_attention")
