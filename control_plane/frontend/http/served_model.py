"""What the HTTP door knows of the model: its name, its chat template, its own defaults of sampling.

Enters: a checkpoint folder. Leaves: one frozen value. Does not know: weights, requests.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from control_plane.frontend.http.chat_template import ChatTemplate, load_chat_template

_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model under one name."""

    name: str
    root: str
    """The checkpoint."""
    chat_template: ChatTemplate | None = None
    default_sampling: Mapping[str, float] = field(default_factory=dict)
    """Of sampling fields that requests leave out, as generation_config.json says; the others are as in OpenAI's API."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Seconds since the epoch."""


def open_model(checkpoint: Path, name: str) -> ServedModel:
    """`name` is what clients call it; empty: the checkpoint's path. Raises ValueError, naming the file."""
    path = checkpoint / "generation_config.json"
    try:
        generation = json.loads(path.read_text()) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    sampling = {name: generation[name] for name in _SAMPLING_FIELDS if generation.get(name) is not None}
    return ServedModel(name or str(checkpoint), str(checkpoint), load_chat_template(checkpoint), sampling)
