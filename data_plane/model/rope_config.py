"""The rule of a model's rotary embedding, from config.json.

Enters: fields in either spelling. Leaves: a RopeConfig, or a ValueError that names the field. Does
not know: tables, vectors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from data_plane.model.config_fields import Fields


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The model's rotary embedding: plain, or stretched by yarn."""

    theta: float
    interleaved: bool
    """Whether the checkpoint stores rotated pairs side by side (x0, x1), not as two halves."""
    yarn: YarnConfig | None
    """None: plain rope."""


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
    """Factor whose square multiplies the softmax scale."""
    truncated: bool
    """Whether the ends of the ramp are rounded outwards to whole dimensions."""


def read_rope(raw: Fields) -> RopeConfig:
    """Read rope in either spelling: rope_theta and rope_scaling, or all in rope_parameters."""
    parameters = raw.inner("rope_scaling") or raw.inner("rope_parameters") or Fields({})
    theta = parameters.positive_number("rope_theta", raw.positive_number("rope_theta", 10_000.0))
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in ("default", "yarn"):
        raise ValueError(
            f"{parameters.where}: the rope type is {kind!r}; it must be default or yarn"
        )
    for fields in (raw, parameters):
        share = fields.get("partial_rotary_factor", 1.0)
        if share != 1.0:
            raise ValueError(
                f"{fields.where}: partial_rotary_factor is {share!r}; only 1.0 is supported"
            )
    yarn = _yarn(raw, parameters) if kind == "yarn" else None
    return RopeConfig(theta=theta, interleaved=bool(raw.get("rope_interleave", True)), yarn=yarn)


def _yarn(raw: Fields, parameters: Fields) -> YarnConfig:
    max_len = raw.positive("max_position_embeddings")
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
