"""Sampling defaults of a checkpoint, which both APIs take where a request is silent.

Enters: a checkpoint folder. Leaves: values of sampling fields. Does not know: requests, what an
API takes by default.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nanocp.values.sampling import SamplingParams
from nanocp.values.sampling_fields import CONTROLS


def our_top_k(top_k: int) -> int:
    """The value of top_k here: vLLM's -1, every token, is 0."""
    return 0 if top_k == -1 else top_k


def default_sampling(checkpoint: Path) -> dict[str, Any]:
    """The sampling fields of generation_config.json that are there; none without the file.

    Raises ValueError, naming the file, if it cannot be read or a value is out of range: later that
    would look like an error of clients, in a field that they did not set.
    """
    path, generation = _generation(checkpoint)
    sampling = {name: generation[name] for name in CONTROLS if generation.get(name) is not None}
    for name, value in sampling.items():
        _check_number(path, name, value, int if name == "top_k" else int | float)
    if "top_k" in sampling:
        sampling["top_k"] = our_top_k(sampling["top_k"])
    try:
        SamplingParams(**sampling)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return sampling


def default_max_tokens(checkpoint: Path) -> int | None:
    """The default of a chat's max_tokens: max_new_tokens of generation_config.json, if it is there.

    Raises ValueError, naming the file, if it cannot be read or the value is no number of tokens.
    """
    path, generation = _generation(checkpoint)
    most: int | None = generation.get("max_new_tokens")
    if most is not None:
        _check_number(path, "max_new_tokens", most, int)
        if most < 1:
            raise ValueError(f"{path}: max_new_tokens is {most}; it must be at least 1")
    return most


def _generation(checkpoint: Path) -> tuple[Path, dict[str, Any]]:
    path = checkpoint / "generation_config.json"
    try:
        generation = json.loads(path.read_text()) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(generation, dict):
        raise ValueError(f"{path} must be a JSON object")
    return path, generation


def _check_number(path: Path, name: str, value: Any, kind: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, kind):
        expected = "an integer" if kind is int else "a number"
        raise ValueError(f"{path}: {name} is {value!r}; it must be {expected}")
