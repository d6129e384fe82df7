"""Sizes of KV, from config.json alone: no torch is needed to know them.

Enters: a ModelConfig, what is configured. Leaves: bytes. Does not know: frames, tensors.
"""

from __future__ import annotations

from data_plane.model.config import ModelConfig
from nanocp.config.whole import Config
from nanocp.values.plan import PAGE_SIZE

NUM_SCALES = 4
"""Scales of one token's latent KV in FP8."""


def token_bytes(rank: int, rope_dim: int) -> int:
    """Size of one token's latent KV in FP8, in bytes."""
    return rank + 4 * NUM_SCALES + 2 * rope_dim


def item_bytes(config: Config) -> int:
    """Bytes of a number of the configured dtype."""
    return 2 if config.data_plane.dtype == "bfloat16" else 4


def page_bytes(model: ModelConfig, config: Config) -> int:
    """Compute the bytes of a page of all layers. Raises ValueError if KV cannot be kept in FP8."""
    kind, num_tokens = model.attention, PAGE_SIZE * model.num_kept_layers
    if config.data_plane.kv_dtype == "fp8":
        rank = kind.fp8_rank()
        return num_tokens * token_bytes(rank, kind.kv_width - rank)
    return num_tokens * kind.kv_width * item_bytes(config)
