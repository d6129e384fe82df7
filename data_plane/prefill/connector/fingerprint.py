"""The fingerprint of KV: two processes must agree on it before one writes the other's KV."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from nanocp.values.plan import PAGE_SIZE

_LATENT = "pairs-1"
"""A token's KV: the normed latent, then the rotated key, its pairs side by side."""
_HEADS = "heads-1"
"""A token's KV: the keys of all K/V heads, normed and rotated, then their values."""
_LENGTH_BYTES = 8
_FIELDS = (
    "architectures",
    "num_hidden_layers",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
)


def fingerprint(folder: Path, dtype: str) -> dict[str, str]:
    """Return the definition of KV, by name; of a text_config if there is one.

    dtype: of computed KV, float32 or bfloat16. Raises OSError or ValueError if config.json cannot
    be read.
    """
    config = json.loads((folder / "config.json").read_bytes())
    if isinstance(text := config.get("text_config"), dict):
        config |= text
    fields = {name: json.dumps(config.get(name), sort_keys=True) for name in _FIELDS}
    return {
        "layout": _HEADS if config.get("kv_lora_rank") is None else _LATENT,
        "page_tokens": str(PAGE_SIZE),
        "dtype": dtype,
        **fields,
        "checkpoint": _digest(folder),
    }


def difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """Return the first difference, as a sentence with both values, or None."""
    for name in (*ours, *(name for name in theirs if name not in ours)):
        if ours.get(name) != theirs.get(name):
            return f"{name} is {ours.get(name)} in this engine and {theirs.get(name)} in NanoCP"
    return None


def _digest(folder: Path) -> str:
    """Return SHA-256 over config.json and all safetensors headers, by name."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            digest.update(path.name.encode() + file.read(length))
    return digest.hexdigest()
