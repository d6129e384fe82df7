"""The rule of a model's rotary embedding, from config.json."""

from __future__ import annotations

import math
from dataclasses import dataclass

from data_plane.model.config_fields import Fields


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The model's rotary embedding: plain, or stretched by yarn or by Llama 3's rule."""

    theta: float
    interleaved: bool
    """True if rotated pairs are stored side by side (x0, x1), not as two halves."""
    yarn: YarnConfig | None = None
    llama3: Llama3Config | None = None
    """At most one of the two is there; neither: plain rope."""
    is_off: bool = False
    """True if nothing is rotated."""


@dataclass(frozen=True, slots=True)
class Llama3Config:
    """Llama 3's stretch of the context: slow waves are interpolated, fast ones stay."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_len: int


@dataclass(frozen=True, slots=True)
class YarnConfig:
    """Yarn's stretch of the context (arXiv 2309.00071)."""

    factor: float
    original_max_len: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    """Factor of cos and sin."""
    softmax_mscale: float
    """The square of this factor multiplies the softmax scale."""
    truncated: bool
    """True if the ramp's ends are rounded outwards."""


def rope_fields(raw: Fields) -> Fields:
    """Read the object of rope fields; of several kinds of layers, the full attention's."""
    parameters = raw.inner("rope_scaling") or raw.inner("rope_parameters") or Fields({})
    return parameters.inner("full_attention") or parameters


def read_rope(raw: Fields, has_pairs: bool) -> RopeConfig:
    """Read rope in either spelling: rope_theta and rope_scaling, or all in rope_parameters.

    has_pairs: the default layout of rotated pairs. Raises ValueError naming the unsupported field.
    """
    parameters = rope_fields(raw)
    theta = parameters.positive_number("rope_theta", raw.positive_number("rope_theta", 10_000.0))
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in ("default", "yarn", "llama3"):
        raise ValueError(
            f"{parameters.where}: the rope type is {kind!r}; it must be default, yarn or llama3"
        )
    return RopeConfig(
        theta=theta,
        interleaved=bool(raw.get("rope_interleave", has_pairs)),
        yarn=_yarn(raw, parameters) if kind == "yarn" else None,
        llama3=_llama3(parameters) if kind == "llama3" else None,
    )


def _llama3(parameters: Fields) -> Llama3Config:
    stretch = Llama3Config(
        factor=parameters.positive_number("factor", 8.0),
        low_freq_factor=parameters.positive_number("low_freq_factor", 1.0),
        high_freq_factor=parameters.positive_number("high_freq_factor", 4.0),
        original_max_len=parameters.positive("original_max_position_embeddings"),
    )
    if stretch.high_freq_factor <= stretch.low_freq_factor:
        raise ValueError(
            f"{parameters.where}: high_freq_factor is {stretch.high_freq_factor}; it must be above "
            f"low_freq_factor ({stretch.low_freq_factor})"
        )
    return stretch


def _yarn(raw: Fields, parameters: Fields) -> YarnConfig:
    max_len = raw.positive("max_position_embeddings", "model_max_length")
    original_max_len = parameters.positive_number("original_max_position_embeddings", max_len)
    factor = parameters.positive_number("factor", max_len / original_max_len)
    mscale = parameters.number("mscale", 0.0)
    mscale_all_dim = parameters.number("mscale_all_dim", 0.0)
    attention_factor = _mscale(factor, 1.0)
    if mscale and mscale_all_dim:
        attention_factor = _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
    return YarnConfig(
        factor=factor,
        original_max_len=int(original_max_len),
        beta_fast=parameters.number("beta_fast", 0.0) or 32.0,
        beta_slow=parameters.number("beta_slow", 0.0) or 1.0,
        attention_factor=parameters.number("attention_factor", attention_factor),
        softmax_mscale=_mscale(factor, mscale_all_dim) if mscale_all_dim else 1.0,
        truncated=bool(parameters.get("truncate", True)),
    )


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
