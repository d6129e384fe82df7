"""Sampling defaults of a checkpoint, which both APIs use for missing fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nanocp.values.sampling import SamplingParams
from nanocp.values.sampling_fields import CONTROLS

_MOST = "max_new_tokens"
"""The name that max_tokens has in generation_config.json."""


def our_top_k(top_k: int) -> int:
    """Convert top_k: vLLM's -1, every token, is 0 here."""
    return 0 if top_k == -1 else top_k


def default_sampling(checkpoint: Path) -> dict[str, Any]:
    """Return the sampling fields of generation_config.json; none without the file.

    max_tokens, from max_new_tokens, is the default of chats. Raises ValueError naming the file if a
    value is wrong.
    """
    path = checkpoint / "generation_config.json"
    try:
        generation = json.loads(path.read_text()) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(generation, dict):
        raise ValueError(f"{path} must be a JSON object")
    names = (*CONTROLS, _MOST)
    sampling = {name: generation[name] for name in names if generation.get(name) is not None}
    for name, value in sampling.items():
        kind = int if name in ("top_k", _MOST) else int | float
        if isinstance(value, bool) or not isinstance(value, kind):
            expected = "an integer" if kind is int else "a number"
            raise ValueError(f"{path}: {name} is {value!r}; it must be {expected}")
    if _MOST in sampling:
        sampling["max_tokens"] = sampling.pop(_MOST)
    if "top_k" in sampling:
        sampling["top_k"] = our_top_k(sampling["top_k"])
    try:
        SamplingParams(**sampling)
    except ValueError as error:
        sentence = str(error).replace("max_tokens", _MOST)
        raise ValueError(f"{path}: {sentence}") from error
    return sampling
