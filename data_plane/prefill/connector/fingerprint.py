"""What two processes must agree on before one writes KV that the other reads.

Enters: a checkpoint folder, the dtype of KV. Leaves: named strings, and the sentence for two that
differ. Does not know: weights, of which it reads the headers only; the probe compares those.
"""

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
"""Fields of config.json that are named if they differ; the checksum sees every other."""


def fingerprint(folder: Path, dtype: str) -> dict[str, str]:
    """What defines KV, by name.

    dtype: of KV as it is computed, float32 or bfloat16. Raises OSError or ValueError if config.json
    cannot be read.
    """
    config = json.loads((folder / "config.json").read_bytes())
    fields = {name: json.dumps(config.get(name), sort_keys=True) for name in _FIELDS}
    return {
        "layout": _HEADS if config.get("kv_lora_rank") is None else _LATENT,
        "page_tokens": str(PAGE_SIZE),
        "dtype": dtype,
        **fields,
        "checkpoint": _digest(folder),
    }


def difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """The first difference, as a sentence with both values; None if there is none."""
    for name in (*ours, *(name for name in theirs if name not in ours)):
        if ours.get(name) != theirs.get(name):
            return f"{name} is {ours.get(name)} in this engine and {theirs.get(name)} in NanoCP"
    return None


def _digest(folder: Path) -> str:
    """SHA-256 over config.json and the header of every safetensors file, in order of their names.

    A header has the name, dtype, shape and place of each tensor.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            digest.update(path.name.encode() + file.read(length))
    return digest.hexdigest()
