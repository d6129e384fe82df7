"""Sampling parameters of a command line: the API's JSON, checked by the table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, get_args, get_origin, get_type_hints

from nanocp.cli.options.typed import json_object
from nanocp.config.choices import none_of
from nanocp.values.sampling_fields import BOUNDS, SamplingRequest, check_bounds

NAMES = tuple(field.name for field in fields(SamplingRequest))
_TYPES = get_type_hints(SamplingRequest)
_RIGHT = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
_JSON = ("json_schema", "structural_tag")
"""Parameters of JSON text; JSON itself is taken too."""


def read_sampling(text: str) -> dict[str, Any]:
    """The given parameters; null: the service's default.

    Raises ValueError, naming the parameter and the remedy.
    """
    given = json_object("--sampling", text)
    for name in given:
        if name not in NAMES:
            raise ValueError(f"--sampling has {name!r}; {none_of(name, NAMES)}")
    return {name: _read(name, value) for name, value in given.items() if value is not None}


def _read(name: str, value: Any) -> Any:
    hint = _TYPES[name]
    kind = next((one for one in get_args(hint) if one is not type(None)), hint)
    if name in _JSON and isinstance(value, dict):
        return json.dumps(value)
    if get_origin(hint) is Mapping:
        return _read_biases(name, value)
    if get_origin(hint) is Sequence:
        return [_plain(name, kind, one) for one in (value if isinstance(value, list) else [value])]
    value = _plain(name, kind, value)
    if name in BOUNDS:
        check_bounds(name, value)
    return value


def _plain(name: str, kind: Any, value: Any) -> Any:
    fits = type(value) is kind or (kind is float and type(value) is int)
    if not fits:
        raise ValueError(f"{name} is {json.dumps(value)}; it must be {_RIGHT[kind]}")
    return value


def _read_biases(name: str, value: Any) -> dict[int, float]:
    try:
        return {int(token_id): float(bias) for token_id, bias in value.items()}
    except (AttributeError, TypeError, ValueError):
        right = 'token ids and numbers, as {"42": -1.5}'
        raise ValueError(f"{name} is {json.dumps(value)}; it must be {right}") from None
