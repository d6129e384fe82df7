"""Fields of a Hugging Face config.json, each read with its type checked."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

_NULL_SAYS_NONE = ("q_lora_rank", "head_dim", "num_key_value_heads", "rope_interleave")
"""Null means that the model has no such thing."""
_ALSO_NAMED = (
    ("num_experts", "num_local_experts", "n_routed_experts"),
    ("num_experts_per_tok", "num_experts_per_token"),
    ("n_shared_experts", "num_shared_experts"),
    ("n_group", "num_expert_group"),
    ("norm_topk_prob", "moe_renormalize"),
    ("num_nextn_predict_layers", "num_mtp_layers"),
)
"""Names of one field in `transformers` and in published folders."""


class Fields:
    """Fields of config.json, or of an object in it."""

    def __init__(
        self,
        raw: Mapping[str, Any],
        where: str = "config.json",
        defaults: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """defaults: of the family, before the reader's own default."""
        self._raw = raw
        self._defaults = defaults
        self.where = where

    def with_defaults(self, defaults: Mapping[str, Any]) -> Fields:
        """Return the same fields with other defaults."""
        return Fields(self._raw, self.where, defaults)

    def get(self, name: str, default: Any = None) -> Any:
        """Read a field; the default if it is absent or null."""
        value = self._given(name)
        if value is None and not (name in self._raw and name in _NULL_SAYS_NONE):
            value = self._defaults.get(name)
        return default if value is None else value

    def _given(self, name: str) -> Any:
        names = next((names for names in _ALSO_NAMED if name in names), (name,))
        found = {n: self._raw[n] for n in names if self._raw.get(n) is not None}
        if any(value != found[next(iter(found))] for value in found.values()):
            both = " and ".join(f"{n} is {value!r}" for n, value in found.items())
            raise ValueError(f"{self.where}: {both}, which are one field; leave one of them")
        return next(iter(found.values()), None)

    def count(self, name: str, default: int) -> int:
        """Read an integer of at least 0."""
        value = self.get(name, default)
        if not is_int(value) or value < 0:
            raise ValueError(
                f"{self.where}: {name} is {value!r}; it must be an integer of at least 0"
            )
        return int(value)

    def positive(self, *names: str) -> int:
        """Read the first of `names` that is present; it must be an integer of at least 1."""
        given = (self._given(name) for name in names)
        value = next((value for value in given if value is not None), self.get(names[0]))
        if not is_int(value) or value < 1:
            found = "missing" if value is None else repr(value)
            raise ValueError(
                f"{self.where}: {names[0]} is {found}; it must be an integer of at least 1"
            )
        return int(value)

    def number(self, name: str, default: float) -> float:
        """Read a finite number."""
        value = self.get(name, default)
        if not (is_int(value) or isinstance(value, float)) or not math.isfinite(value):
            raise ValueError(f"{self.where}: {name} is {value!r}; it must be a finite number")
        return float(value)

    def positive_number(self, name: str, default: float) -> float:
        """Read a finite number above 0."""
        value = self.number(name, default)
        if value <= 0:
            raise ValueError(f"{self.where}: {name} is {value!r}; it must be above 0")
        return value

    def names(self, name: str) -> list[str]:
        """Read a list of names; empty if it is absent."""
        value = self.get(name, [])
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise ValueError(f"{self.where}: {name} is {value!r}; it must be a list of names")
        return value

    def inner(self, name: str) -> Fields | None:
        """Read the object of that name; None if it is absent or empty."""
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            raise ValueError(f"{self.where}: {name} is {value!r}; it must be an object")
        return Fields(value, f"{self.where}: {name}") if value else None


def is_int(value: Any) -> bool:
    """True for an integer of JSON, which true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def _how_to_get(folder: Path) -> str:
    if folder.exists():
        return ""
    said = ". Nothing is downloaded here"
    if len(folder.parts) != 2 or not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(folder)):
        return f"{said}: give a folder of this machine"
    command = f"hf download {folder} --local-dir checkpoints/{folder.name}"
    return f"{said}: `{command}`, then give checkpoints/{folder.name}"


def read_json(path: Path) -> dict[str, Any]:
    """Read a file of one JSON object; raises ValueError saying its fault."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f"{path} is missing; a checkpoint is a Hugging Face folder with a {path.name}"
            f"{_how_to_get(path.parent)}"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} is not JSON ({error}); it must be a Hugging Face {path.name}"
        ) from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}; it must hold a JSON object")
    return value
