"""Tool calls that follow their schemas wherever they are, as a structural tag."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

from control_plane.frontend.http.errors import ApiError
from control_plane.frontend.http.tools.call_forms import CALL_FORMS
from control_plane.frontend.http.tools.call_readers import is_plain_name
from control_plane.frontend.http.tools.tool_schemas import ALL_TYPES, moved, parameters_of, types_of
from control_plane.frontend.text.constraint import FOR_PEOPLE, Schema, resolved

_SEPARATORS = {"item_separator": ", ", "key_separator": ": "}
_SPACED = {"x-guidance": {"whitespace_flexible": False, **_SEPARATORS}}
"""JSON in the spelling of templates for earlier calls."""
_STRING_KEYS = {"type", "enum", "const", "minLength", "maxLength", "pattern", "format", "default"}
"""Words in the schema of a bare string, besides those for people."""
_ANY = "(?s:.*)"
_MAX_WAYS = 1024
"""Most ways to write one value, such as elements of an enum."""


def strict_calls(form: str, functions: list[dict[str, Any]]) -> str:
    """Return the structural tag of text with calls of these functions. Raises ApiError."""
    written = CALL_FORMS[form]
    begin = written.begins[0]
    structures = []
    for number, function in enumerate(functions):
        name = function["name"]
        if not is_plain_name(name):
            raise ApiError(
                f"tools.{number}.function.name is {name!r:.60}; it must have letters, "
                "digits, and . _ - only",
                "tools",
            )
        schema = parameters_of(function)
        try:
            parts = written.parts(name, schema, partial(_part, schema))
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ApiError(
                f"tools.{number}.function.parameters cannot be strict with this model, which "
                f"writes arguments one by one: {error}",
                "tools",
            ) from error
        structures.append({"begin": begin, "parts": parts, "end": written.end})
    return json.dumps({"structures": structures, "triggers": [begin], "between": written.section})


def _part(schema: Schema, name: str = "", end: str = "", never: Sequence[str] = ()) -> Any:
    if not name:
        return _SPACED | moved(schema, "#")
    try:
        values = _values(schema["properties"][name], schema, {"never": never, "end": end})
        either = list(islice(values, _MAX_WAYS + 1))
    except ValueError as error:
        raise ValueError(f"{name!r:.60} {error}") from None
    if len(either) > _MAX_WAYS:
        raise ValueError(f"{name!r:.60} has more than {_MAX_WAYS} choices with texts")
    return {"either": either}


def _values(schema: Any, root: Schema, place: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Yield ways to write a value and its end: strings bare, the rest as JSON.

    Raises ValueError for a string that cannot keep its schema.
    """
    schema = resolved(schema, root)
    types, end = types_of(schema, root), place["end"]
    own = set(schema) - FOR_PEOPLE - {"default"} if isinstance(schema, dict) else set()
    if types == ALL_TYPES and not own:
        yield [{"texts": [_ANY], **place}]
    elif "string" not in types:
        defined = {"$defs": {"all": moved(root, "#/$defs/all")}} if "$ref" in str(schema) else {}
        yield [_SPACED | moved(schema, "#/$defs/all") | defined, end]
    elif len(own) == 1 and (word := next(iter(own))) in ("anyOf", "oneOf"):
        for one in schema[word]:
            yield from _values(one, root, place)
    elif own & {"enum", "const"} and own <= _STRING_KEYS:
        for value in schema.get("enum", [schema.get("const")]):
            yield [value if isinstance(value, str) else _SPACED | {"const": value}, end]
    elif types == {"string"} and own <= _STRING_KEYS:
        low, high = schema.get("minLength", 0), schema.get("maxLength", "")
        pattern = [_anchored(schema["pattern"])] if "pattern" in own else []
        yield [{"texts": [f"(?s:.{{{low},{high}}})", *pattern], **place}]
    elif isinstance(schema.get("type"), list):
        for name in schema["type"]:
            words = own & _STRING_KEYS if name == "string" else own - _STRING_KEYS
            yield from _values({key: schema[key] for key in words} | {"type": name}, root, place)
    else:
        raise ValueError("may be a string that is held to more than a text can be")


def _anchored(pattern: str) -> str:
    found = re.fullmatch(r"\^((?:[^\\^$|\[]|\\.|\[(?:[^\]\\]|\\.)*\])*)\$", pattern)
    if found is None:
        raise ValueError(f"has the pattern {pattern!r:.60}; it must be ^...$ without a choice")
    return found[1]
