"""JSON schemas of functions' parameters, and the types that they allow."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from control_plane.frontend.text.constraint import FOR_PEOPLE as FOR_PEOPLE
from control_plane.frontend.text.constraint import Schema as Schema
from control_plane.frontend.text.constraint import parts_of, resolved

NOTHING: Schema = {"type": "object", "properties": {}, "additionalProperties": False}
"""A function without parameters takes none."""
ALL_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})


def parameters_of(function: Mapping[str, Any]) -> Schema:
    """Return the schema of the function's arguments; none without parameters."""
    schema: Schema = function.get("parameters") or NOTHING
    words = set(schema) - FOR_PEOPLE - {"type", "properties", "required"}
    return NOTHING if schema.get("properties") == {} and not words else schema


def moved(schema: Schema, place: str) -> Schema:
    """Move a schema with its references to the JSON pointer `place` of another one."""
    own = str(schema.get("$id", "")).removesuffix("#")
    copy: Schema = json.loads(json.dumps({k: each for k, each in schema.items() if k != "$id"}))
    for part, is_own in parts_of(copy):
        # References within a schema that has a name of its own are to that schema.
        local = str(part.get("$ref")).removeprefix(own)
        if is_own and (local == "#" or local.startswith("#/")):
            part["$ref"] = place + local[1:]
    return copy


def property_of(parameters: Schema, name: str) -> Any:
    """Return the schema of one argument; None if it has none."""
    whole = resolved(parameters, parameters)
    properties = whole.get("properties") if isinstance(whole, dict) else None
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    return whole.get("additionalProperties") if isinstance(whole, dict) else None


def knows(parameters: Schema, name: str) -> bool:
    """Return whether an argument may have the name."""
    whole = resolved(parameters, parameters)
    names = whole.get("properties") if isinstance(whole, dict) else None
    return not names or property_of(parameters, name) not in (None, False)


def types_of(
    schema: Any, root: Schema, known: dict[int, frozenset[str]] | None = None
) -> frozenset[str]:
    """Return the JSON types that the schema allows; numbers include integers.

    known: those of schemas within it, so that each is visited once.
    """
    schema = resolved(schema, root)
    if not isinstance(schema, dict):
        return ALL_TYPES
    known = {} if known is None else known
    if id(schema) in known:
        return known[id(schema)]
    known[id(schema)] = frozenset()  # A schema that is one of its own choices adds none.
    types = ALL_TYPES
    if "type" in schema:
        said = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        named = {name for name in said if isinstance(name, str)}
        types = frozenset(named | ({"integer"} if "number" in named else set()))
        if not types <= ALL_TYPES:
            types = ALL_TYPES
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        types &= {type_of(value) for value in values}
    for word in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(word), list):
            branches = [types_of(one, root, known) for one in schema[word]]
            is_all = word == "allOf"
            types &= ALL_TYPES.intersection(*branches) if is_all else frozenset().union(*branches)
    known[id(schema)] = types
    return types


_TYPES = {type(None): "null", bool: "boolean", int: "integer", str: "string", list: "array"}


def type_of(value: Any) -> str:
    """Return the JSON type of a value; 2.0 is an integer."""
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    return _TYPES.get(type(value), "object")
